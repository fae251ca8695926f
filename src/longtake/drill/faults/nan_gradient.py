"""One number of one gradient is lost in one step, as by a flipped bit of a card."""

from longtake.drill.divergence import judge_skip, reports
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import LOST_PARAMETER, Sabotage
from longtake.drill.place import Place
from longtake.drill.result import Result

_NAME = "nan-gradient"
_STEP = 20


def drill(ground: Ground) -> Result:
    """Make a number of a gradient NaN, once."""
    place = ground.fresh(_NAME)
    with place.launch(sabotage=Sabotage("lose-gradient", _STEP)) as launch:
        launch.finish()
    return judge(place, ground.undisturbed)


def judge(place: Place, undisturbed: Place) -> Result:
    """The parameter is named, and that one update is left out."""
    verdict = judge_skip(_NAME, place, _STEP, undisturbed)
    verdict.must_be_equal(place.run, undisturbed.run, until=_STEP)
    said = " ".join(report["message"] for report in reports(place.run))
    verdict.must(LOST_PARAMETER in said, f"the message does not name {LOST_PARAMETER}: {said}")
    return verdict.result(f"That update was left out, and it said: {said}")


FAULT = Fault(
    _NAME,
    does="Makes one number of one parameter's gradient NaN, in one step.",
    must="That update alone is left out, and the message names the parameter.",
    drill=drill,
)
