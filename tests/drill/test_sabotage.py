"""What is done to a run inside its process is what it is called, and no more."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from longtake.config import Recipe
from longtake.data import process
from longtake.drill import frozen_worker
from longtake.drill.harms import (
    NORM_FACTOR,
    PACE_SECONDS,
    RATE_FACTOR,
    SLOW_PACE_SECONDS,
    Harm,
    Sabotage,
)
from longtake.drill.sabotage import HARMS
from longtake.drill.step import Step, When
from longtake.parallel.mesh import World
from longtake.run_dir import Metrics, RunDirectory
from longtake.training import loop
from longtake.training import step as training_step
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
            monkeypatch.setattr(training_step, "flow_losses", step.losses)
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


def test_a_step_that_takes_longer_computes_the_same(train_with: _Train) -> None:
    """From the step on from which it is to; a rank that is not there hangs or slows none."""
    plain, late = train_with(None), train_with("dawdle")
    assert _losses(late) == _losses(plain)
    assert all(row["step_seconds"] < PACE_SECONDS for row in late[1:_AT])
    assert all(row["step_seconds"] >= PACE_SECONDS for row in late[_AT:])
    harms: tuple[Harm, ...] = ("hang-rank-1-asleep", "hang-rank-1-in-collective")
    assert all(_losses(train_with(harm)) == _losses(plain) for harm in harms)


def test_a_slow_rank_takes_longer_by_its_share() -> None:
    """Of its own work from beginning to end; the other rank takes what it takes."""
    state: Any = SimpleNamespace(global_step=_AT)
    nothing: Any = None
    took = {}
    for rank in (0, 1):
        plain = Step(compute=lambda *_: nothing, losses=lambda *_: nothing)
        step = HARMS["slow-rank-1-by-30"](When(_AT), plain)
        began = time.perf_counter()
        step.compute(state, nothing, nothing, World(rank, rank, 2, torch.device("cpu"), None))
        step.losses(nothing, nothing, "fp32", torch.device("cpu"))
        took[rank] = time.perf_counter() - began
    assert took[1] >= 1.3 * SLOW_PACE_SECONDS
    assert took[1] == pytest.approx(1.3 * took[0], rel=0.1)


def test_decoding_processes_are_replaced_by_such_that_freeze(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, with how and when; the training's own functions stay what they are."""
    monkeypatch.setattr(process, "PROGRAM", process.PROGRAM)
    step = HARMS["freeze-worker-in-c"](When(_AT), Step())
    assert step == Step()
    assert list(process.PROGRAM) == [frozen_worker.NAME, "in-c", str(_AT)]


def _losses(rows: list[Metrics]) -> list[float | None]:
    return [row["loss"] for row in rows]
