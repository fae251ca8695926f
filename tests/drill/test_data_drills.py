"""Drills of data and of processes that decode, from end to end, in real processes."""

import pytest

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.registry import DATA_FAULTS
from longtake.drill.run import drill

_EQUAL = {"decoder-hang", "killed-loader-worker"}


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize("fault", DATA_FAULTS, ids=lambda fault: fault.name)
def test_a_drill_passes(ground: Ground, fault: Fault) -> None:
    """Each fault is found, and no sample is repeated or missing."""
    result = drill(fault, ground)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is (True if fault.name in _EQUAL else None)
    if fault.name != "processes-changed":
        assert result.detected_seconds is not None
        assert 0 < result.detected_seconds < result.drill_seconds
