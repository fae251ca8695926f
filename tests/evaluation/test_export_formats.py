"""What other tools read of a trained model is the trained model, under the names they expect."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from longtake import config
from longtake.config import TrainableSection
from longtake.errors import RecipeError, RunError
from longtake.evaluation.export import Format, export
from longtake.models.build import assemble
from longtake.models.trainable import lora_state, plain_copy
from longtake.sampling.sampler import Sampler

_CAPTIONS = ["a red ball"]
_TEXT: dict[str, Any] = {
    "kind": "transformers",
    "class_name": "T5EncoderModel",
    "config": {"d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2},
    "max_tokens": 8,
}
_CLIP = {
    "hidden_size": 10,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_FLUX: dict[str, Any] = {
    "buckets": [{"num_frames": 1, "height": 16, "width": 16}],
    "config": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 6, 6],
        "num_layers": 1,
        "num_single_layers": 2,
        "guidance_embeds": True,
    },
    "codec": {
        "class_name": "AutoencoderKL",
        "config": {
            "block_out_channels": [4, 4],
            "layers_per_block": 1,
            "latent_channels": 4,
            "norm_num_groups": 2,
        },
    },
    "text": _TEXT | {"pooled": {"config": _CLIP}},
}
_WAN: dict[str, Any] = {
    "buckets": [{"num_frames": 5, "height": 32, "width": 32}],
    "config": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 16,
        "freq_dim": 8,
        "num_layers": 2,
    },
    "codec": {
        "config": {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
        },
    },
    "text": _TEXT,
}
_SIZES = {"flux": _FLUX, "wan": _WAN}


def _sampler(family: str, dtype: str = "fp32", **trainable: Any) -> Sampler:
    """A tiny model in which all that trains has moved."""
    sizes = _SIZES[family]
    values = {
        "out": "run",
        "data": {"catalog": "catalog.parquet", "buckets": sizes["buckets"]},
        "model": {"family": family, "config": sizes["config"], "dtype": dtype},
        "codec": {"kind": "autoencoder", **sizes["codec"]},
        "text": sizes["text"],
        "trainable": trainable,
        "training": {"steps": 1, "batch_size": 1},
    }
    recipe = config.parse(values, source="test")
    parts, generator = assemble(recipe, _CAPTIONS, None), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    parts.model.eval().requires_grad_(False)
    return Sampler(parts, recipe, 3, torch.device("cpu"), "fp32")


def _base(sampler: Sampler) -> Any:
    """The model as it was before LoRA was trained."""
    recipe = sampler.recipe.model_copy(update={"trainable": TrainableSection()})
    return assemble(recipe, _CAPTIONS, None).model.eval().requires_grad_(False)


def _velocity(sampler: Sampler, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    told = {
        "prompt_embeds": torch.randn(1, 8, 12, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, 10, generator=generator),
        "guidance": torch.tensor([3.5]),
    }
    noisy = torch.randn(1, 4, 1, 8, 8, generator=generator)
    family = sampler.components.family
    return family.predict_velocity(model, noisy, torch.tensor([0.7]), told)


@pytest.fixture(params=["flux", "wan"])
def lora(request: pytest.FixtureRequest) -> Sampler:
    """A model with LoRA whose scale is 8."""
    return _sampler(request.param, kind="lora", rank=2, alpha=16.0)


def test_peft_makes_the_trained_model_of_its_base(lora: Sampler, tmp_path: Path) -> None:
    """From an adapter folder; the base alone is another model."""
    from peft import PeftModel

    export(lora, tmp_path / "adapter", "peft")
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    base, trained = _base(lora), _velocity(lora, lora.components.model)
    assert (_velocity(lora, base) - trained).abs().max() > 1e-2
    with_lora: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    found = _velocity(lora, with_lora.merge_and_unload())
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-5)


def test_diffusers_loads_the_adapter_folder_too(lora: Sampler, tmp_path: Path) -> None:
    """By the names that it is told, with the same scale."""
    export(lora, tmp_path / "adapter", "peft")
    base = _base(lora)
    named = {"prefix": "base_model.model", "weight_name": "adapter_model.safetensors"}
    base.load_lora_adapter(str(tmp_path / "adapter"), **named)
    trained = _velocity(lora, lora.components.model)
    torch.testing.assert_close(_velocity(lora, base), trained, rtol=1e-4, atol=1e-5)


def _pipeline(sampler: Sampler) -> Any:
    import diffusers

    return {"flux": diffusers.FluxPipeline, "wan": diffusers.WanPipeline}[
        sampler.recipe.model.family
    ]


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_lora_for_comfyui_is_read_back_by_diffusers(family: str, tmp_path: Path) -> None:
    """Every name and every number; here all linear layers have LoRA."""
    sampler = _sampler(family, kind="lora", rank=2, alpha=3.0, targets=["*"])
    export(sampler, tmp_path / "lora.safetensors", "comfyui")
    read = _pipeline(sampler).lora_state_dict(str(tmp_path / "lora.safetensors"))
    wanted = lora_state(sampler.components.model)
    assert read.keys() == {f"transformer.{name}" for name in wanted}
    assert all(torch.equal(read[f"transformer.{name}"], value) for name, value in wanted.items())


def test_lora_for_comfyui_is_the_trained_model(lora: Sampler, tmp_path: Path) -> None:
    """Read by diffusers into the base."""
    export(lora, tmp_path / "lora.safetensors", "comfyui")
    base = _base(lora)
    base.load_lora_adapter(_pipeline(lora).lora_state_dict(str(tmp_path / "lora.safetensors")))
    trained = _velocity(lora, lora.components.model)
    torch.testing.assert_close(_velocity(lora, base), trained, rtol=1e-4, atol=1e-5)


def test_wans_lora_has_the_names_of_its_release(tmp_path: Path) -> None:
    """Below the part of ComfyUI that it is for, and without an alpha."""
    sampler = _sampler("wan", kind="lora", rank=2)
    export(sampler, tmp_path / "lora.safetensors", "comfyui")
    layers = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    assert load_file(tmp_path / "lora.safetensors").keys() == {
        f"diffusion_model.blocks.{block}.{layer}.lora_{matrix}.weight"
        for block in (0, 1)
        for layer in layers
        for matrix in "AB"
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_whole_wan_for_comfyui_is_read_back_by_diffusers(dtype: str, tmp_path: Path) -> None:
    """Every name and every number, in the dtype that it is kept in."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    sampler = _sampler("wan", dtype)
    export(sampler, tmp_path / "wan.safetensors", "comfyui")
    read = convert_wan_transformer_to_diffusers(load_file(tmp_path / "wan.safetensors"))
    wanted = sampler.components.model.state_dict()
    torch.testing.assert_close(read, dict(wanted), rtol=0, atol=0)


