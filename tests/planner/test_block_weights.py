"""A step's waits for copies over the link, against a clock that runs through the step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from longtake.planner.block_weights import buffer_bytes, link_seconds

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


def test_two_buffers_of_the_largest_block_take_turns() -> None:
    sizes = np.array([0.0, 3.0, 5.0, 0.0, 4.0])
    assert buffer_bytes(sizes) == 10
    assert buffer_bytes(np.array([0.0, 3.0])) == 3
    assert buffer_bytes(np.zeros(3)) == 0
