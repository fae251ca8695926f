"""LoRA files of other tools as the start of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.build import TINY_WAN, MakeRecipe
from torch import Tensor

from longtake import config
from longtake.config import Recipe
from longtake.errors import ModelError, RecipeError
from longtake.evaluation.export import Format, export
from longtake.models.build import Components, assemble, outline
from longtake.models.lora_files import StoredLora, load_lora, read_lora
from longtake.models.trainable import lora_layers, lora_state
from longtake.models.wan import original_name
from longtake.sampling.sampler import Sampler

_ROOT = Path(__file__).resolve().parents[2]
_LORA = (*TINY_WAN, "trainable.kind=lora", "trainable.rank=4")


def _trained(recipe: Recipe) -> Components:
    """A model whose LoRA does something."""
    parts, generator = assemble(recipe, ["a b"], None), torch.Generator().manual_seed(5)
    for name, weight in parts.model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator)
    return parts


def _started(recipe: Recipe, file: Path) -> dict[str, Tensor]:
    parts = assemble(recipe, ["a b"], None)
    meta = outline(recipe)  # a plan refuses the same
    assert read_lora(file, meta.model, meta.family).keys() == dict(lora_layers(meta.model)).keys()
    load_lora(read_lora(file, parts.model, parts.family), parts.model)
    return lora_state(parts.model)


_EXPORTED: dict[Format, str] = {
    "diffusers": "pytorch_lora_weights.safetensors",
    "peft": "adapter_model.safetensors",
    "comfyui": "",
}


@pytest.mark.parametrize("written", list(_EXPORTED))
@pytest.mark.parametrize("alpha", [4.0, 8.0])
def test_our_own_exports_start_a_run_bitwise(
    small_recipe: MakeRecipe, tmp_path: Path, written: Format, alpha: float
) -> None:
    recipe = small_recipe(*_LORA, f"trainable.alpha={alpha}")
    parts = _trained(recipe)
    out = tmp_path / ("lora.safetensors" if written == "comfyui" else "out")
    export(Sampler(parts, recipe, 0, torch.device("cpu"), "fp32"), out, written)
    file = out / _EXPORTED[written] if _EXPORTED[written] else out
    found, expected = _started(recipe, file), lora_state(parts.model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _as_kohya(state: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """As kohya's musubi-tuner writes it: Wan's own names, without dots, and alpha as a tensor."""
    stored = {}
    for name, value in state.items():
        layer = name.rsplit(".", 2)[0]
        flat = f"lora_unet_{original_name(layer).replace('.', '_')}"
        stored[f"{flat}.lora_{'down' if 'lora_A' in name else 'up'}.weight"] = value
        stored[f"{flat}.alpha"] = torch.tensor(alpha)
    return stored


def test_kohyas_names_and_alpha_are_read_and_a_lower_rank_is_filled_up(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    parts = _trained(small_recipe(*_LORA))
    state = lora_state(parts.model)
    file = tmp_path / "kohya.safetensors"
    text = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": torch.tensor(1.0)}
    save_file(_as_kohya(state, alpha=2.0) | text, file)
    recipe = small_recipe(*_LORA[:-1], "trainable.rank=6", "trainable.alpha=3")
    found = _started(recipe, file)
    for name, value in state.items():
        if "lora_A" in name:
            assert torch.equal(found[name][:4], value)
            assert found[name][4:].abs().max() > 0  # they can train
        else:
            torch.testing.assert_close(found[name][:, :4], value * 2 / 4)
            assert not found[name][:, 4:].any()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda state: {k.replace("blocks.1.", "blocks.7."): v for k, v in state.items()},
            r"4 of its 8 weights fit .* do not: transformer.blocks.7.attn1",
        ),
        (
            lambda state: {k: v[:, :-1] if "lora_A" in k else v for k, v in state.items()},
            r"of another model: its LoRA of blocks.0.attn1.to_k maps 23 to 24",
        ),
        (
            lambda state: {
                k: torch.cat([v] * 2, dim=0 if "lora_A" in k else 1) for k, v in state.items()
            },
            r"rank 8, and trainable.rank is 4. Set trainable.rank = 8",
        ),
        (
            lambda state: {k: v for k, v in state.items() if "lora_B" not in k},
            "lacks lora up",
        ),
        (
            lambda state: {k: v[0] for k, v in state.items()},
            r"of blocks.0.attn1.to_k it has down \[24\], up \[4\]. Expected down \[rank, in\]",
        ),
        (
            lambda state: state | {"transformer.blocks.0.attn1.to_q.alpha": torch.ones(3)},
            r"to_q it has alpha \[3\], down .* and one number as alpha",
        ),
        (
            lambda state: {f"lora_te1_{k}": v for k, v in state.items()},
            "none of its 8 weights is LoRA of this model",
        ),
    ],
)
def test_lora_of_another_model_is_refused_by_name(
    small_recipe: MakeRecipe, tmp_path: Path, change: Any, expected: str
) -> None:
    recipe = small_recipe(*_LORA, "trainable.targets=['attn1.to_q', 'attn1.to_k']")
    state = {f"transformer.{k}": v for k, v in lora_state(_trained(recipe).model).items()}
    file = tmp_path / "other.safetensors"
    save_file({name: value.contiguous() for name, value in change(state).items()}, file)
    meta = outline(recipe)
    with pytest.raises(RecipeError, match=expected):
        read_lora(file, meta.model, meta.family)


def _fused(name: str, width: int, parts: int) -> dict[str, Tensor]:
    """A layer of kohya's FLUX files: one LoRA for several of diffusers' layers."""
    generator, flat = torch.Generator().manual_seed(parts), f"lora_unet_{name}"
    return {
        f"{flat}.lora_down.weight": torch.randn(4, width, generator=generator),
        f"{flat}.lora_up.weight": torch.randn(parts * width, 4, generator=generator),
        f"{flat}.alpha": torch.tensor(2.0),
    }


def test_kohyas_fused_flux_layers_are_divided(tmp_path: Path) -> None:
    """Diffusers' converter knows them at FLUX's own width only; others are refused."""
    file, found = tmp_path / "kohya.safetensors", dict[str, StoredLora]()
    for heads, head_dim in ((4, 32), (24, 128)):
        recipe = config.load(
            _ROOT / "examples" / "tiny_flux_module.toml", _fused_flux(heads, head_dim)
        )
        meta, width = outline(recipe), heads * head_dim
        double = _fused("double_blocks_0_img_attn_qkv", width, 3)
        single = _fused("single_blocks_0_linear1", width, 7)
        save_file(double | single, file)
        if width == 3072:
            found = read_lora(file, meta.model, meta.family)
        else:
            with pytest.raises(RecipeError, match="0 of its 6 weights fit the layers"):
                read_lora(file, meta.model, meta.family)
    for front, stored, names in (
        ("transformer_blocks.0.", double, ("attn.to_q", "attn.to_k", "attn.to_v")),
        (
            "single_transformer_blocks.0.",
            single,
            ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        ),
    ):
        down, up, alpha = stored.values()
        parts = [found[front + name] for name in names]
        change = torch.cat([each.up @ each.down * each.scale for each in parts])
        torch.testing.assert_close(change, up @ down * alpha / 4)


def _fused_flux(heads: int, head_dim: int) -> tuple[str, ...]:
    axes = [head_dim // 4, 3 * head_dim // 8, 3 * head_dim // 8]
    return (
        "data.conditioning={}",
        "model.family=flux",
        "trainable={kind='lora', rank=4, targets=['to_q', 'to_k', 'to_v', 'proj_mlp']}",
        "model.config={num_layers=1, num_single_layers=1, joint_attention_dim=64, "
        f"num_attention_heads={heads}, attention_head_dim={head_dim}, axes_dims_rope={axes}, "
        "pooled_projection_dim=32, guidance_embeds=true}",
    )


def test_a_file_that_is_none_is_refused(small_recipe: MakeRecipe, tmp_path: Path) -> None:
    meta = outline(small_recipe(*_LORA))
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(b"\xff" * 64)
    alpha = {"lora_adapter_metadata": "[16]"}
    save_file({"a": torch.zeros(1)}, tmp_path / "header.safetensors", metadata=alpha)
    for path in (file, tmp_path / "missing.safetensors", tmp_path / "header.safetensors"):
        with pytest.raises(ModelError, match="cannot be read"):
            read_lora(path, meta.model, meta.family)
