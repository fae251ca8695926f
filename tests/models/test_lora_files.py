"""LoRA files of other tools as the start of a run."""

import copy
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import diffusers
import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tests.build import TINY_WAN, MakeRecipe, fill_lora
from torch import Tensor, nn

from longtake import config
from longtake.config import Recipe
from longtake.errors import ModelError, RecipeError
from longtake.evaluation.export import Format, export
from longtake.models.base import family
from longtake.models.components import Components, assemble, outline
from longtake.models.lora_files import load_lora, read_lora
from longtake.models.lora_kinds import StoredLokr, StoredLora
from longtake.models.trainable import (
    adapter_layers,
    lora_layers,
    lora_state,
    make_trainable,
    plain_copy,
)
from longtake.models.wan import original_name
from longtake.sampling.sampler import Sampler

_LORA = (*TINY_WAN, "trainable.kind=lora", "trainable.rank=4")


def _trained(recipe: Recipe) -> Components:
    """A model whose LoRA does something."""
    parts = assemble(recipe, ["a b"], None)
    fill_lora(parts.model)
    return parts


def _exported_state(recipe: Recipe) -> dict[str, Tensor]:
    return {f"transformer.{k}": v for k, v in lora_state(_trained(recipe).model).items()}


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
            r"rank 8 for .*, and trainable.rank, or .* is 4. Set trainable.rank = 8",
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
    state, file = _exported_state(recipe), tmp_path / "other.safetensors"
    save_file({name: value.contiguous() for name, value in change(state).items()}, file)
    meta = outline(recipe)
    with pytest.raises(RecipeError, match=expected):
        read_lora(file, meta.model, meta.family)


def _lora(rows: int, columns: int, rank: int = 4) -> dict[str, Tensor]:
    up, down = torch.randn(rows, rank), torch.randn(rank, columns)
    return {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(2.0)}


def _loha(rows: int, columns: int) -> dict[str, Tensor]:
    sides = {f"hada_w{n}_a": torch.randn(rows, 3) for n in (1, 2)}
    return (
        sides
        | {f"hada_w{n}_b": torch.randn(3, columns) for n in (1, 2)}
        | {"alpha": torch.tensor(2.0)}
    )


def _lokr(
    first: tuple[int, int], ranks: tuple[int | None, int | None], second: tuple[int, int]
) -> dict[str, Tensor]:
    """LoKr whose second factor, and first, are two matrices of a rank, or one for None."""
    made = {"alpha": torch.tensor(1.0)}
    for name, (rows, columns), rank in zip(("w2", "w1"), (second, first), ranks, strict=True):
        if rank is None:
            made[f"lokr_{name}"] = torch.randn(rows, columns)
        else:
            made[f"lokr_{name}_a"] = torch.randn(rows, rank)
            made[f"lokr_{name}_b"] = torch.randn(rank, columns)
    return made


def _lycoris_delta(parts: dict[str, Tensor]) -> Tensor:
    """What LyCORIS and ComfyUI add to a weight: lycoris/modules/locon.py, loha.py and lokr.py.

    Alpha is divided by the rank of the low-rank matrices; without it, and for LoKr of two full
    matrices, the scale is 1.
    """
    if "lora_up.weight" in parts:
        rank, delta = len(parts["lora_down.weight"]), parts["lora_up.weight"]
        delta = delta @ parts["lora_down.weight"]
    elif "hada_w1_a" in parts:
        rank = len(parts["hada_w1_b"])
        first, second = (parts[f"hada_w{n}_a"] @ parts[f"hada_w{n}_b"] for n in (1, 2))
        delta = first * second
    else:
        factors, rank = [], 0
        for name in ("lokr_w1", "lokr_w2"):
            factor = parts.get(name)
            if factor is None:
                factor, rank = parts[f"{name}_a"] @ parts[f"{name}_b"], len(parts[f"{name}_b"])
            factors.append(factor)
        delta = torch.kron(*factors)
    return delta * (parts["alpha"] / rank if "alpha" in parts and rank else 1)


