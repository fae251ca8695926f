"""The node's clock is set back while a run is under way, as by a daemon that corrects it."""

from longtake.drill.clocks import UNWATCHED, find, judge, watched_by_false_clock
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.launch import Sighting
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_NAME = "clock-step-back"
_SECONDS = -2.5
_LARGEST_ERROR = 1e-3
"""Seconds."""
_AFTER_SECONDS = 1.5
_WITHIN_SECONDS = 3.0
_SLOW_FROM = 38


def drill(ground: Ground) -> Result:
    """Train, and show the watcher a clock that is set back."""
    place = ground.fresh(_NAME)
    arguments = ("--step", str(_SECONDS), "--after", str(_AFTER_SECONDS))
    with place.launch(UNWATCHED, sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch:
        launch.wait_for_rows(1)
        with watched_by_false_clock(place, *arguments):
            found = find(launch, place, "clock_stepped")
            launch.finish()
    verdict = judge(_NAME, place, found, "clock_stepped", _WITHIN_SECONDS, ground.undisturbed)
    judge_size(verdict, found)
    return verdict.result(
        f"It said: {found.event['message'] if found else ''} No stall was called, and every step "
        "is the undisturbed run's to the bit."
    )


def judge_size(verdict: Verdict, found: Sighting | None) -> None:
    """By how much, and in which direction."""
    if found:
        seconds = found.event["seconds"]
        verdict.must(
            abs(seconds - _SECONDS) <= _LARGEST_ERROR,
            f"it was said to be set by {seconds:+.6f} s, and was by {_SECONDS:+.6f} s",
        )


FAULT = Fault(
    _NAME,
    does=f"Sets the clock that a run's watcher reads by {_SECONDS:g} s.",
    must="The step is told of with its size, to a millisecond; no stall is called.",
    drill=drill,
)
