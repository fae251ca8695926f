"""Compiled blocks compute what the others do; a machine without a compiler is refused."""

import copy
import math
import re
import runpy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.build import MakeRecipe, block_names
from torch import Tensor, nn
from torch._dynamo.utils import counters

from longtake.errors import ModelError, RecipeError
from longtake.models.base import latent_shape
from longtake.models.components import Components, assemble
from longtake.models.conditioning import outline_conditioning
from longtake.planner.activation_checkpointing import ACTIVATIONS, run_block
from longtake.planner.record import Activations, BlockOption
from longtake.training import compiled as compiling
from longtake.training.compiled import (
    FAULTS,
    compile_blocks,
    compiles_blocks,
    refuse_failed,
    refuse_missing_compiler,
    uncompiled,
)

_CPU = torch.device("cpu")


def test_without_a_compiler_it_is_refused(
    small_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refuse_missing_compiler(small_recipe(), _CPU)
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler .*--set training\.compile=false"):
        refuse_missing_compiler(small_recipe("training.compile=true"), _CPU)


def test_with_a_compiler_it_is_not(small_recipe: MakeRecipe) -> None:
    refuse_missing_compiler(small_recipe("training.compile=true"), _CPU)


@pytest.mark.parametrize(
    ("wanted", "device", "has_triton", "compiles", "warns"),
    [
        ("auto", "cpu", True, False, False),
        ("auto", "cuda", True, True, False),
        ("auto", "cuda", False, False, True),
        ("true", "cpu", True, True, False),
        ("false", "cuda", True, False, False),
    ],
)
def test_blocks_are_compiled_on_gpus_unless_the_recipe_says_otherwise(
    small_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    device: str,
    has_triton: bool,
    compiles: bool,
    warns: bool,
) -> None:
    monkeypatch.setattr(compiling, "has_triton", lambda: has_triton)
    recipe, place = small_recipe(f"training.compile={wanted}"), torch.device(device)
    refuse_missing_compiler(recipe, place)
    assert compiles_blocks(recipe, place) is compiles
    assert ("no Triton" in uncompiled(recipe, place)) is warns


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
@pytest.mark.parametrize(
    "activations", [("recompute",), pytest.param(ACTIVATIONS, marks=pytest.mark.drill)]
)
def test_compiled_blocks_are_the_same_blocks(
    small_recipe: MakeRecipe, activations: Sequence[Activations]
) -> None:
    config = f"{{hidden_size=48, num_blocks={len(activations)}}}"
    recipe = small_recipe("training.compile=true", f"model.config={config}")
    alone = assemble(recipe, ["a red disk moves left"], None)
    blocks = block_names(alone)
    wanted = _gradients(alone)
    compiled = replace(alone, model=copy.deepcopy(alone.model))
    # The text's block is one more.
    options = dict(zip(blocks, map(BlockOption, ("keep", *activations)), strict=True))
    compile_blocks(options, compiled, recipe)
    found = _gradients(compiled)
    assert list(found) == list(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=5e-6)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is said of blocks that run uncompiled; torch's own limit is 8 programs."""
    monkeypatch.setattr(FAULTS, "said", set())
    monkeypatch.setattr(FAULTS, "new", [])
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, suppress_errors=False):
        yield FAULTS.new
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of what is no leaf
def test_all_shapes_and_options_are_compiled(
    tiny_flux: MakeRecipe, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of blocks, two options, two shapes and two sizes of micro-batches.

    All blocks of a kind share one code object, of which torch by default compiles 8 programs.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    sides = "{num_frames=1, height=64, width=64}, {num_frames=1, height=64, width=32}"
    bare = (
        'trainable={kind="lora", rank=4}',
        'data.conditioning={reference={kind="picture", path="../before/{stem}.png"}}',
        f"data.buckets=[{sides}]",
    )
    recipe = tiny_flux("training.compile=true", *bare)
    parts = assemble(recipe, ["a red disk"], None)
    blocks = block_names(parts)
    kept, recomputed = BlockOption("keep"), BlockOption("recompute")
    options = dict(zip(blocks, (kept, recomputed) * 2, strict=True))
    compile_blocks(options, parts, recipe)
    for bucket in recipe.data.shapes():
        for size in (2, 1):
            shape = latent_shape(parts.codec, bucket)
            told = outline_conditioning(parts, recipe, bucket, size)
            latents, sigmas = torch.randn(size, *shape), torch.full((size,), 0.5)
            inputs = {name: torch.zeros_like(each, device="cpu") for name, each in told.items()}
            parts.predict_velocity(latents, sigmas, inputs).sum().backward()  # type: ignore[no-untyped-call]
    assert faults == []


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of what is no leaf
def test_blocks_are_compiled_with_their_modules(
    tiny_flux: MakeRecipe, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in one graph, also where it is recomputed; one module changes all that it sees."""
    whole = partialmethod(nn.Module.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(nn.Module, "compile", whole)
    modules = (
        "trainable={kind='lora', rank=2}",
        "trainable.modules.whole.module=tests.models.whole_context:WholeContext",
        "trainable.modules.pose.module=examples.modules.pose_adapter:PoseAdapter",
        "data.buckets=[{num_frames=1, height=32, width=32}]",
        "model.config.num_layers=1",
    )
    recipe = tiny_flux("training.compile=true", *modules)
    plain = assemble(recipe, ["a red disk"], None)
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    compiled = replace(plain, model=copy.deepcopy(plain.model))
    blocks = block_names(plain)
    recomputed = (BlockOption("keep"), BlockOption("save-attention"), BlockOption("recompute"))
    compile_blocks(dict(zip(blocks, recomputed, strict=True)), compiled, recipe)
    shape = latent_shape(plain.codec, recipe.data.buckets[0])
    told = outline_conditioning(plain, recipe, recipe.data.buckets[0])
    inputs = {name: torch.ones_like(each, device="cpu") for name, each in told.items()}
    latents, sigmas = torch.linspace(-1, 1, math.prod(shape)).view(1, *shape), torch.full((1,), 0.5)
    for parts in (plain, compiled):
        torch.autograd.backward(parts.predict_velocity(latents, sigmas, inputs).square().sum())
    found = dict(compiled.model.named_parameters())
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert faults == []


def test_a_limit_that_is_hit_is_told_in_words_of_the_recipe(
    small_recipe: MakeRecipe, faults: list[str]
) -> None:
    """Else blocks run uncompiled, and nobody knows why steps are slow."""
    recipe = small_recipe("training.compile=true")
    compile_blocks({}, assemble(recipe, ["a red disk"], None), recipe)
    doubled = torch.compile(lambda numbers: numbers * 2, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (2, 3):
            doubled(torch.ones(size))
    [said] = faults
    assert "has made 1 programs of one function, its limit" in said
    assert "data.buckets" in said


@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at .grad of what is no leaf
def test_modules_that_look_up_weights_by_block_need_a_program_for_each(
    tiny_flux: MakeRecipe, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(compiling, "_PROGRAMS_PER_SHAPE", 1)
    torch._dynamo.config.recompile_limit = 1
    recipe = tiny_flux(
        "training.compile=true",
        "trainable.modules.own.module=tests.families.own_module:Scales",
        "data.buckets=[{num_frames=1, height=32, width=32}]",
    )
    parts = assemble(recipe, ["a red disk"], None)
    compile_blocks({name: BlockOption("keep") for name in block_names(parts)}, parts, recipe)
    shape = latent_shape(parts.codec, recipe.data.buckets[0])
    told = outline_conditioning(parts, recipe, recipe.data.buckets[0])
    inputs = {name: torch.ones_like(each, device="cpu") for name, each in told.items()}
    parts.predict_velocity(torch.randn(1, *shape), torch.full((1,), 0.5), inputs)
    assert counters["stats"]["unique_graphs"] == len(block_names(parts))
    assert faults == []


_READS = """
def read(tokens):
    return tokens * 2 if float(tokens.detach().sum()) > 0 else tokens
"""


def test_a_block_that_reads_values_is_said_with_its_line(
    small_recipe: MakeRecipe, faults: list[str], tmp_path: Path
) -> None:
    """Torch compiles it in pieces without a word, and one that is recomputed not at all."""
    path = tmp_path / "my module.py"
    path.write_text(_READS)
    read = runpy.run_path(str(path))["read"]
    recipe = small_recipe()
    compile_blocks({}, assemble(recipe, ["a red disk"], None), recipe)
    block = torch.compile(partial(run_block, "recompute", read), backend="eager")
    for _ in range(2):
        assert block(torch.ones(2, requires_grad=True)).sum() == 4
    [said] = faults
    assert re.match(r"torch.compile cannot follow .*/my module.py:3: Unsupported Tensor", said)
    assert "training.compile = false" in said


@pytest.mark.parametrize("wanted", ["auto", "true"])
def test_what_cannot_be_compiled_runs_uncompiled_or_is_refused(
    small_recipe: MakeRecipe, faults: list[str], wanted: str
) -> None:
    def fails(graph: object, inputs: object) -> Any:
        raise NotImplementedError("no kernel for it")

    recipe = small_recipe(f"training.compile={wanted}")
    compile_blocks({}, assemble(recipe, ["a red disk"], None), recipe)
    doubled: Any = torch.compile(torch.neg, backend=fails)
    if wanted == "auto":
        assert doubled(torch.ones(2)).tolist() == [-1, -1]
        [said] = faults
        assert "no kernel for it" in said
        assert "uncompiled" in said
    else:
        remedy = r"no kernel for it.*--set training\.compile=false"
        with pytest.raises(ModelError, match=remedy), refuse_failed():
            doubled(torch.ones(2))


def test_other_errors_are_not_the_compilers() -> None:
    with pytest.raises(RuntimeError, match="of a step"), refuse_failed():
        raise RuntimeError("of a step")


def _gradients(parts: Components) -> dict[str, Tensor]:
    """Of a made-up loss; the last weights are no longer zero, so that all have one."""
    model, generator = parts.model, torch.Generator().manual_seed(0)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    clips = torch.randn(2, 3, 8, 32, 32, generator=generator)
    told = {"token_ids": torch.ones(2, 4, dtype=torch.int64)}
    velocity = parts.predict_velocity(clips, torch.tensor([0.3, 0.8]), told)
    velocity.square().mean().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
