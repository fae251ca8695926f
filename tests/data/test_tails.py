"""Far harder clips are found in samples and in plans; equal samples raise hardly an alarm."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.data.build import catalog_of, section

from longtake.data.checks import drifts, review, tail_drifts
from longtake.data.plan import begin
from longtake.data.tails import FALSE_ALARMS, tail_excess
from longtake.errors import DataError

_Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
_DISTRIBUTIONS: dict[str, _Draw] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "lognormal": lambda rng, size: rng.lognormal(size=size),
    "infinite variance": lambda rng, size: rng.pareto(1.5, size=size),
    "whole numbers": lambda rng, size: rng.poisson(8, size=size).astype(float),
    "bounded": lambda rng, size: rng.random(size),
}


@pytest.mark.parametrize("name", list(_DISTRIBUTIONS))
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_equal_samples_raise_a_false_alarm_once_in_a_thousand(name: str, limit: float) -> None:
    """Of 1,000 splits, 500 in halves and 500 with a last tenth; with limit 0 as well."""
    rng, alarms = np.random.default_rng(3), 0
    for number in range(1000):
        values = _DISTRIBUTIONS[name](rng, 4000)
        cut = 2000 if number % 2 else 3600
        alarms += tail_excess(values[:cut], values[cut:], limit) is not None
    assert alarms <= 3  # by chance more than 3 with a probability of 2 % if each had 0.001
    assert FALSE_ALARMS == 1e-3


@pytest.mark.parametrize(("name", "far"), [("normal", 15.0), ("whole numbers", 90.0)])
@pytest.mark.parametrize("sizes", [(20_000, 20_000), (90_000, 10_000), (50_000, 50_000)])
def test_the_hardest_ten_thousandth_is_found_if_it_is_far_harder(
    name: str, far: float, sizes: tuple[int, int]
) -> None:
    """A chunk of 10,000 may have one such clip, which ranks alone cannot judge."""
    rng = np.random.default_rng(5)
    before, after = (_DISTRIBUTIONS[name](rng, size) for size in sizes)
    count = sizes[1] // 10_000
    assert tail_excess(before, after, 1.0) is None
    after[:count] = far if count > 1 else 2 * far
    found = tail_excess(before, after, 1.0)
    assert found is not None
    assert (found.count, found.least) == (count, after[0])
    assert found.expected < 0.1
    assert abs(after.mean() - before.mean()) < 0.1 * before.std()


def test_ranks_alone_give_the_probability_of_the_negative_binomial() -> None:
    """30 clips beyond the largest of 30 others: 2^-30 if both were alike."""
    found = tail_excess(np.arange(30.0), 1000 + np.arange(30.0), 0.0)
    assert found is not None
    assert found.probability == pytest.approx(2.0**-30)
    assert tail_excess(np.arange(30.0), np.arange(30.0), 0.0) is None
    # A first stage of fewer than 20 clips has no upper 5 %, and is still judged by its largest.
    assert tail_excess(np.arange(19.0), 1000 + np.arange(30.0), 0.0) is not None
    nothing = np.full(3, np.nan)
    assert tail_excess(nothing, np.arange(30.0), 0.0) is None
    assert tail_excess(np.arange(30.0), nothing, 0.0) is None


def test_a_last_stage_with_few_far_harder_clips_is_named_or_refused() -> None:
    """One of 10,000 clips, which moves the mean by a hundredth of a standard deviation."""
    rng = np.random.default_rng(0)
    nouns = rng.normal(30, 5, size=20_000)
    nouns[15_000] = 230.0
    clips = catalog_of(
        range(20_000), duration_seconds=lambda n: float(n), attributes=lambda n: {"nouns": nouns[n]}
    )
    stages: list[dict[str, object]] = [
        {"name": "early", "where": ["duration_seconds < 10000"], "steps": 5},
        {"name": "last"},
    ]
    data = section(stages=stages)
    plan = begin({"catalog": clips}, data, 4, 0)
    (found,) = tail_drifts(plan.stages, 1.0)
    assert (found.stage, found.attribute, found.count, found.least) == ("last", "nouns", 1, 230.0)
    assert found.num_clips == 10_000
    of_nouns = next(each for each in drifts(plan.stages) if each.attribute == "nouns")
    assert of_nouns.distance < 0.05
    (said,) = [line for line in review(plan, data, None) if "nouns" in line]
    assert said.startswith("stage last: 1 of 10,000 clips that it adds have nouns of 230 or more")
    refusing = section(stages=stages, on_drift="refuse", drift_limit=2.0)
    with pytest.raises(DataError, match=r"too different(.|\n)*nouns of 230 or more"):
        review(plan, refusing, None)
    dropped = section(stages=[stages[0], {**stages[1], "drop_hardest": 0.0001}])
    assert tail_drifts(begin({"catalog": clips}, dropped, 4, 0).stages, 1.0) == []
