"""Drills of what befalls a node, from end to end, in real processes.

The shortest ones: `longtake drill --all` has all.
"""

import pytest

from longtake.drill.fault import Fault
from longtake.drill.faults import clock_step_back, dead_watcher
from longtake.drill.ground import Ground
from longtake.drill.run import drill


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize(
    "fault", [clock_step_back.FAULT, dead_watcher.FAULT], ids=lambda fault: fault.name
)
def test_a_drill_passes(impatient_ground: Ground, fault: Fault) -> None:
    """Each is told of in seconds, and the run comes to what it would have come to without it."""
    result = drill(fault, impatient_ground)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is True
    assert result.detected_seconds is not None
    assert 0 < result.detected_seconds < result.drill_seconds
