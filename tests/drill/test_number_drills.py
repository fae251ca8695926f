"""Drills of what the guard watches, from end to end, in real processes."""

import pytest

from longtake.drill.divergence import reports
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.place import BATCH_SIZE, LONG
from longtake.drill.registry import NUMBER_FAULTS
from longtake.drill.run import drill
from longtake.fsio import read_json_lines

_SKIPS = {"nan-gradient", "nan-on-one-rank"}


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize("fault", NUMBER_FAULTS, ids=lambda fault: fault.name)
def test_a_drill_passes(ground: Ground, fault: Fault) -> None:
    """Each is found in time; what is left out is counted, and nothing else is missing."""
    result = drill(fault, ground)
    assert result.passed, result.message
    assert (result.samples_repeated, result.samples_missing) == (0, 0)
    assert result.equal_to_undisturbed is None
    assert result.detected_seconds is not None
    assert 0 < result.detected_seconds < result.drill_seconds
    assert result.detected_steps is not None
    assert result.samples_skipped is not None
    assert result.steps_lost is not None
    if fault.name in _SKIPS:
        assert (result.samples_skipped, result.steps_lost) == (BATCH_SIZE, 0)
    else:
        assert result.samples_skipped > 0
        assert result.steps_lost > 0


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_a_run_that_cannot_repair_itself_stops_and_says_so(ground: Ground) -> None:
    """Trouble that comes again after each rollback ends it, with an error and a report."""
    place = ground.fresh("hopeless", LONG)
    sabotage = Sabotage("raise-rate", at=60, is_lasting=True)
    with place.launch("guard.max_rollbacks=1", sabotage=sabotage) as launch:
        assert launch.wait() == 2
        said = " ".join(launch.said.split())
    assert "It has gone back 1 time without progress" in said
    assert f"longtake show {place.run.path.name} --around" in said
    assert len(place.run.rollbacks()) == 1
    last = list(read_json_lines(place.run.events_path))[-1]
    assert last["event"] == "diverged"
    assert last["message"] in said
    assert len(reports(place.run)) == 2
    assert all((place.run.path / report["report"]).is_file() for report in reports(place.run))