def _save_for_each(file: Path, layers: Iterable[str], parts: dict[str, Tensor]) -> None:
    """Write the same tensors for each layer under LyCORIS' names for Wan."""
    flat = [f"lycoris_{original_name(layer).replace('.', '_')}" for layer in layers]
    save_file({f"{name}.{k}": v.clone() for name in flat for k, v in parts.items()}, file)


_TINY = 24  # rows and columns of tiny Wan's attention
_FILES: dict[str, tuple[Callable[[], dict[str, Tensor]], int]] = {
    "loha": (lambda: _loha(_TINY, _TINY), 9),
    "loha without alpha": (lambda: _without(_loha(_TINY, _TINY), "alpha"), 9),
    "lokr": (lambda: _lokr((4, 4), (2, None), (6, 6)), 8),
    "lokr of another factor": (lambda: _lokr((2, 3), (2, None), (12, 8)), 4),
    "lokr of factor 3": (lambda: _lokr((3, 3), (2, None), (8, 8)), 6),
    "lokr of low rank": (lambda: _lokr((4, 4), (2, 2), (6, 6)), 4),
    "lokr with a full second factor": (lambda: _lokr((12, 12), (None, 1), (2, 2)), 2),
    "lokr of two full matrices": (
        lambda: _lokr((4, 4), (None, None), (6, 6)) | {"alpha": torch.tensor(1e10)},
        24,
    ),
    "lokr without alpha": (lambda: _without(_lokr((4, 4), (2, None), (6, 6)), "alpha"), 8),
}


def _without(parts: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in parts.items() if key != name}


@pytest.mark.parametrize("stored", list(_FILES))
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_loha_and_lokr_become_lora_of_exactly_their_strength(
    small_recipe: MakeRecipe, tmp_path: Path, stored: str, kind: str
) -> None:
    make, rank = _FILES[stored]
    parts = assemble(
        small_recipe(*TINY_WAN, f"trainable={{kind='{kind}', rank={rank}, alpha=3}}"), ["a b"], None
    )
    layers, file = dict(adapter_layers(parts.model)), tmp_path / "a.safetensors"
    tensors = make()
    if kind == "dora":
        tensors["dora_scale"] = torch.rand(_TINY, 1) + 0.5
    _save_for_each(file, layers, tensors)
    load_lora(read_lora(file, parts.model, parts.family), parts.model)
    plain = plain_copy(parts.model)
    for name, layer in layers.items():
        changed = layer.get_base_layer().weight + _lycoris_delta(tensors)
        if kind == "dora":
            changed = tensors["dora_scale"] * changed / changed.norm(dim=1, keepdim=True)
        found = plain.get_submodule(name).weight
        torch.testing.assert_close(found, changed, rtol=1e-5, atol=1e-5)
    lower = outline(small_recipe(*TINY_WAN, f"trainable={{kind='{kind}', rank={rank - 1}}}"))
    with pytest.raises(RecipeError, match=f"rank {rank}, as LoRA .* trainable.rank = {rank} or"):
        read_lora(file, lower.model, lower.family)


