"""One clip is gone when the run goes on: the smallest change there is."""

from longtake.drill.data_change import go_on, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import paths_at

_NAME = "one-clip-removed"


def drill(ground: Ground) -> Result:
    """Kill a run in mid-epoch, delete a clip that it has not come to yet, and resume it."""
    place = ground.stopped(_NAME)
    old = place.catalog()
    remove_one(place, ground.undisturbed)
    verdict = go_on(_NAME, place, old, "merge", ground)
    return verdict.result(sentence(place, old, "merge", verdict))


def remove_one(place: Place, undisturbed: Place) -> None:
    """Delete a clip that the undisturbed run trains late in the epoch, and index again."""
    late = paths_at(undisturbed, step=15)[0]
    (place.clips / late.name).unlink()
    place.index()


FAULT = Fault(
    _NAME,
    does="Kills a run in mid-epoch and deletes a single clip that was still to come.",
    must="Told to merge, it repeats no clip and misses none.",
    drill=drill,
)
