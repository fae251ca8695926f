"""Compiled blocks compute what the others do; without a compiler it is said before the run."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.models.assemble import Components, assemble
from longtake.recompute.apply import OPTIONS, Option
from longtake.training.compiling import compile_blocks, refuse_missing_compiler

_CPU = torch.device("cpu")


def test_without_a_compiler_it_is_refused(
    small_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where blocks shall be compiled."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refuse_missing_compiler(small_recipe(), _CPU)
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler .*--set training\.compile=false"):
        refuse_missing_compiler(small_recipe("training.compile=true"), _CPU)


def test_with_a_compiler_it_is_not(small_recipe: Callable[..., Recipe]) -> None:
    """This test needs one, as the next does."""
    refuse_missing_compiler(small_recipe("training.compile=true"), _CPU)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
def test_compiled_blocks_are_the_same_blocks(small_recipe: Callable[..., Recipe]) -> None:
    """Outputs and gradients, whatever is recomputed; and names, so that checkpoints are too."""
    recipe = small_recipe("training.compile=true", "model.config={hidden_size=48, num_blocks=3}")
    alone = assemble(recipe, ["a red disk moves left"], None)
    names = {module: name for name, module in alone.model.named_modules()}
    blocks = [names[block] for block in alone.family.blocks(alone.model)]
    wanted = _gradients(alone)
    compiled = replace(alone, model=copy.deepcopy(alone.model))
    options: dict[str, Option] = dict(zip(blocks, ("keep", *OPTIONS), strict=True))
    compile_blocks(options, compiled, recipe)
    found = _gradients(compiled)
    assert list(found) == list(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


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
