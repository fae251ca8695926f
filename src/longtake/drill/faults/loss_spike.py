"""A few batches are poisoned, as by clips that were decoded wrongly."""

from longtake.drill.divergence import judge_repair, reports, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import POISONED_BATCHES, Sabotage
from longtake.drill.place import LONG, Place
from longtake.drill.result import Result

_NAME = "loss-spike"
_BATCH = 105


def drill(ground: Ground) -> Result:
    """Train with poisoned batches, which stay poisoned whenever they come."""
    place = ground.fresh(_NAME, LONG)
    with place.launch(sabotage=Sabotage("poison", _BATCH)) as launch:
        launch.finish()
    return judge(place, ground.undisturbed_long)


def judge(place: Place, undisturbed: Place) -> Result:
    """Found at its own step; those batches are never trained."""
    verdict = judge_repair(_NAME, place, _BATCH, "spike", undisturbed)
    if verdict.complaints:
        return verdict.result("")
    said, last = reports(place.run)[0]["message"], _BATCH + POISONED_BATCHES - 1
    return verdict.result(
        f"Batches {_BATCH} to {last} were poisoned, and of the first it said: {said} "
        f"{sentence(place.run, undisturbed.run)}"
    )


FAULT = Fault(
    _NAME,
    does=f"Poisons {POISONED_BATCHES} batches of a run: their pixels are far too bright.",
    must="It is found at its first step; the run goes back and round these batches.",
    drill=drill,
)
