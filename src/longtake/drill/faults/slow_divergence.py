"""A part of the model is trained too fast, and the training goes astray little by little."""

from longtake.drill.divergence import judge_repair, reports, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import RATE_FACTOR, Sabotage
from longtake.drill.place import LONG, Place
from longtake.drill.result import Result

_NAME = "slow-divergence"
_STEP = 85
_WITHIN = 100


def drill(ground: Ground) -> Result:
    """Raise the learning rate of the attention's weights, until the process goes back."""
    place = ground.fresh(_NAME, LONG)
    with place.launch(sabotage=Sabotage("raise-rate", _STEP)) as launch:
        launch.finish()
    return judge(place, ground.undisturbed_long)


def judge(place: Place, undisturbed: Place) -> Result:
    """Found within a hundred steps, and undone."""
    verdict = judge_repair(_NAME, place, _STEP, "divergence", undisturbed, within=_WITHIN)
    if verdict.complaints:
        return verdict.result("")
    return verdict.result(
        f"{verdict.detected_steps} steps later it said: {reports(place.run)[0]['message']} "
        f"{sentence(place.run, undisturbed.run)}"
    )


FAULT = Fault(
    _NAME,
    does=f"Raises the learning rate of a run's attention {RATE_FACTOR:g}fold from a step on.",
    must=f"It is found within {_WITHIN} steps, by name; the run goes back to before it.",
    drill=drill,
)
