"""What is exported of a release whose weights were all trained: one file, or the nearest LoRA."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families.originals import ORIGINAL
from tests.families.row import Row
from tests.families.rows import ONE_OF_EACH, transformer_class
from tests.families.tiny import Tiny
from torch import Tensor, nn

from longtake.errors import ModelError, RecipeError
from longtake.evaluation.export import Format, export
from longtake.models.components import assemble
from longtake.models.lora_files import read_adapter
from longtake.sampling.sampler import Sampler

_ORIGINAL = [row for row in ONE_OF_EACH if transformer_class(row) in ORIGINAL]
_OF = {transformer_class(row): row for row in ONE_OF_EACH}
_PREFIX = "model.diffusion_model."


def _one_file(tiny: Tiny, path: Path) -> Path:
    """The release as its makers and ComfyUI have it."""
    (file,) = (tiny.folder / "release" / "transformer").glob("*.safetensors")
    named = ORIGINAL[transformer_class(tiny.row)](load_file(file))
    save_file({f"{_PREFIX}{name}": each.contiguous() for name, each in named.items()}, path)
    return path


def _trained(tiny: Tiny, file: Path | None = None, **model: Any) -> Sampler:
    """A release, or its file, whose weights all have changed."""
    if file is not None:
        model |= {"pretrained": str(file), "config_from": str(tiny.folder / "release")}
    sampler, generator = tiny.made(model=model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in sampler.components.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) / 8)
    return sampler


def _read_back(tiny: Tiny, file: Path, **model: Any) -> dict[str, Tensor]:
    release = str(tiny.folder / "release")
    model |= {"pretrained": str(file), "config_from": release, "qkv_layout": "stacked"}
    recipe = tiny.recipe(model=model)
    return dict(assemble(recipe, (), None, frozen_parts=False).model.state_dict())


@pytest.mark.parametrize("row", _ORIGINAL, ids=transformer_class)
def test_a_whole_model_in_the_layout_of_a_file_is_a_base_again(
    row: Row, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    tiny, out = tiny_of(row), tmp_path / "out.safetensors"
    like = _one_file(tiny, tmp_path / "like.safetensors")
    sampler = _trained(tiny, dtype="bf16")
    export(sampler, out, "comfyui", like=like)
    ours, theirs = load_file(out), load_file(like)
    theirs.pop(f"{_PREFIX}rope.inv_freq", None)  # of MiniMax H3; the configuration has it
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    state = dict(sampler.components.model.state_dict())
    torch.testing.assert_close(_read_back(tiny, out, dtype="bf16"), state, rtol=0, atol=0)


def test_a_run_that_began_with_one_file_has_its_layout_in_fp8_too(
    tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    tiny = tiny_of(_OF["ZImageTransformer2DModel"])
    like = _one_file(tiny, tmp_path / "like.safetensors")
    sampler = _trained(tiny, like)
    for dtype in ("fp32", "fp8_scaled"):
        export(sampler, tmp_path / f"{dtype}.safetensors", "comfyui", dtype)
    exact, stored = (load_file(tmp_path / f"{n}.safetensors") for n in ("fp32", "fp8_scaled"))
    assert exact.keys() == load_file(like).keys()
    matrices = {n for n in exact if re.search(r"layers|refiner", n) and exact[n].dim() == 2}
    scales = {n: f"{n.removesuffix('weight')}scale_weight" for n in matrices}
    marker = f"{_PREFIX}scaled_fp8"
    assert stored.keys() == exact.keys() | set(scales.values()) | {marker}
    assert stored[marker].numel() == 2  # ComfyUI then multiplies by weights that are scaled back
    for name, weight in exact.items():
        if name not in matrices:
            torch.testing.assert_close(stored[name], weight.bfloat16(), rtol=0, atol=0)
            continue
        assert stored[name].dtype == torch.float8_e4m3fn
        scale = stored[scales[name]]
        assert scale.shape == ()
        # Of three bits behind the leading one, and of the least step below the smallest exponent.
        off = (stored[name].float() * scale - weight).abs()
        assert (off <= weight.abs() / 16 + scale * 2**-9).all()
    # A reader multiplies codes by scales, as the test of reading such files shows.
    times = {n: (v.float() * stored[scales[n]] if n in matrices else v) for n, v in stored.items()}
    plain = {n: v.float().contiguous() for n, v in times.items() if n in exact}
    save_file(plain, tmp_path / "plain.safetensors")
    found, expected = (
        _read_back(tiny, tmp_path / f"{n}.safetensors") for n in ("fp8_scaled", "plain")
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@contextmanager
def _low_rank_changes(sampler: Sampler, rank: int) -> Iterator[dict[str, Tensor]]:
    """Change linear layers, and give their changes by name."""
    model, changes = sampler.components.model, dict[str, Tensor]()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                rows, columns = layer.weight.shape
                up, down = (
                    torch.randn(shape, generator=generator)
                    for shape in ((rows, rank), (rank, columns))
                )
                before = layer.weight.clone()
                layer.weight.add_(up @ down / 30)
                changes[name] = layer.weight - before
    yield changes


@pytest.mark.parametrize("wanted", ["comfyui", "diffusers", "peft"])
@pytest.mark.parametrize("kind", ["WanTransformer3DModel", "Flux2Transformer2DModel"])
def test_a_change_of_low_rank_is_a_lora_of_any_format(
    kind: str, wanted: Format, tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    """ComfyUI has no names for some layers of FLUX.2; they are named as left out."""
    tiny = tiny_of(_OF[kind])
    sampler = tiny.made()
    out = tmp_path / ("folder" if wanted == "peft" else "lora.safetensors")
    with _low_rank_changes(sampler, 2) as changes:
        remarks = export(sampler, out, wanted, extract=2)
    file = out / "adapter_model.safetensors" if wanted == "peft" else out
    model, family = tiny.sampler.components.model, sampler.components.family
    layers: dict[str, Any] = {n: model.get_submodule(n) for n in changes}
    lora = read_adapter(file, layers, family, None, "model.training_adapter")
    left_out = changes.keys() - lora.keys()
    assert bool(left_out) == (wanted == "comfyui" and kind.startswith("Flux2"))
    assert any("Not in it" in remark for remark in remarks) == bool(left_out)
    for name, each in lora.items():
        error = (each.scale * each.up @ each.down - changes[name]).norm()
        assert error <= 1e-5 * changes[name].norm()


@pytest.mark.parametrize(
    ("options", "trainable", "message"),
    [
        ({"extract": 2}, {"kind": "lora"}, "--extract-lora is for a run that trained all weights"),
        (
            {"like": Path("x")},
            {"kind": "lora"},
            "--like is for a run that trained all weights, with",
        ),
        ({"dtype": "fp8_scaled", "extract": 2}, {}, "--dtype fp8_scaled is for a run that trained"),
    ],
)
def test_what_is_of_other_runs_is_refused(
    options: dict[str, Any],
    trainable: dict[str, Any],
    message: str,
    tiny_of: Callable[[Row], Tiny],
    tmp_path: Path,
) -> None:
    tiny = tiny_of(_OF["WanTransformer3DModel"])
    sampler = dataclasses.replace(tiny.sampler, recipe=tiny.recipe(trainable=trainable))
    with pytest.raises(RecipeError, match=message):
        export(sampler, tmp_path / "x.safetensors", "comfyui", **options)


def test_a_file_of_another_model_gives_no_layout(
    tiny_of: Callable[[Row], Tiny], tmp_path: Path
) -> None:
    tiny = tiny_of(_OF["WanTransformer3DModel"])
    like = _one_file(tiny, tmp_path / "like.safetensors")
    for changes, message in (
        ({f"{_PREFIX}more": torch.ones(1)}, r"--like .* has 1 tensor too many, such as more\. .*"),
        ({f"{_PREFIX}head.head.bias": torch.ones(1)}, "--like .* of another shape, such as proj_o"),
    ):
        save_file(load_file(like) | changes, tmp_path / "other.safetensors")
        with pytest.raises(ModelError, match=message):
            export(
                tiny.sampler,
                tmp_path / "x.safetensors",
                "comfyui",
                like=tmp_path / "other.safetensors",
            )
    assert not (tmp_path / "x.safetensors").exists()
