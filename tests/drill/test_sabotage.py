"""What is done to a run inside its process is what it is called, and no more."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from longtake.config import Recipe
from longtake.drill.harms import NORM_FACTOR, RATE_FACTOR, Harm, Sabotage
from longtake.drill.sabotage import HARMS, Step, When
from longtake.run_dir import Metrics, RunDirectory
from longtake.training import loop
from longtake.training.run import train

_AT = 3
_Train = Callable[[Harm | None], list[Metrics]]


@pytest.fixture
def train_with(
    small_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Train:
    """Trains six steps with some harm done in the fourth; gives their metrics."""

    def train_(harm: Harm | None) -> list[Metrics]:
        recipe = small_recipe(f"out={tmp_path / str(harm)}", "training.steps=6")
        if harm:
            step = HARMS[harm](When(_AT), Step())
            monkeypatch.setattr(loop, "compute_gradients", step.compute)
            monkeypatch.setattr(loop, "apply_update", step.update)
        train(recipe, Console(quiet=True))
        return RunDirectory(recipe.out).metrics()

    return train_


def test_harm_is_done_until_the_process_goes_back() -> None:
    """And again after that, where it is lasting."""
    steps = [1, 2, 3, 4, 2, 3, 4]
    once, lasting = When(3), When(3, is_lasting=True)
    assert [step for step in steps if once.is_since(step)] == [3, 4]
    assert [step for step in steps if lasting.is_since(step)] == [3, 4, 3, 4]


def test_sabotage_is_told_to_its_process() -> None:
    """As the process understands it."""
    assert Sabotage("poison", 5).arguments == ["poison", "5"]
    assert Sabotage("poison", 5, is_lasting=True).arguments == ["--lasting", "poison", "5"]


def test_nothing_is_done_before_its_time(train_with: _Train) -> None:
    """The steps before are those of a run without it; a rank that is not there changes none."""
    plain, poisoned = train_with(None), train_with("poison")
    assert _losses(poisoned[:_AT]) == _losses(plain[:_AT])
    assert _losses(train_with("lose-gradient-on-rank-1")) == _losses(plain)


def test_poisoned_batches_have_a_loss_out_of_all_proportion(train_with: _Train) -> None:
    """While the weights are still what they were."""
    plain, poisoned = train_with(None)[_AT]["loss"], train_with("poison")[_AT]["loss"]
    assert plain is not None
    assert poisoned is not None
    assert poisoned > 10 * plain


def test_a_raised_rate_moves_one_group_further(train_with: _Train) -> None:
    """As far as it says (over weights that grow by it), and the others as far as before."""
    plain, raised = (
        row["group_update_ratios"]
        for row in (train_with(None)[_AT + 1], train_with("raise-rate")[_AT + 1])
    )
    assert raised["attention"] == pytest.approx(RATE_FACTOR * (plain["attention"] or 0), rel=0.05)
    assert raised["mlp"] == plain["mlp"]


def test_a_raised_norm_is_seen_in_the_next_step(train_with: _Train) -> None:
    """By as much as it says."""
    plain, raised = train_with(None), train_with("raise-norm")
    assert raised[_AT]["weight_norm"] == plain[_AT]["weight_norm"]
    before, after = plain[_AT + 1]["weight_norm"], raised[_AT + 1]["weight_norm"]
    assert after == pytest.approx(NORM_FACTOR * (before or 0), rel=1e-5)


def test_a_lost_gradient_is_lost_once(train_with: _Train) -> None:
    """And the guard leaves that update out."""
    rows = train_with("lose-gradient")
    assert [row["step"] for row in rows if "verdict" in row] == [_AT + 1]
    assert rows[_AT]["grad_norm"] is None


def _losses(rows: list[Metrics]) -> list[float | None]:
    return [row["loss"] for row in rows]
