"""The node's clock runs too fast while a run is under way, as one that is being corrected."""

from longtake.drill.clocks import befall, told
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.looking import Sighting
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_NAME = "clock-slew"
_PPM = 500.0
_LARGEST_ERROR = 100.0
"""PPM: what the machine's own clock may be off, and how well it can be measured."""
_WITHIN_SECONDS = 20.0
_SLOW_FROM = 4


def drill(ground: Ground) -> Result:
    """Train, and show the watcher a clock that runs too fast."""
    arguments = ("--ppm", str(_PPM))
    verdict, found = befall(ground, _NAME, "clock_slewed", _WITHIN_SECONDS, _SLOW_FROM, *arguments)
    judge_rate(verdict, found)
    return verdict.result(told(found))


def judge_rate(verdict: Verdict, found: Sighting | None) -> None:
    """By how much, and in which direction."""
    if found:
        ppm = found.event["ppm"]
        verdict.must(
            abs(ppm - _PPM) <= _LARGEST_ERROR,
            f"it was said to be {ppm:+.0f} ppm fast, and was {_PPM:+.0f}",
        )


FAULT = Fault(
    _NAME,
    does=f"Lets the clock that a run's watcher reads run {_PPM:g} ppm too fast.",
    must="The slew is told of with its rate; no step and no stall is called.",
    drill=drill,
)