@pytest.mark.parametrize(
    ("stored", "rank", "refused"),
    [
        ("lokr", 2, ""),
        ("lokr", 5, ""),  # filled up where the layer is of a higher rank, or one matrix
        ("lokr without alpha", 2, ""),
        ("lokr of low rank", 2, ""),
        ("lokr of two full matrices", 5, ""),
        ("lokr", 1, "trainable.rank = 2 or more"),
        ("lokr of two full matrices", 2, "trainable.rank = 3 or more"),
        (
            "lokr of factor 3",
            2,
            r"Set trainable.factor = 3 to train it as it is, or .*\"lora\" and .* = 6",
        ),
        (
            "lokr of another factor",
            2,
            r"factors of 2 x 3 and 12 x 8, .* 4 x 4 and 6 x 6.* \"lora\" and trainable.rank = 4",
        ),
        ("loha", 2, r"holds LoHa, .* trainable.kind = \"lora\" and trainable.rank = 9"),
    ],
)
def test_lokr_starts_lokr_of_its_factors(
    small_recipe: MakeRecipe, tmp_path: Path, stored: str, rank: int, refused: str
) -> None:
    recipe = small_recipe(*TINY_WAN, f"trainable={{kind='lokr', rank={rank}, alpha=3}}")
    parts, file = assemble(recipe, ["a b"], None), tmp_path / "a.safetensors"
    layers, tensors = dict(adapter_layers(parts.model)), _FILES[stored][0]()
    _save_for_each(file, layers, tensors)
    if refused:
        with pytest.raises(RecipeError, match=refused):
            read_lora(file, parts.model, parts.family)
        return
    load_lora(read_lora(file, parts.model, parts.family), parts.model)
    plain = plain_copy(parts.model)
    for name, layer in layers.items():
        expected = layer.get_base_layer().weight + _lycoris_delta(tensors)
        torch.testing.assert_close(plain.get_submodule(name).weight.data, expected)


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_lycoris_files_that_do_not_fit_are_refused_by_name(
    small_recipe: MakeRecipe, tmp_path: Path, kind: str
) -> None:
    meta, file = (
        outline(small_recipe(*TINY_WAN, "trainable={kind='lora', rank=16}")),
        tmp_path / "a",
    )
    whole = {"loha": _loha(_TINY, _TINY), "lokr": _lokr((4, 4), (2, 2), (6, 6))}[kind]
    part = {"loha": "hada_w2_b", "lokr": "lokr_w2_b"}[kind]
    changes: list[tuple[dict[str, Tensor], str]] = [
        (_without(whole, part), f"lacks {part}"),
        (whole | {part: whole[part][:-1]}, r"it has .* Expected (hada|lokr)_w1"),
        (whole | {part: whole[part].clone().fill_(float("nan"))}, "not all finite"),
        (whole | {"alpha": torch.zeros(())}, "alpha is 0"),
        (whole | {f"{part[:5]}t2": torch.ones(2, 2)}, f"do not: .*{part[:5]}t2"),
        (whole | {"dora_scale": torch.ones(1, _TINY)}, "holds DoRA"),
    ]
    for tensors, expected in changes:
        _save_for_each(file, dict(adapter_layers(meta.model)), tensors)
        with pytest.raises(RecipeError, match=expected):
            read_lora(file, meta.model, meta.family)


@pytest.mark.parametrize("written", ["peft", "comfyui"])
@pytest.mark.parametrize("rank", [2, 16])
def test_our_own_lokr_exports_start_a_run_bitwise(
    small_recipe: MakeRecipe, tmp_path: Path, written: Format, rank: int
) -> None:
    recipe = small_recipe(*TINY_WAN, f"trainable={{kind='lokr', rank={rank}, alpha=4}}")
    parts = _trained(recipe)
    out = tmp_path / ("lokr.safetensors" if written == "comfyui" else "out")
    export(Sampler(parts, recipe, 0, torch.device("cpu"), "fp32"), out, written)
    fresh = assemble(recipe, ["a b"], None)
    file = out / _EXPORTED[written] if _EXPORTED[written] else out
    load_lora(read_lora(file, fresh.model, fresh.family), fresh.model)
    torch.testing.assert_close(lora_state(fresh.model), lora_state(parts.model), rtol=0, atol=0)


