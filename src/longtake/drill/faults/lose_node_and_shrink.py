"""One host of three is lost for good, and the others go on without it."""

import time

from longtake.drill.comeback import (
    await_comeback,
    judge,
    judge_near_end,
    judge_near_weights,
    must_name,
)
from longtake.drill.fault import Fault
from longtake.drill.fleet import Fleet, cluster_of
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.place import BATCH_SIZE
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, world_sizes

_NAME = "lose-node-and-shrink"
_STEP = 12


def drill(ground: Ground) -> Result:
    """Kill a host, and leave it dead."""
    place, verdict = ground.fresh(_NAME), Verdict(_NAME)
    with (
        cluster_of(3, place.folder) as cluster,
        Fleet(place.folder, cluster, "2:3", ON_TWO) as fleet,
    ):
        fleet.wait_for_rows(_STEP)
        lost = cluster.names[-1]
        fleet.kill_host(lost)
        comeback = await_comeback(fleet, place, time.monotonic())
        fleet.finish()
        must_name(verdict, fleet, f"of 3 on {lost}")
    judge(verdict, comeback)
    sizes = world_sizes(place.run)
    verdict.must(sizes == [3, 2], f"it was trained by {sizes} ranks, not by [3, 2]")
    judge_near_end(verdict, place, ground.undisturbed_on_two)
    distance = judge_near_weights(verdict, place, ground.undisturbed_on_two)
    verdict.detected_seconds = comeback.seconds
    return verdict.result(
        f"One of three hosts was lost after step {_STEP}; {comeback.seconds:.1f} s later two went "
        f"on from step {comeback.step} with batches of {BATCH_SIZE} as before: no clip was "
        f"repeated or missing, and the weights end {distance:.0e} (relative: rounding) from the "
        "undisturbed run's."
    )


FAULT = Fault(
    _NAME,
    does="Kills one host of three for good, where two are enough (`--nnodes 2:3`).",
    must="Two go on: the same batches, no clip repeated or missing, weights equal to rounding.",
    drill=drill,
)
