"""The node's clock is set back while a run is under way, as by a daemon that corrects it."""

from longtake.drill.clocks import befall, told
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.looking import Sighting
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
    arguments = ("--step", str(_SECONDS), "--after", str(_AFTER_SECONDS))
    verdict, found = befall(ground, _NAME, "clock_stepped", _WITHIN_SECONDS, _SLOW_FROM, *arguments)
    judge_size(verdict, found)
    return verdict.result(told(found))


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
