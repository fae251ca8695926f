import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from longtake.config import Recipe
from longtake.data import workers
from longtake.faults import faulty_processes
from longtake.faults.inject import INJECTIONS, StepFunctions, Trigger
from longtake.faults.sandbox import (
    NORM_FACTOR,
    PACE_SECONDS,
    RATE_FACTOR,
    SLOW_PACE_SECONDS,
)
from longtake.metrics import Metrics
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training import loop
from longtake.training import step as training_step
from longtake.training.train import train

_AT = 3
_Train = Callable[[str | None], list[Metrics]]


@pytest.fixture
def train_with(
    small_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Train:
    """Trains six steps with a fault injected in the fourth; returns their metrics."""

    def train_(kind: str | None) -> list[Metrics]:
        recipe = small_recipe(f"out={tmp_path / str(kind)}", "training.steps=6")
        if kind:
            step = INJECTIONS[kind](Trigger(_AT), StepFunctions())
            monkeypatch.setattr(loop, "compute_gradients", step.compute)
            monkeypatch.setattr(loop, "apply_update", step.update)
            monkeypatch.setattr(training_step, "training_losses", step.losses)
        train(recipe, Console(quiet=True))
        return RunDirectory(recipe.out).metrics()

    return train_


def test_a_trigger_is_active_until_the_run_goes_back_unless_it_lasts() -> None:
    steps = [1, 2, 3, 4, 2, 3, 4]
    once, again, lasting = Trigger(3), Trigger(3), Trigger(3, lasting=True)
    assert [step for step in steps if once.is_active(step)] == [3, 4]
    assert [step for step in [3, 3, 4] if again.is_active(step)] == [3]
    assert [step for step in steps if lasting.is_active(step)] == [3, 4, 3, 4]


def test_steps_before_the_fault_are_those_of_a_run_without_it(train_with: _Train) -> None:
    plain, poisoned = train_with(None), train_with("poison")
    assert _losses(poisoned[:_AT]) == _losses(plain[:_AT])
    assert _losses(train_with("lose-gradient-on-rank-1")) == _losses(plain)


def test_poisoned_batches_have_a_far_higher_loss(train_with: _Train) -> None:
    plain, poisoned = train_with(None)[_AT]["loss"], train_with("poison")[_AT]["loss"]
    assert plain is not None
    assert poisoned is not None
    assert poisoned > 10 * plain


def test_a_raised_rate_multiplies_the_updates_of_one_group(train_with: _Train) -> None:
    plain, raised = (
        row["group_update_ratios"]
        for row in (train_with(None)[_AT + 1], train_with("raise-rate")[_AT + 1])
    )
    assert raised["attention"] == pytest.approx(RATE_FACTOR * (plain["attention"] or 0), rel=0.05)
    assert raised["mlp"] == plain["mlp"]


def test_a_raised_norm_shows_in_the_next_step(train_with: _Train) -> None:
    plain, raised = train_with(None), train_with("raise-norm")
    assert raised[_AT]["weight_norm"] == plain[_AT]["weight_norm"]
    before, after = plain[_AT + 1]["weight_norm"], raised[_AT + 1]["weight_norm"]
    assert after == pytest.approx(NORM_FACTOR * (before or 0), rel=1e-5)


def test_a_nan_gradient_lets_the_guard_skip_one_update(train_with: _Train) -> None:
    rows = train_with("lose-gradient")
    assert [row["step"] for row in rows if "verdict" in row] == [_AT + 1]
    assert rows[_AT]["grad_norm"] is None


def test_slow_steps_compute_the_same(train_with: _Train) -> None:
    plain, late = train_with(None), train_with("slow-steps")
    assert _losses(late) == _losses(plain)
    assert all(row["step_seconds"] >= PACE_SECONDS for row in late[_AT:])
    kinds: tuple[str, ...] = ("hang-rank-1-asleep", "hang-rank-1-in-collective")
    assert all(_losses(train_with(kind)) == _losses(plain) for kind in kinds)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("slow-steps", [[0, 0], [PACE_SECONDS, PACE_SECONDS]]),
        (
            "slow-rank-1-by-30",
            [[SLOW_PACE_SECONDS] * 2, [SLOW_PACE_SECONDS, 1.3 * SLOW_PACE_SECONDS]],
        ),
    ],
)
def test_steps_are_slow_from_a_step_on_and_ranks_by_their_share(
    monkeypatch: pytest.MonkeyPatch, kind: str, seconds: list[list[float]]
) -> None:
    """Seconds by step, before and after the fault began, and rank; the clock is the test's."""
    clock, nothing = [0.0], cast("Any", None)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda more: clock.append(clock.pop() + more))
    plain = StepFunctions(compute=lambda *_: nothing, losses=lambda *_: nothing)
    step = INJECTIONS[kind](Trigger(_AT), plain)
    for at, of_ranks in zip((_AT - 1, _AT), seconds, strict=True):
        for rank, wanted in enumerate(of_ranks):
            began, world = clock[0], World(rank, rank, 2, torch.device("cpu"), None)
            session, state = SimpleNamespace(world=world), SimpleNamespace(global_step=at)
            step.compute(cast("Any", session), cast("Any", state), nothing)
            step.losses(nothing, nothing, "fp32", torch.device("cpu"))
            assert clock[0] - began == pytest.approx(wanted)


def test_decode_workers_are_replaced_by_those_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PROGRAM", workers.PROGRAM)
    step = INJECTIONS["freeze-worker-in-c"](Trigger(_AT), StepFunctions())
    assert step == StepFunctions()
    assert list(workers.PROGRAM) == [faulty_processes.PROGRAM, "worker", "in-c", str(_AT)]


def _losses(rows: list[Metrics]) -> list[float | None]:
    return [row["loss"] for row in rows]
