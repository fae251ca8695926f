"""Where an epoch ends, the weights are changed by what is no training: no loss shows it."""

from longtake.drill.divergence import judge_repair, reports, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import STEPS_PER_EPOCH, Ground
from longtake.drill.harms import NORM_FACTOR, Sabotage
from longtake.drill.place import LONG, Place
from longtake.drill.result import Result

_NAME = "weight-norm-step-at-epoch-end"
_EPOCH = 7
_STEP = _EPOCH * STEPS_PER_EPOCH - 1


def drill(ground: Ground) -> Result:
    """Let the weights grow in the last update before an epoch."""
    place = ground.fresh(_NAME, LONG)
    with place.launch(sabotage=Sabotage("raise-norm", _STEP)) as launch:
        launch.finish()
    return judge(place, ground.undisturbed_long)


def judge(place: Place, undisturbed: Place) -> Result:
    """Found within an epoch, and put down to the edge."""
    within = STEPS_PER_EPOCH
    verdict = judge_repair(_NAME, place, _STEP, "edge_step", undisturbed, within=within)
    said = " ".join(report["message"] for report in reports(place.run))
    edge = f"epoch {_EPOCH} of stage all begins"
    verdict.must(edge in said, f"the message does not say that {edge}: {said}")
    if verdict.complaints:
        return verdict.result("")
    return verdict.result(f"It said: {said} {sentence(place.run, undisturbed.run)}")


FAULT = Fault(
    _NAME,
    does=f"Raises the norm of a run's weights by {NORM_FACTOR - 1:.1%} where an epoch ends.",
    must="It is found within an epoch; the message names the edge; the run goes back.",
    drill=drill,
)
