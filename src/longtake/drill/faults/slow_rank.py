"""One rank of two does its own work more slowly than the other."""

import math
import time
from functools import partial

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Harm, Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_FAMILY = "slow-rank"
_RANKS = 2
_SLOW = 1
_FROM_STEP = 16
_LARGEST_ERROR = 0.05
"""Of what the rank is said to be slower by."""
_WITHIN_SECONDS = 45.0
_CHANGES = ("data.workers=0", "watch.health_seconds=4", "training.steps=600")


def drill(ground: Ground, name: str, harm: Harm, share: float) -> Result:
    """Train until somebody says which rank is slow."""
    place = ground.fresh(name)
    sabotage = Sabotage(harm, _FROM_STEP)
    with place.launch(*_CHANGES, processes=_RANKS, sabotage=sabotage) as launch:
        launch.wait_for_rows(_FROM_STEP)
        began, found = launch.looked_at, find_slow_rank(launch)
    verdict = judge(name, found, began, share)
    return verdict.result(f"It said: {found.event['message'] if found else ''}")


def find_slow_rank(launch: Launch) -> Sighting | None:
    """Wait for the word that a rank is slow; None if the run ends without it."""
    for _ in launch.looks():
        for event in launch.node_events():
            if event["event"] == "degraded" and "rank" in event:  # else it is no rank
                return Sighting(event, time.monotonic())
    return None


def judge(name: str, found: Sighting | None, began: float, share: float) -> Verdict:
    """That rank is named, and by how much it is slower; in time."""
    verdict = Verdict(name)
    verdict.must(found is not None, "no event says that a rank is slow")
    if not found:
        return verdict
    seconds = verdict.detected_seconds = found.at - began
    late = f"it was told of after {seconds:.1f} s, not within {_WITHIN_SECONDS:g}"
    verdict.must(seconds <= _WITHIN_SECONDS, late)
    rank, slower = found.event["rank"], found.event.get("percent", math.nan) / 100
    verdict.must(rank == _SLOW, f"rank {rank} is said to be slow, and rank {_SLOW} is")
    verdict.must(
        abs(slower - share) <= _LARGEST_ERROR,
        f"it is said to take {slower:.1%} longer, and takes {share:.0%} longer",
    )
    return verdict


def _fault(percent: int, harm: Harm) -> Fault:
    name = f"{_FAMILY}-by-{percent}"
    return Fault(
        name,
        does=f"Lets one rank of two take {percent} % longer for its own part of each step.",
        must="It is named, with how much slower it is, though all ranks' steps take the same time.",
        drill=partial(drill, name=name, harm=harm, share=percent / 100),
    )


BY_10 = _fault(10, "slow-rank-1-by-10")
BY_30 = _fault(30, "slow-rank-1-by-30")
