"""A step's waits for copies over the link, against a clock that runs through the step."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from longtake.planner.block_weights import blocks_with, buffer_bytes, link_seconds, weight_costs
from longtake.planner.devices import device_named
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.record import BlockWeights
from longtake.planner.trace import InferenceTrace, make_fake, trace_inference

Floats = NDArray[np.float64]


def _clocked(forward: Floats, backward: Floats, copies: Floats) -> float:
    """Seconds of a step beyond compute; one engine copies, and steps follow each other."""
    rows = [int(row) for row in np.flatnonzero(copies)]
    passes = [("up", row) for row in range(len(copies))]
    passes += [("down", row) for row in reversed(range(len(copies)))]
    clock, waited, here = 0.0, 0.0, dict.fromkeys(rows[:2], 0.0)  # and when a copy is whole
    for way, row in passes:
        if row in rows:
            waited += max(0.0, here[row] - clock)
            clock = max(clock, here[row])
            at = rows.index(row) + (1 if way == "up" else -1)
            if 0 <= at < len(rows) and rows[at] not in here:
                here = {row: 0.0, rows[at]: clock + copies[rows[at]]}
        clock += (forward if way == "up" else backward)[row]
    assert set(here) == set(rows[:2])  # the next step begins with them
    return waited


_SECONDS = st.floats(0.1, 5)


@given(st.lists(st.tuples(_SECONDS, _SECONDS, st.one_of(st.just(0.0), _SECONDS)), min_size=1))
def test_streamed_weights_wait_as_long_as_a_clock_says(
    blocks: list[tuple[float, float, float]],
) -> None:
    forward, backward, copies = np.array(blocks).T
    none = np.zeros(len(blocks))
    found = link_seconds(forward, backward, copies * 1e9, none, 1e9)
    assert found == pytest.approx(_clocked(forward, backward, copies))


@pytest.mark.parametrize(
    ("gib", "waits"),
    [
        ([0, 0, 0, 4], 0),  # the last block's stay on the device
        ([2, 0, 0, 0], 0),  # as long as the blocks beside it take
        ([5, 0, 0, 0], 3 + 1),  # 2 seconds forward and 4 backward hide behind the next block
        ([5, 5, 0, 0], 3 + 1 + 3 + 1),
    ],
)
def test_offloaded_activations_hide_behind_one_block(gib: list[float], waits: float) -> None:
    ones = np.ones(4)
    offloaded = np.array(gib) * 1e9
    assert link_seconds(2 * ones, 4 * ones, 0 * ones, offloaded, 1e9) == pytest.approx(waits)


def test_without_a_backward_pass_nothing_comes_back() -> None:
    ones, three = np.ones(3), np.array([3e9, 3e9, 3e9])
    backward = np.array([0.0, 0.0, 1.0])
    assert link_seconds(ones, backward, three, 0 * ones, 1e9) == 2  # the third, forward


@pytest.mark.parametrize("weights", get_args(BlockWeights)[1:])
def test_costs_are_those_of_a_trace(weights: BlockWeights) -> None:
    """Of a wide layer, beside which what is looked up in tables takes no time."""
    device, mode = device_named("rtx4070"), CachedFakeMode()
    with torch.device("meta"):
        layer = nn.Linear(3072, 12288, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    block = nn.Sequential(layer)
    with mode:
        make_fake(block)

    def run() -> None:
        block(torch.empty(16, 3072, dtype=torch.bfloat16))

    def trace(name: BlockWeights) -> InferenceTrace:
        with blocks_with([name], [block], mode) as streamed, mode:
            return trace_inference(mode, [block], run, device, streamed)

    kept, found, costs = trace("keep"), trace(weights), weight_costs(weights, [block], device)
    freed = kept.weight_bytes - found.weight_bytes
    assert costs.away[0] - buffer_bytes(costs.streamed) == freed
    assert found.seconds - kept.seconds == pytest.approx(costs.seconds[0], rel=0.05, abs=1e-9)


def test_two_buffers_of_the_largest_block_take_turns() -> None:
    sizes = np.array([0.0, 3.0, 5.0, 0.0, 4.0])
    assert buffer_bytes(sizes) == 10
    assert buffer_bytes(np.array([0.0, 3.0])) == 3
    assert buffer_bytes(np.zeros(3)) == 0