def test_a_whole_flux_for_comfyui_has_the_names_of_diffusers(tmp_path: Path) -> None:
    """Which ComfyUI looks for where it does not find those of the release."""
    sampler = _sampler("flux", "bf16")
    export(sampler, tmp_path / "new" / "flux.safetensors", "comfyui")
    read = load_file(tmp_path / "new" / "flux.safetensors")
    wanted = sampler.components.model.state_dict()
    torch.testing.assert_close(read, dict(wanted), rtol=0, atol=0)
    assert read["transformer_blocks.0.attn.norm_added_k.weight"].dtype == torch.bfloat16


def test_an_added_module_is_beside_lora_or_named_as_left_out(
    own_module: Callable[[str], str], tmp_path: Path
) -> None:
    """A folder has room for its weights; one file has not, and the verb says so."""
    module = own_module("self.change(given)")
    sampler = _sampler("flux", kind="lora", rank=2, module=module)
    lora = lora_state(sampler.components.model)
    assert export(sampler, tmp_path / "adapter", "peft") == []
    added = load_file(tmp_path / "adapter" / "added_module.safetensors")
    assert {"style", "first.weight"} <= added.keys()
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(lora)
    where, left_out = export(sampler, tmp_path / "lora.safetensors", "comfyui")
    assert "models/loras" in where
    assert f"The added module {module} is not in it" in left_out
    assert len(load_file(tmp_path / "lora.safetensors")) == len(lora)

    beside_all = _sampler("flux", kind="full", module=module)
    export(beside_all, tmp_path / "whole.safetensors", "comfyui")
    plain = plain_copy(beside_all.components.model).state_dict()
    assert load_file(tmp_path / "whole.safetensors").keys() == plain.keys()


@pytest.mark.parametrize(
    ("wanted", "trainable", "message"),
    [
        ("peft", {}, r"peft holds LoRA alone, .* trained none: trainable\.kind is full\."),
        ("peft", {"module": "my:Module"}, r"trained none: trainable\.kind is frozen\."),
        ("comfyui", {"module": "my:Module"}, r"trained the module my:Module alone, and ComfyUI"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    wanted: Format, trainable: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """In a sentence that says what can; nothing is written."""
    sampler = _sampler("wan")
    changed = sampler.recipe.model_copy(update={"trainable": TrainableSection(**trainable)})
    with pytest.raises(RecipeError, match=message):
        export(replace(sampler, recipe=changed), tmp_path / "x.safetensors", wanted)
    assert not list(tmp_path.iterdir())


def test_a_file_for_comfyui_is_named_like_one_and_overwrites_none(tmp_path: Path) -> None:
    """So that ComfyUI finds it, and nobody's weights are lost."""
    sampler = _sampler("wan")
    with pytest.raises(RunError, match=r"--out \S+x: expected the name of a \.safetensors file"):
        export(sampler, tmp_path / "x", "comfyui")
    (tmp_path / "mine.safetensors").write_text("mine")
    with pytest.raises(RunError, match=r"mine\.safetensors is there already\. Name a new file\."):
        export(sampler, tmp_path / "mine.safetensors", "comfyui")
    with pytest.raises(RunError, match=r"cannot be written: .*\. Choose another place"):
        export(sampler, tmp_path / "mine.safetensors" / "x.safetensors", "comfyui")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.safetensors"]
