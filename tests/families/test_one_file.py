"""One safetensors or GGUF file as base: the weights of a release, in each layout, to the bit."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.families.originals import ORIGINAL, flux, minimax_h3
from tests.families.row import Row
from tests.families.rows import ONE_OF_EACH, transformer_class
from tests.families.tiny import Tiny
from tests.models.gguf_files import write_as_gguf
from tests.models.tiny import make_recipe
from torch import Tensor, nn

from longtake.config import Recipe
from longtake.errors import ModelError, RecipeError
from longtake.models.components import Source, assemble, outline
from longtake.models.quantized import QuantizedLinear
from longtake.models.review import review_model
from longtake.models.stored_weights import Rows, StoredTensor, find_in_one_file, refuse_misfits
from longtake.models.weight_files import quantized_again

_ORIGINAL = [row for row in ONE_OF_EACH if transformer_class(row) in ORIGINAL]
_WITH_JOINED = next(r for r in _ORIGINAL if transformer_class(r) == "ZImageTransformer2DModel")
_COMFYUI = "model.diffusion_model."


def _released(tiny: Tiny) -> dict[str, Tensor]:
    (file,) = (tiny.folder / "release" / "transformer").glob("*.safetensors")
    return load_file(file)


def _original(tiny: Tiny) -> dict[str, Tensor]:
    named = ORIGINAL[transformer_class(tiny.row)](_released(tiny))
    return {name: value.contiguous() for name, value in named.items()}


def _recipe(tiny: Tiny, weights: Mapping[str, Tensor], file: Path, **model: Any) -> Recipe:
    save_file(dict(weights), file)
    release = str(tiny.folder / "release")
    if tiny.row.family == "minimax_h3":
        model = {"qkv_layout": "stacked"} | model
    return tiny.recipe(model={"pretrained": str(file), "config_from": release, **model})


def _loaded(recipe: Recipe, source: Source = "here") -> nn.Module:
    parts = assemble(recipe, (), None, frozen_parts=False, weights=source)
    assert bool(parts.unfilled.parameters) == (source == "files")
    parts.unfilled.give_memory(parts.model, torch.device("cpu"))
    parts.unfilled.fill()
    return parts.model


def _assert_equal(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("row", _ORIGINAL, ids=transformer_class)
def test_an_original_file_gives_the_weights_of_the_release(
    row: Row, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    """ComfyUI's prefix tells them from those of other parts, such as a VAE's."""
    tiny = tiny_of(row)
    named = {f"{_COMFYUI}{name}": value for name, value in _original(tiny).items()}
    vae = {"first_stage_model.decoder.conv_in.weight": torch.ones(3)}
    recipe = _recipe(tiny, named | vae, tmp_path / "model.safetensors")
    _assert_equal(_loaded(recipe, "files"), _released(tiny))


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=transformer_class)
def test_a_file_may_have_the_names_of_diffusers(
    row: Row, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    tiny = tiny_of(row)
    _assert_equal(
        _loaded(_recipe(tiny, _released(tiny), tmp_path / "model.safetensors")), _released(tiny)
    )


def test_black_forest_labs_names_of_flux_1(tmp_path: Path) -> None:
    """Diffusers' converter takes the release's width alone: of its rows one column is enough."""
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    columns = {
        name: torch.randn(value.shape[:1] + (1,) * (value.dim() - 1))
        for name, value in model.state_dict().items()
    }
    file = tmp_path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in flux(columns).items()}, file)
    with safe_open(file, "pt") as opened:
        found = {n: each.read(opened) for n, each in find_in_one_file(file, model).items()}
    torch.testing.assert_close(found, columns, rtol=0, atol=0)


_H4 = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
Header = dict[str, str] | None


def _in_8_bits(
    weights: Mapping[str, Tensor], by: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], Header]:
    """The blocks' matrices in 8 bits, what they are worth, and what the file's header says."""
    stored, exact, told = dict(weights), dict(weights), dict[str, object]()
    is_int8 = "int8" in by
    for name in [n for n in weights if re.search(r"layers|refiner", n) and weights[n].dim() == 2]:
        layer = name.removesuffix(".weight")
        sizes = weights[name].abs()
        most = sizes.max() if by == "tensor" else sizes.amax(1, keepdim=True)
        # Powers of two, so that bf16 holds them.
        scale = torch.exp2(torch.ceil(torch.log2(most / (127 if is_int8 else 448))))
        scale = torch.ones(()) if by == "plain" else scale
        codes = weights[name] / scale
        stored[name] = codes.round().to(torch.int8) if is_int8 else codes.to(torch.float8_e4m3fn)
        exact[name] = stored[name].float() * scale
        settings: dict[str, object] = {"format": "int8_tensorwise" if is_int8 else "float8_e4m3fn"}
        if by == "rotated int8" and codes.shape[1] % 16 == 0:
            settings |= {"convrot": True, "convrot_groupsize": 16}
            rotation = torch.kron(_H4, _H4) / 4
            exact[name] = (torch.unflatten(exact[name], 1, (-1, 16)) @ rotation.mT).flatten(1)
        if by != "plain":
            told[layer] = settings
            stored[f"{layer}.{'scale_weight' if by == 'tensor' else 'weight_scale'}"] = scale
        if by in ("row", "rotated int8"):
            stored[f"{layer}.comfy_quant"] = _as_bytes(settings)
            stored[f"{layer}.input_scale"] = torch.ones(())
    if by == "tensor":
        stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    header = {"_quantization_metadata": json.dumps({"layers": told})}
    return stored, exact, header if by == "int8" else None


@pytest.mark.parametrize("by", ["plain", "tensor", "row", "int8", "rotated int8"])
def test_weights_in_8_bits_keep_their_bits(
    by: str, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    """In layers of their own format; otherwise they are multiplied out, or rotated back."""
    tiny, file, kind = tiny_of(_WITH_JOINED), tmp_path / "m.sft", "int8" if "int8" in by else "fp8"
    stored, exact, header = _in_8_bits(_original(tiny), by)
    expected, recipe = _recipe(tiny, exact, tmp_path / "exact.sft"), _recipe(tiny, stored, file)
    save_file(stored, file, header)
    weights = _loaded(expected).state_dict()
    _assert_equal(_loaded(recipe, "files"), weights)
    theirs = _quantised(expected, kind)
    for name, layer in _quantised(recipe, kind).items():
        if by == "rotated int8" and layer.in_features % 16 == 0:
            torch.testing.assert_close(layer.stored(), theirs[name].stored(), rtol=0, atol=0)
        else:
            torch.testing.assert_close(layer.weight, weights[f"{name}.weight"], rtol=0, atol=0)
    assert quantized_again(file, kind) == (["rotated I8"] if by == "rotated int8" else [])


def _as_bytes(settings: object) -> Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "row",
    [r for r in _ORIGINAL if transformer_class(r)[:3] in ("Wan", "Flu", "ZIm")],
    ids=transformer_class,
)
def test_a_gguf_file_is_dequantised_while_it_is_read(
    row: Row, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    """To what a safetensors file with the dequantised weights gives; quantised anew, as well."""
    tiny = tiny_of(row)
    exact = write_as_gguf(tmp_path / "model.gguf", _original(tiny))
    expected = _recipe(tiny, exact, tmp_path / "exact.safetensors")
    section = expected.model.model_copy(update={"pretrained": str(tmp_path / "model.gguf")})
    recipe = expected.model_copy(update={"model": section})
    _assert_equal(_loaded(recipe, "files"), _loaded(expected).state_dict())
    ours, theirs = (_quantised(each, "int8") for each in (recipe, expected))
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        torch.testing.assert_close(layer.stored(), theirs[name].stored(), rtol=0, atol=0)
    told = review_model(outline(_with_lora(recipe, "int8")), _with_lora(recipe, "int8"))
    assert any("model.gguf has weights in Q8_0, which" in each for each in told)


def _with_lora(recipe: Recipe, quantize: str) -> Recipe:
    section = recipe.model.model_copy(update={"quantize": quantize})
    lora = recipe.trainable.model_copy(update={"kind": "lora"})
    return recipe.model_copy(update={"model": section, "trainable": lora})


def _quantised(recipe: Recipe, quantize: str) -> dict[str, QuantizedLinear]:
    """The quantised layers of a model with LoRA, read from the recipe's file."""
    named = _loaded(_with_lora(recipe, quantize), "files").named_modules()
    layers = {
        n.removesuffix(".base_layer"): each
        for n, each in named
        if isinstance(each, QuantizedLinear)
    }
    assert layers
    return layers


