"""Prodigy against its authors' code."""

import copy
import shutil
from collections.abc import Sequence

import prodigyopt
import pytest
import torch
from tests.build import QUIET, MakeRecipe, losses, saved
from torch import nn

from longtake.config import OptimizerSection
from longtake.optim.prodigy import Prodigy
from longtake.run_dir import RunDirectory
from longtake.training.train import train


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int] = range(60)
) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(32, 6, generator=generator)
        wanted = torch.stack([inputs.sum(1), inputs[:, 0] * 2, inputs[:, 1].abs()], 1)
        loss = (model(inputs) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_its_authors(weight_decay: float) -> None:
    ours, theirs = _model(), _model()
    mine = Prodigy(ours.parameters(), betas=(0.9, 0.99), weight_decay=weight_decay)
    reference = prodigyopt.Prodigy(
        theirs.parameters(),
        betas=(0.9, 0.99),
        weight_decay=weight_decay,
        use_bias_correction=True,
        safeguard_warmup=True,
    )
    found, expected = _train(ours, mine), _train(theirs, reference)
    assert found == pytest.approx(expected, rel=1e-3)
    assert mine.param_groups[0]["distance"] == pytest.approx(
        reference.param_groups[0]["d"], rel=1e-3
    )
    assert found[-1] < found[0] / 2  # with a learning rate that nobody chose


@pytest.mark.parametrize("saved_at", [10, 17])
def test_a_resumed_optimizer_goes_on_to_the_last_bit(saved_at: int) -> None:
    """The distance first rises in the 16th step, after or before the state is saved."""
    whole, parted, again = _model(), _model(), _model()
    first, second = Prodigy(parted.parameters()), Prodigy(again.parameters())
    expected = _train(whole, Prodigy(whole.parameters()), range(20))[saved_at:]
    _train(parted, first, range(saved_at))
    again.load_state_dict(parted.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert _train(again, second, range(saved_at, 20)) == expected
    assert second.param_groups[0]["distance"] > first.param_groups[0]["distance"]


def test_a_run_that_was_killed_and_resumed_trains_the_same(small_recipe: MakeRecipe) -> None:
    """What it has found of the learning rate is in the checkpoint."""
    recipe = small_recipe(
        "optimizer.kind=prodigy",
        "optimizer.learning_rate=1",
        "training.steps=4",
        "checkpoint.every=2",
    )
    train(recipe, QUIET)
    whole, weights = losses(recipe), saved(recipe, 4, "model")
    shutil.rmtree(RunDirectory(recipe.out).checkpoint_path(4))
    train(recipe, QUIET)
    assert losses(recipe) == whole
    torch.testing.assert_close(saved(recipe, 4, "model"), weights, rtol=0, atol=0)


def test_its_learning_rate_is_a_factor_of_1_unless_the_recipe_says_otherwise() -> None:
    assert OptimizerSection(kind="prodigy").learning_rate == 1
    assert OptimizerSection(kind="prodigy", learning_rate=0.5).learning_rate == 0.5
    assert OptimizerSection().learning_rate == 1e-4
