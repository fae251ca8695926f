"""Clips go missing from the catalog while the run is down."""

from longtake.drill.data_change import go_on, sentence
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import NUM_CLIPS
from longtake.drill.result import Result

_NAME = "data-shrunk"
_REMOVED = NUM_CLIPS * 3 // 10


def drill(ground: Ground) -> Result:
    """Kill a run in mid-epoch, delete clips, and resume it."""
    place = ground.stopped(_NAME)
    old = place.catalog()
    for clip in sorted(place.clips.glob("*.mp4"))[:_REMOVED]:
        clip.unlink()
    place.index()
    verdict = go_on(_NAME, place, old, "merge", ground)
    return verdict.result(sentence(place, old, "merge", verdict))


FAULT = Fault(
    _NAME,
    does="Kills a run in mid-epoch and deletes three in ten of its clips.",
    must="Told to merge, it repeats no clip and misses none.",
    drill=drill,
)