def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path: Path) -> None:
    """By which ranks read their shards."""
    file = tmp_path / "model.safetensors"
    codes = torch.randn(6, 4).to(torch.float8_e4m3fn)
    scales = {"one": torch.tensor(0.3), "rows": torch.rand(6)}
    save_file({"codes": codes, "flat": torch.arange(8.0), **scales}, file)
    joined = (Rows("codes", 1, 3, "rows"), Rows("codes", 0, 1, "one"))
    with safe_open(file, "pt") as opened:
        for stored in (
            StoredTensor(file, (Rows("codes"),)),
            StoredTensor(file, (Rows("codes", scale="rows"),)),
            StoredTensor(file, (Rows("codes", 2, 6, "rows"),), (4, 4)),
            StoredTensor(file, joined, (3, 4)),
            StoredTensor(file, (Rows("flat", 0, 8),), (4, 2), is_reshaped=True),
        ):
            whole, part = stored.read(opened), (slice(1, 3), slice(0, 2))
            assert whole.shape == stored.shape_in(opened)
            torch.testing.assert_close(stored.read(opened, part), whole[part], rtol=0, atol=0)
            by_row = codes[2:6].float() * scales["rows"][2:6, None]
            if stored.shape == (4, 4):
                torch.testing.assert_close(whole, by_row, rtol=0, atol=0)