def test_plain_lora_starts_dora_without_a_change_of_its_weights(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    lora = _trained(small_recipe(*_LORA))
    save_file({f"transformer.{k}": v for k, v in lora_state(lora.model).items()}, tmp_path / "a")
    dora = assemble(small_recipe(*TINY_WAN, "trainable={kind='dora', rank=4}"), ["a b"], None)
    load_lora(read_lora(tmp_path / "a", dora.model, dora.family), dora.model)
    found, expected = plain_copy(dora.model), plain_copy(lora.model)
    torch.testing.assert_close(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_loha_and_lokr_of_peft_begin_at_the_strength_that_peft_merges(
    small_recipe: MakeRecipe, tmp_path: Path, kind: str
) -> None:
    parts = assemble(small_recipe(*TINY_WAN, "trainable={kind='lora', rank=24}"), ["a b"], None)
    targets, base = list(dict(adapter_layers(parts.model))), plain_copy(parts.model)
    for rank in (2, 3):  # at 3 LoKr has two full matrices, whose alpha counts in peft
        options = {"r": rank, "alpha": 8, "target_modules": targets, "init_weights": False}
        made: Any = {"loha": LoHaConfig, "lokr": LoKrConfig}[kind](**options)
        theirs = get_peft_model(copy.deepcopy(base), made)
        theirs.save_pretrained(str(tmp_path / str(rank)))
        file = tmp_path / str(rank) / "adapter_model.safetensors"
        load_lora(read_lora(file, parts.model, parts.family), parts.model)
        expected = theirs.merge_and_unload().state_dict()
        found = plain_copy(parts.model).state_dict()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


_ATTENTION = {
    "double_blocks_0_img_attn_qkv": tuple(f"attn.to_{n}" for n in "qkv"),
    "double_blocks_0_txt_attn_qkv": tuple(f"attn.add_{n}_proj" for n in "qkv"),
    "double_blocks_0_img_attn_proj": ("attn.to_out.0",),
}
_FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "flux": {
        **_ATTENTION,
        "single_blocks_0_linear1": (*(f"attn.to_{n}" for n in "qkv"), "proj_mlp"),
    },
    "flux2": {
        **_ATTENTION,
        "double_blocks_0_txt_attn_proj": ("attn.to_add_out",),
        "double_blocks_0_img_mlp_0": ("ff.linear_in",),
        "double_blocks_0_img_mlp_2": ("ff.linear_out",),
        "double_blocks_0_txt_mlp_0": ("ff_context.linear_in",),
        "double_blocks_0_txt_mlp_2": ("ff_context.linear_out",),
        "single_blocks_0_linear1": ("attn.to_qkv_mlp_proj",),
        "single_blocks_0_linear2": ("attn.to_out",),
    },
}
"""kohya's names, by family, with the layers that they join."""


def _flux(name: str, kind: Literal["lora", "dora"]) -> nn.Module:
    is_first = name == "flux"
    make: Any = diffusers.FluxTransformer2DModel if is_first else diffusers.Flux2Transformer2DModel
    sized = partial(make, num_layers=1, num_single_layers=1, in_channels=4, joint_attention_dim=8)
    rope = (2, 3, 3) if is_first else (2, 2, 2, 2)
    model: nn.Module = sized(num_attention_heads=2, attention_head_dim=8, axes_dims_rope=rope)
    targets = ("*.attn.*", "*.proj_mlp" if is_first else "*.ff*")
    section = config.TrainableSection(kind=kind, rank=16, targets=targets)
    make_trainable(model, family(name), section, 4)
    return model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("flux", kind) for kind in ("lora", "split_qkv", "dora", "loha", "lokr")),
        *(("flux2", kind) for kind in ("lora", "dora")),
    ],
)
def test_kohyas_fused_flux_layers_are_divided_at_their_strength(
    tmp_path: Path, name: str, kind: str
) -> None:
    model = _flux(name, "dora" if kind == "dora" else "lora")
    stored, expected = dict[str, Tensor](), {}
    for flat, names in _FUSED[name].items():
        front = f"{'single_' * flat.startswith('single')}transformer_blocks.0."
        layers = [model.get_submodule(front + each) for each in names]
        weight = torch.cat([layer.get_parameter("base_layer.weight") for layer in layers])
        rows, width = weight.shape
        if kind == "loha":
            tensors = _loha(rows, width)
        elif kind == "lokr":
            tensors = _lokr((rows // 8, 2), (2, None), (8, 8))
        else:
            tensors = _lora(rows, width, rank=12)
        if kind == "split_qkv" and len(names) == 3:
            own = torch.eye(3).repeat_interleave(width, 0).repeat_interleave(4, 1)
            tensors["lora_up.weight"] *= own
        changed = weight + _lycoris_delta(tensors)
        if kind == "dora":
            tensors["dora_scale"] = torch.rand(rows, 1) + 0.5
            changed = tensors["dora_scale"] * changed / changed.norm(dim=1, keepdim=True)
        stored |= {f"lora_unet_{flat}.{key}": value for key, value in tensors.items()}
        heights = [len(layer.get_parameter("base_layer.weight")) for layer in layers]
        for each, part in zip(names, torch.split(changed, heights), strict=True):
            expected[front + each] = part
    save_file(stored, tmp_path / "kohya.safetensors")
    lora = read_lora(tmp_path / "kohya.safetensors", model, family(name))
    load_lora(lora, model)
    plain = plain_copy(model)
    for layer, part in expected.items():
        torch.testing.assert_close(plain.get_submodule(layer).weight.data, part)
    if kind == "split_qkv":
        assert lora["transformer_blocks.0.attn.to_q"].rank == 4
        assert lora["single_transformer_blocks.0.attn.to_q"].rank == 12


@pytest.mark.parametrize(
    "names",
    [
        ("diffusion_model.double_blocks.0.img_attn.qkv", "transformer_blocks.0.attn.to_k"),
        ("transformer_blocks.0.attn.to_k", "transformer.transformer_blocks.0.attn.to_k"),
    ],
)
def test_a_layer_that_a_file_has_twice_is_refused_by_name(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    rows = {name: 48 if "qkv" in name else 16 for name in names}
    stored = {f"{n}.{key}": v for n in names for key, v in _lora(rows[n], 16, rank=2).items()}
    save_file(stored, tmp_path / "twice.safetensors")
    with pytest.raises(RecipeError, match=r"LoRA of transformer_blocks\.0\.attn\.to_k twice"):
        read_lora(tmp_path / "twice.safetensors", _flux("flux", "lora"), family("flux"))


def test_a_file_that_is_none_is_refused(small_recipe: MakeRecipe, tmp_path: Path) -> None:
    meta = outline(small_recipe(*_LORA))
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(b"\xff" * 64)
    alpha = {"lora_adapter_metadata": "[16]"}
    save_file({"a": torch.zeros(1)}, tmp_path / "header.safetensors", metadata=alpha)
    for path in (file, tmp_path / "missing.safetensors", tmp_path / "header.safetensors"):
        with pytest.raises(ModelError, match="cannot be read"):
            read_lora(path, meta.model, meta.family)


_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lora_alpha": 16},
    "rslora": {"lora_alpha": 8, "use_rslora": True},
    "alpha_pattern": {"lora_alpha": 8, "alpha_pattern": {"to_q": 32, "attn1.to_k": 2}},
    "rank_pattern": {"lora_alpha": 8, "rank_pattern": {"to_q": 4}},
    "dora": {"lora_alpha": 16, "use_dora": True},
}


@pytest.mark.parametrize("kind", list(_SETTINGS))
def test_files_of_peft_and_diffusers_begin_at_the_strength_that_peft_merges(
    small_recipe: MakeRecipe, tmp_path: Path, kind: str
) -> None:
    ours = "dora" if kind == "dora" else "lora"
    recipe = small_recipe(*TINY_WAN, f"trainable={{kind='{ours}', rank=8}}")
    parts = assemble(recipe, ["a b"], None)
    settings = LoraConfig(r=8, target_modules=parts.family.block.lora_targets, **_SETTINGS[kind])
    theirs: Any = plain_copy(parts.model)
    theirs.add_adapter(settings)
    fill_lora(theirs)
    theirs.save_lora_adapter(tmp_path / "model")
    diffusers.WanPipeline.save_lora_weights(
        tmp_path / "pipeline",
        transformer_lora_layers=get_peft_model_state_dict(theirs),
        transformer_lora_adapter_metadata=theirs.peft_config["default"].to_dict(),
    )
    by_peft = get_peft_model(plain_copy(parts.model), settings)
    by_peft.load_state_dict({f"base_model.model.{k}": v for k, v in theirs.state_dict().items()})
    by_peft.save_pretrained(str(tmp_path / "peft"))
    merged = copy.deepcopy(theirs)
    for _, layer in adapter_layers(merged):
        layer.merge()
    for file in sorted(tmp_path.glob("*/*.safetensors")):
        load_lora(read_lora(file, parts.model, parts.family), parts.model)
        found = plain_copy(parts.model)
        for name, layer in adapter_layers(merged):
            expected = layer.get_base_layer().weight
            torch.testing.assert_close(found.get_submodule(name).weight, expected, msg=str(file))


def test_what_a_file_says_of_its_strength_is_understood_or_refused_by_name(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = small_recipe(*_LORA, "trainable.targets=['attn1.to_q']")
    state, meta, number = _exported_state(recipe), outline(recipe), 0
    first = next(iter(state))

    def refused(
        beside: str | None = None,
        header: dict[str, Any] | str | None = None,
        change: dict[str, Tensor] | None = None,
    ) -> str:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        if beside is not None:
            (folder / "adapter_config.json").write_text(beside)
        text = header if isinstance(header, str) else json.dumps(header)
        metadata = None if header is None else {"lora_adapter_metadata": text}
        save_file(state | (change or {}), folder / "a.safetensors", metadata)
        with pytest.raises((RecipeError, ModelError)) as caught:
            read_lora(folder / "a.safetensors", meta.model, meta.family)
        assert len(str(caught.value)) < 1000
        return str(caught.value)

    for name, value in {
        "lora_bias": True,
        "fan_in_fan_out": True,
        "bias": "all",
        "init_lora_weights": "pissa",
        "peft_type": "LOHA",
        "an_option_of_next_year": 3,
        "use_rslora": "yes",
        "alpha_pattern": {".*(to_q)+": 3},
        "rank_pattern": 7,
    }.items():
        assert f"{name} = {value}"[:40] in refused(header={"lora_alpha": 4, name: value})
    assert "lack lora_alpha" in refused(json.dumps({"r": 4}))
    assert "rank 8 for" in refused(json.dumps({"r": 8, "lora_alpha": 8}))
    assert "lacks lora magnitude" in refused(header={"lora_alpha": 4, "use_dora": True})
    for alpha in (float("nan"), float("inf"), 1e308, 0, -3, "4", True):
        assert "alpha is" in refused(header={"transformer.lora_alpha": alpha})
    assert "alpha is nan" in refused(
        change={first.replace("lora_A.weight", "alpha"): torch.tensor(float("nan"))}
    )
    for damaged in ('{"lora_alpha": 16', "[16]", "[" * 100_000):
        assert "adapter_config.json cannot be read" in refused(damaged)
        assert "header" in refused(header=damaged)
    for value in (float("nan"), float("inf")):
        assert "finite" in refused(change={first: state[first].clone().fill_(value)})
    assert "torch.int8" in refused(change={first: state[first].to(torch.int8)})
    assert "do not: xxxx" in refused(change={"x" * 2**20: torch.zeros(1)})
    for name in ("a.safetensors", "adapter_config.json"):
        folder = tmp_path / f"fifo_{name}"
        folder.mkdir()
        save_file(state, folder / "a.safetensors")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ModelError, match="named pipe"):
            read_lora(folder / "a.safetensors", meta.model, meta.family)


def test_names_of_other_trainers_that_are_plain_renamings_are_read(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = small_recipe(*_LORA)
    parts, file = _trained(recipe), tmp_path / "theirs.safetensors"
    expected = lora_state(parts.model)
    for front, is_flat, down, up in (
        ("", False, "lora_A.default", "lora_B.default"),  # DiffSynth
        ("", False, "lora_A", "lora_B"),
        ("lora_unet__", True, "lora_down", "lora_up"),  # VideoX-Fun
        ("lycoris_", True, "lora_down", "lora_up"),
    ):
        stored = {}
        for name, value in expected.items():
            layer, kind = original_name(name.rsplit(".", 2)[0]), down if "lora_A" in name else up
            stored[f"{front}{layer.replace('.', '_') if is_flat else layer}.{kind}.weight"] = value
        save_file(stored, file)
        torch.testing.assert_close(_started(recipe, file), expected, rtol=0, atol=0)
    save_file({"lycoris_blocks_0_self_attn_q.oft_blocks": torch.zeros(2, 2)}, file)
    with pytest.raises(RecipeError, match=r"lycoris_blocks_0_self_attn_q\.oft_blocks"):
        _started(recipe, file)


def test_of_a_file_for_both_experts_the_half_of_the_recipes_expert_is_read(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = small_recipe(*_LORA, "trainable.targets=['attn1.to_q']")
    parts, file = outline(recipe), tmp_path / "both.safetensors"
    high = _exported_state(recipe)
    low = {f"transformer_2.{k.removeprefix('transformer.')}": v + 1 for k, v in high.items()}
    alphas = {"transformer.lora_alpha": 4, "transformer_2.lora_alpha": 8}
    save_file(high | low, file, {"lora_adapter_metadata": json.dumps(alphas)})
    ai_toolkit = {f"diffusion_model.transformer_1.{k[12:]}": v for k, v in high.items()}
    ai_toolkit |= {f"diffusion_model.transformer_2.{k[14:]}": v for k, v in low.items()}
    save_file(ai_toolkit, tmp_path / "ai_toolkit.safetensors")
    for expert, weights, scale in (("high", high, 1), ("low", low, 2)):
        found = read_lora(file, parts.model, parts.family, expert)  # type: ignore[arg-type]
        assert {each.scale for each in found.values()} == {scale}
        assert torch.equal(_down(found), next(iter(weights.values())))
        theirs = tmp_path / "ai_toolkit.safetensors"
        found = read_lora(theirs, parts.model, parts.family, expert)  # type: ignore[arg-type]
        assert torch.equal(_down(found), next(iter(weights.values())))
    with pytest.raises(RecipeError, match=r"Set model\.expert"):
        read_lora(file, parts.model, parts.family)


def _down(found: dict[str, StoredLora | StoredLokr]) -> Tensor:
    lora = found["blocks.0.attn1.to_q"]
    assert isinstance(lora, StoredLora)
    return lora.down


def test_dora_for_comfyui_has_the_trained_strength_there_and_starts_a_run(
    small_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = small_recipe(*TINY_WAN, "trainable={kind='dora', rank=4, alpha=8}")
    parts, file = _trained(recipe), tmp_path / "dora.safetensors"
    plain, trained = copy.deepcopy(parts.model), plain_copy(parts.model)
    export(Sampler(parts, recipe, 0, torch.device("cpu"), "fp32"), file, "comfyui")
    stored = load_file(file)
    for name, layer in adapter_layers(plain):
        key, weight = f"diffusion_model.{original_name(name)}", layer.get_base_layer().weight
        changed = weight + stored[f"{key}.lora_B.weight"] @ stored[f"{key}.lora_A.weight"]
        # ComfyUI, comfy/weight_adapter/base.py, weight_decompose with a column as dora_scale
        there = changed * stored[f"{key}.dora_scale"] / weight.norm(dim=1, keepdim=True)
        torch.testing.assert_close(there, trained.get_submodule(name).weight)
    torch.testing.assert_close(_started(recipe, file), lora_state(parts.model))
