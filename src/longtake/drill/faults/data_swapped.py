"""The catalog holds other clips, all of them, when the run goes on."""

from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.drill.data_change import go_on, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import NUM_CLIPS, Place
from longtake.drill.result import Result

_NAME = "data-swapped"


def drill(ground: Ground) -> Result:
    """Kill a run in mid-epoch, put another catalog in the place of its own, and resume it."""
    place = ground.stopped(_NAME)
    old = place.catalog()
    swap(place)
    verdict = go_on(_NAME, place, old, "finish", ground)
    return verdict.result(sentence(place, old, "finish", verdict))


def swap(place: Place) -> None:
    """Write a catalog of other clips over the old one; the old clips stay where they are."""
    folder = place.folder / "data" / "other_clips"
    captions = write_clips(folder, NUM_CLIPS, seed=1)
    index([folder], captions=captions, out=place.catalog_path, workers=0)


FAULT = Fault(
    _NAME,
    does="Kills a run in mid-epoch and puts a catalog of other clips in the place of its own.",
    must="Told to finish, it ends the epoch with the old clips, then trains the new ones.",
    drill=drill,
)
