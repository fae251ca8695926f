"""The drill of a tracker that is down, from end to end, in real processes."""

import shutil

import pytest

from longtake.drill.faults import tracker_down
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.run import drill
from longtake.tracking.cursor import Position


@pytest.mark.slow
def test_the_drill_passes(impatient_ground: Ground) -> None:
    """It is noticed, the run comes to what it would have come to, and nothing is missing.

    Of the drills here this one starts its processes as a user does; the others fork theirs.
    """
    result = drill(tracker_down.FAULT, impatient_ground)
    assert result.passed, result.message
    assert result.equal_to_undisturbed is True
    assert result.detected_seconds is not None
    assert 0 < result.detected_seconds < result.drill_seconds


def test_what_a_tracker_was_not_told_is_complained_of(place: Place) -> None:
    """Neither tracker has a row of this run, which is otherwise as it must be."""
    shutil.rmtree(place.run.tensorboard_path, ignore_errors=True)
    place.run.record_path.write_text('{"id": "run-1"}')
    found = tracker_down.judge(place, Position(rows=3), place)
    assert found.complaints == [
        "TensorBoard has not every step once",
        "W&B was told 3 rows though nobody answers",
        "W&B was not told later every step once",
    ]
