"""What lies between the command and the first step, measured by part on every rank.

The parts are the phases of each process's heart (`longtake.heartbeat`), so that what is measured is
what a watcher would have seen.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from longtake import heartbeat
from longtake.fsio import read_last_record
from longtake.heartbeat import Phase
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import BEGINNINGS, Metrics, RunDirectory, last_ending

PARTS: dict[Phase, str] = {
    "start": "imports",
    "rendezvous": "rendezvous",
    "open": "data",
    "plan": "plan",
    "build": "build",
    "cache": "cache",
    "load": "load",
    "data": "first_batch",
}
"""What the phases before the first step are called; all that comes then is the `first_step`."""


def parts_so_far() -> dict[str, float]:
    """Seconds by part since this process was started, in the order in which they come."""
    taken: dict[str, float] = dict.fromkeys((*PARTS.values(), "first_step"), 0.0)
    for phase, seconds in heartbeat.launch_seconds().items():
        taken[PARTS.get(phase, "first_step")] += seconds
    return {part: round(seconds, 3) for part, seconds in taken.items() if seconds}


def report_start(step: int, run: RunDirectory, world: World) -> None:
    """Write down how long this launch took to the end of its first step; all ranks call it.

    Rank 0 does, before it writes that step's metrics. Ranks wait for each other in most parts, so
    that the slowest in one is most likely the one that the others waited for in the next.
    """
    everyone = gather_objects(parts_so_far(), world)
    if world.is_first:
        run.append_event("started", step=step, **slowest(everyone), down_seconds=_down_seconds(run))


def slowest(everyone: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of each part the longest that a rank took, and which; `total` of the slowest rank."""
    parts = {part: None for each in everyone for part in each}
    taken = {part: [each.get(part, 0.0) for each in everyone] for part in parts}
    return {
        "seconds": {part: max(each) for part, each in taken.items()},
        "total": round(max(sum(each.values()) for each in everyone), 3),
        "slowest": {part: each.index(max(each)) for part, each in taken.items()},
    }


def _down_seconds(run: RunDirectory) -> float | None:
    """Since the last step of the launch before, if a crash ended that one on this very host.

    Wall-clock times, as two processes have no other in common: of two hosts they would not do.
    """
    last = read_last_record(run.metrics_path, Metrics)
    hosts = [each["host"] for each in run.record()["launches"][-2:]]
    if last is None or len(set(hosts)) != 1 or not _has_crashed(run):
        return None
    passed = round(time.time() - float(last["time"]), 3)
    return passed if passed >= 0 else None  # the clock was set back


def _has_crashed(run: RunDirectory) -> bool:
    """Whether the launch before this one has begun, and nobody wrote down its end."""
    told = [each["event"] for each in run.events()]
    beginnings = [at for at, kind in enumerate(told) if kind in BEGINNINGS]
    if len(beginnings) < 2:
        return False
    return last_ending(told[: beginnings[-1]]) is None