def _packed(settings: object) -> dict[str, Tensor]:
    return {"blocks.0.attn1.to_q.comfy_quant": _as_bytes(settings)}


_Q = "blocks.0.attn1.to_q.weight"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({_Q: None}, f"lacks 1 of .* tensors, such as {_Q}"),
        ({"blocks.9.new": torch.ones(1)}, r"has 1 tensor too many, such as blocks\.9\.new"),
        ({_Q: torch.ones(2, 3)}, rf"1 tensor of another shape, such as {_Q} \(\[2, 3\] in place"),
        (
            {_Q: torch.ones(2, 3, dtype=torch.int8)},
            r"a format that longtake does not read \(I8 with",
        ),
        (_packed({"format": "nvfp4"}), r"does not read \(nvfp4\)"),
        (_packed({"convrot": True}), r"does not read \(columns rotated in groups of 256\)"),
        (_packed([1]), r"cannot be read: .* Expected a safetensors"),
        ({"blocks.0.attn1.to_q.weight_scale": torch.ones(2, 2)}, r"a scale of the shape \[2, 2\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_a_plan(
    changed: Mapping[str, Tensor | None],
    message: str,
    tiny_of: Callable[[Row], Tiny],
    tmp_path: Path,
) -> None:
    tiny = tiny_of(next(r for r in ONE_OF_EACH if transformer_class(r) == "WanTransformer3DModel"))
    changes = {**_released(tiny), **changed}
    weights = {n: v for n, v in changes.items() if v is not None}
    with pytest.raises(ModelError, match=message):
        outline(_recipe(tiny, weights, tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pretrained": "m.safetensors"}, "set model.config_from to the release .* codec.pretrai"),
        ({"pretrained": "a/release", "config_from": "a/release"}, "or leave model.config_from out"),
    ],
)
def test_a_recipe_names_a_file_and_its_release(keys: Mapping[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe("wan", (1, 32, 32), model={"family": "wan", **keys})


def test_an_original_layout_without_a_converter_is_refused(tmp_path: Path) -> None:
    file, model = tmp_path / "m.safetensors", nn.Linear(2, 2)
    save_file({"w": torch.ones(1)}, file)
    with pytest.raises(ModelError, match="No other layout of a Linear is known"):
        refuse_misfits(model, find_in_one_file(file, model), file, "a/release")


def test_the_order_of_joined_rows_is_what_the_recipe_says(
    tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    """By head as in MiniMax's own files, which no name or shape tells."""
    tiny = tiny_of(next(r for r in ONE_OF_EACH if transformer_class(r).startswith("MiniMaxH3")))
    named = minimax_h3(_released(tiny), "interleaved")
    weights = {name: value.contiguous() for name, value in named.items()}
    file = tmp_path / "model.safetensors"
    _assert_equal(_loaded(_recipe(tiny, weights, file, qkv_layout="interleaved")), _released(tiny))
    with pytest.raises(
        ModelError, match=r'Set model.qkv_layout = "stacked" for a file made for Comf'
    ):
        outline(_recipe(tiny, weights, file, qkv_layout=None))
