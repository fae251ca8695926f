"""One host of two loses all its processes, and comes back."""

import time

from longtake.drill.comeback import await_comeback, judge, judge_same_end, must_name
from longtake.drill.fault import Fault
from longtake.drill.fleet import Fleet, cluster_of
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.result import Result
from longtake.drill.resumption import SAME
from longtake.drill.verdict import Verdict

_NAME = "kill-node"
_STEP = 12


def drill(ground: Ground) -> Result:
    """Kill all of a host in mid-epoch, start it again, and its launcher."""
    place, verdict = ground.fresh(_NAME), Verdict(_NAME)
    with (
        cluster_of(2, place.folder) as cluster,
        Fleet(place.folder, cluster, "2", ON_TWO) as fleet,
    ):
        _, lost = cluster.names
        fleet.wait_for_rows(_STEP)
        fleet.kill_host(lost)
        lost_at = time.monotonic()
        cluster.boot(lost)
        fleet.start(lost)
        comeback = await_comeback(fleet, place, lost_at)
        fleet.finish()
        must_name(verdict, fleet, f"Rank 1 of 2 on {lost}")
    judge(verdict, comeback)
    judge_same_end(verdict, place, ground.undisturbed_on_two)
    verdict.detected_seconds = comeback.seconds
    return verdict.result(
        f"{lost} was killed after step {_STEP}, named, and started again at once: "
        f"{comeback.seconds:.1f} s later a step was trained, and {verdict.steps_lost} steps twice. "
        f"From the first to the last, {SAME}."
    )


FAULT = Fault(
    _NAME,
    does="Kills all processes of one host of two (network namespaces), which then comes back.",
    must="It is named; both go on from the newest checkpoint, and the end is the same to the bit.",
    drill=drill,
)
