"""The drill of a sync that stops in the middle of a checkpoint, from end to end."""

import pytest

from longtake.drill.faults import half_synced_checkpoint
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.run import drill


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_the_drill_passes(ground: Ground) -> None:
    """Nothing is sampled that is not whole; the rest is evaluated meanwhile."""
    result = drill(half_synced_checkpoint.FAULT, ground)
    assert result.passed, result.message
    assert result.detected_seconds is not None


def test_what_was_tried_too_early_or_never_done_is_complained_of(place: Place) -> None:
    """Nobody has evaluated anything of this run."""
    found = half_synced_checkpoint.judge(place.run, 5, 10, untouched=False, seconds=6.0)
    assert found.complaints[:3] == [
        "step 10 was tried while its files were short",
        "step 10 was to be refused until it was whole, and its attempts ended []",
        "it was evaluated 6.0 s after it was whole, not within 5",
    ]
    assert "the result of step 5 is not whole" in found.complaints
