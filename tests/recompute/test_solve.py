"""Finding the fastest options that fit, against trying all of them."""

from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.recompute.apply import OPTIONS, Option
from longtake.recompute.devices import CPU
from longtake.recompute.policies import options_of
from longtake.recompute.solve import Costs, costs, fastest
from longtake.recompute.trace import Tracer

_MIB = 2**20
_BLOCKS = tuple("abcde")
_MIXTURES = [
    dict(zip(_BLOCKS, chosen, strict=True)) for chosen in product(OPTIONS, repeat=len(_BLOCKS))
]
_GAP = 1.0011


def _random_costs(seed: int) -> Costs:
    """Five blocks whose options take any bytes; the more is computed, the longer it takes."""
    numbers = np.random.default_rng(seed)
    shape = (len(_BLOCKS), len(OPTIONS))
    return Costs(
        names=_BLOCKS,
        saved=numbers.uniform(0, 100, shape) * _MIB,
        forward=numbers.uniform(0, 150, shape) * _MIB,
        backward=numbers.uniform(0, 200, shape) * _MIB,
        seconds=np.sort(numbers.uniform(0.1, 1, shape)),
        at_forward=numbers.uniform(200, 250, len(_BLOCKS)) * _MIB,
        at_backward=numbers.uniform(200, 250, len(_BLOCKS)) * _MIB,
        turn=numbers.uniform(200, 300) * _MIB,
        least_peak=numbers.uniform(100, 350) * _MIB,
        other_seconds=0.5,
    )


def _all_peaks(costs: Costs) -> list[float]:
    """Of every mixture, counted by hand: what is alive at each moment of a step."""
    peaks = []
    for options in _MIXTURES:
        columns = [OPTIONS.index(options[name]) for name in costs.names]
        saved, most = 0.0, costs.least_peak
        for row, column in enumerate(columns):
            most = max(most, costs.at_forward[row] + saved + costs.forward[row, column])
            saved += costs.saved[row, column]
        most = max(most, costs.turn + saved)
        for row, column in reversed(list(enumerate(columns))):
            most = max(most, costs.at_backward[row] + saved + costs.backward[row, column])
            saved -= costs.saved[row, column]
        peaks.append(most)
    return peaks


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_peaks_are_those_of_the_moments_of_a_step(seed: int) -> None:
    """The linear program's peak is what a walk through the step finds."""
    given_costs = _random_costs(seed)
    predicted = [given_costs.peak_bytes(options) for options in _MIXTURES]
    assert predicted == pytest.approx(_all_peaks(given_costs), rel=1e-12)


@given(st.integers(0, 10_000), st.integers(-10, 110))
@settings(max_examples=40, deadline=None)
def test_finds_the_fastest_of_all_mixtures(seed: int, percent: int) -> None:
    """Within the gap of the best of all 3^5 and within the budget; None exactly if none fits."""
    given_costs = _random_costs(seed)
    peaks = _all_peaks(given_costs)
    budget = min(peaks) + percent / 100 * (max(peaks) - min(peaks))
    found = fastest(given_costs, budget)
    fitting = [
        given_costs.predicted_seconds(options)
        for options, peak in zip(_MIXTURES, peaks, strict=True)
        if peak <= budget
    ]
    assert (found is None) == (not fitting)
    if found is not None:
        assert given_costs.peak_bytes(found) <= budget * (1 + 1e-6)
        assert given_costs.predicted_seconds(found) <= min(fitting) * _GAP


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_more_memory_never_costs_time(seed: int) -> None:
    """Of two budgets the larger one's plan is no slower, but for the gap."""
    given_costs = _random_costs(seed)
    peaks = _all_peaks(given_costs)
    times = []
    for budget in np.linspace(min(peaks), max(peaks), 8):
        found = fastest(given_costs, budget)
        assert found is not None
        times.append(given_costs.predicted_seconds(found))
    assert all(later <= earlier * _GAP for earlier, later in pairwise(times))


def _costs_of(subject: Any) -> Costs:
    names, tracer = tuple(subject.blocks), Tracer(subject, CPU)
    policies: Mapping[Option, str] = {
        "keep": "none",
        "save-attention": "save-attention",
        "recompute": "all",
    }
    return costs(
        {option: tracer.trace(options_of(name, names)) for option, name in policies.items()}
    )


def test_all_the_room_there_is_buys_all_the_time(toy: Any) -> None:
    """With room for everything nothing is computed again; without any room there is no plan."""
    toy_costs = _costs_of(toy(num_blocks=5))
    roomy = fastest(toy_costs, 1e12)
    assert roomy == dict.fromkeys(toy_costs.names, "keep")
    assert fastest(toy_costs, toy_costs.least_peak - 1) is None


def test_traced_costs_are_what_was_traced(toy: Any) -> None:
    """Uniform mixtures come out as their own traces, to the byte."""
    subject = toy(num_blocks=4)
    toy_costs, tracer = _costs_of(subject), Tracer(subject, CPU)
    for policy in ("none", "save-attention", "all"):
        options = options_of(policy, toy_costs.names)
        trace = tracer.trace(options)
        assert toy_costs.predicted_seconds(options) == pytest.approx(trace.seconds)
        assert toy_costs.peak_bytes(options) == pytest.approx(trace.peak_bytes, rel=0.005), policy


def test_blocks_upstream_of_what_trains_save_nothing(toy: Any) -> None:
    """The plan has no use for recomputing them: they keep nothing and have no backward pass."""
    toy_costs = _costs_of(toy(trained="blocks.3", num_blocks=5))
    assert (toy_costs.saved[:3] == 0).all()
    assert (toy_costs.backward[:3] == 0).all()
    assert (toy_costs.saved[3:, OPTIONS.index("keep")] > 0).all()
    tightest = min(
        toy_costs.peak_bytes(options_of(policy, toy_costs.names)) for policy in ("none", "all")
    )
    found = fastest(toy_costs, tightest)
    assert found is not None
    assert [found[name] for name in toy_costs.names[:3]] == ["keep"] * 3
