"""The cost of failures: closed forms against a simulation, and costs of a recipe."""

import math
import random
from dataclasses import dataclass, replace

import pytest
from tests.build import TINY_WAN, MakeRecipe

from longtake.errors import PlanError
from longtake.planner import batch_sizes, devices
from longtake.planner.cost import (
    DAY_SECONDS,
    FailureModel,
    StageCost,
    clip_seconds,
    refuse_no_progress,
)

_DAYS = 1000.0
_RUN = FailureModel(interval=900.0, stall=2.0, write=20.0, restart=180.0, failures_per_day=6.0)


@dataclass(frozen=True)
class _SimulatedTime:
    """The time of a simulated run, by use."""

    seconds: float
    work: float  # seconds of training that were kept
    num_saves: int
    num_failures: int
    lost: float  # seconds


def _simulate(model: FailureModel, days: float, seed: int = 0) -> _SimulatedTime:
    """Save, fail and restart for so many days; also while a restart is under way."""
    draw, rate = random.Random(seed), model.failures_per_day / DAY_SECONDS  # noqa: S311 - no secret
    now = lost = work = 0.0
    saves = failures = 0
    whole = (0.0, 0.0)  # the newest whole save: when training went on after it, and its work
    written, saved = math.inf, whole  # the save under way: when it is whole, and the same of it
    fails_at = draw.expovariate(rate) if rate else math.inf
    while now < days * DAY_SECONDS:
        if fails_at >= now + model.cycle:
            now, work, saves = now + model.cycle, work + model.interval, saves + 1
            if written <= now:
                whole = saved
            written, saved = now + model.write, (now, work)
            continue
        if written <= fails_at:
            whole = saved
        lost, work, written = lost + fails_at - whole[0], whole[1], math.inf
        now = fails_at
        while fails_at <= now:  # the restarts: a failure ends one, and begins another
            failures, begun = failures + 1, fails_at
            fails_at = begun + draw.expovariate(rate)
            now = begun + model.restart
            lost += min(now, fails_at) - begun
        whole = (now, work)
    return _SimulatedTime(now, work, saves, failures, lost)


def test_a_clip_takes_the_time_that_its_tokens_do(small_recipe: MakeRecipe) -> None:
    """Three buckets are traced; the one between them is predicted as if it had been, too."""
    shapes = [f"{{num_frames=9, height={side}, width=64}}" for side in (32, 64, 128, 256)]
    recipe = small_recipe(*TINY_WAN, f"data.buckets=[{', '.join(shapes)}]")
    device, tokens = devices.device_named("h100"), batch_sizes.bucket_tokens(recipe)
    predicted = clip_seconds(recipe, device, tokens)
    assert tuple(predicted) == recipe.data.buckets
    between = recipe.data.buckets[1]
    alone = clip_seconds(recipe, device, {between: tokens[between]})
    assert predicted[between] == pytest.approx(alone[between], rel=0.05)
    assert sorted(predicted.values()) == list(predicted.values())


def test_without_failures_the_simulation_is_the_closed_form() -> None:
    """Writing may take longer than the interval: a save waits for the one before."""
    for model in (replace(_RUN, failures_per_day=0.0), FailureModel(60.0, 1.0, 90.0, 0.0, 0.0)):
        found = _simulate(model, _DAYS)
        assert (found.num_failures, found.lost) == (0, 0.0)
        assert found.seconds == pytest.approx(found.num_saves * model.cycle)
        assert model.wall_seconds(found.work) == pytest.approx(found.seconds, rel=1e-12)
        assert model.goodput == pytest.approx(found.work / found.seconds)


@pytest.mark.parametrize(
    "model",
    [
        _RUN,
        replace(_RUN, failures_per_day=20.0, interval=300.0),
        replace(_RUN, restart=1200.0, failures_per_day=3.0),
        FailureModel(interval=60.0, stall=1.0, write=90.0, restart=60.0, failures_per_day=12.0),
    ],
)
def test_failures_take_what_the_closed_form_says(model: FailureModel) -> None:
    found = _simulate(model, _DAYS, seed=1)
    assert found.lost / found.num_failures == pytest.approx(model.lost_per_failure, rel=0.02)
    assert found.seconds == pytest.approx(model.wall_seconds(found.work), rel=0.02)


def test_at_the_best_interval_least_is_lost() -> None:
    """Young's sqrt(2 * 30 s * 4 h) = 930 s, Daly's a bit less; and never below a write."""
    model = replace(_RUN, stall=30.0, write=30.0)
    best = model.with_best_interval()
    assert best.interval == pytest.approx(910, rel=0.01)
    for factor in (0.4, 2.5):
        other = replace(best, interval=factor * best.interval)
        assert best.goodput > other.goodput
        theirs, ours = _simulate(other, _DAYS), _simulate(best, _DAYS)
        assert ours.work / ours.seconds > theirs.work / theirs.seconds
    assert replace(model, write=2000.0).with_best_interval().interval == 2000.0


def test_a_run_that_fails_faster_than_it_saves_is_refused() -> None:
    often = replace(_RUN, failures_per_day=300.0)
    stage = StageCost("low", 100, 1.0, 0.0, 0.0, 0.0, 0, often)
    with pytest.raises(
        PlanError, match=r"stage low makes next to no progress: there is one every 2"
    ):
        refuse_no_progress(stage)
    refuse_no_progress(replace(stage, failures=_RUN))
