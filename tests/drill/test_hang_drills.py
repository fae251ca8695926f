"""Drills of processes that hang, from end to end, in real processes.

With shorter limits than the default ones, and one drill of a kind: `longtake drill --all` has all.
"""

import pytest

from longtake.drill.faults import frozen_loader_worker, hung_rank
from longtake.drill.ground import Ground
from longtake.drill.run import drill


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_a_frozen_loader_worker_is_named_and_replaced(impatient_ground: Ground) -> None:
    """Though it holds Python's lock, so that it cannot say where it is; the run is the same."""
    result = drill(frozen_loader_worker.HOLDING_GIL, impatient_ground)
    assert result.passed, result.message
    assert "in holding_gil (longtake/drill/hangs.py:" in result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is True
    assert result.detected_seconds is not None
    assert 2 < result.detected_seconds < result.drill_seconds


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_a_rank_in_a_collective_that_nobody_joins_is_named(impatient_ground: Ground) -> None:
    """And not the other one, which is in a collective too, and waits for it."""
    result = drill(hung_rank.IN_COLLECTIVE, impatient_ground)
    assert result.passed, result.message
    assert "in in_collective (longtake/drill/delays.py:" in result.message
    assert result.detected_seconds is not None
