"""Drills of checkpoints and of runs that are killed, from end to end, in real processes."""

import pytest

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.registry import SAVING_FAULTS
from longtake.drill.run import drill


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize("fault", SAVING_FAULTS, ids=lambda fault: fault.name)
def test_a_drill_passes(ground: Ground, fault: Fault) -> None:
    """Nothing is lost but some steps, which are trained again: to the bit as they were."""
    result = drill(fault, ground)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is True
    assert result.samples_skipped == 0
    assert result.steps_lost is not None
    assert result.detected_seconds is not None
    assert 0 < result.detected_seconds < result.drill_seconds
