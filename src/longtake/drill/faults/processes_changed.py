"""The run goes on with other processes than it began with."""

import json

from longtake.drill.comeback import judge_near_end
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, world_sizes

_NAME = "processes-changed"
_RANKS = 2


def drill(ground: Ground) -> Result:
    """Kill a run in mid-epoch; resume it on two ranks, which decode without workers."""
    place = ground.stopped(_NAME)
    with place.launch("data.workers=0", processes=_RANKS) as launch:
        launch.finish()
    return judge(place, ground.undisturbed)


def judge(place: Place, undisturbed: Place) -> Result:
    """No clip repeated or missing, and losses as they were but for rounding."""
    verdict = Verdict(_NAME)
    sizes = world_sizes(place.run)
    verdict.must(sizes == [1, _RANKS], f"it was trained by {sizes} processes, not by [1, {_RANKS}]")
    went_on = json.loads(place.run.record_path.read_text())["launches"][-1]["start_step"]
    error = judge_near_end(verdict, place, undisturbed)
    return verdict.result(
        f"Killed as one process, it went on from step {went_on} as {_RANKS}: "
        f"no clip was repeated or missing, and no loss is further than {error:.0e} "
        "(relative: rounding) from the undisturbed run's."
    )


FAULT = Fault(
    _NAME,
    does="Kills a run in mid-epoch and resumes it on two ranks instead of one, without workers.",
    must="No clip is repeated or missing; the losses are the same but for rounding.",
    drill=drill,
)
