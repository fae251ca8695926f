"""The link of one host of three becomes slow."""

import time
from statistics import median
from typing import Any

from longtake.drill.comeback import judge_near_end
from longtake.drill.fault import Fault
from longtake.drill.fleet import Fleet, cluster_of
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.looking import Sighting
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict
from longtake.fsio import read_json_lines

_NAME = "slow-link"
_FROM_STEP = 12
_RATE, _RATE_BYTES = "8mbit", 1e6
"""Less than a tenth of what the gradients of so small a model need to go unnoticed."""
_LARGEST_ERROR = 0.4
"""Of the rate that is told: what is on its way also waits at its other end."""
_SLOWER = 3.0
_WITHIN_SECONDS = 30.0
_CHANGES = (*ON_TWO, "watch.health_seconds=1")


def drill(ground: Ground) -> Result:
    """Make it slow until somebody names it, and quick again."""
    place, verdict = ground.fresh(_NAME), Verdict(_NAME)
    with (
        cluster_of(3, place.folder) as cluster,
        Fleet(place.folder, cluster, "3", _CHANGES) as fleet,
    ):
        host = cluster.names[-1]
        fleet.wait_for_rows(_FROM_STEP)
        cluster.limit(host, _RATE)
        limited_at, first = time.monotonic(), fleet.num_rows()
        found, last = _find_link(fleet), fleet.num_rows()
        if found is not None:
            cluster.unlimit(host)
        fleet.finish()
        links = [each for each in fleet.node_events() if _names_a_link(each)]
    seconds = [row["step_seconds"] for row in read_json_lines(place.run.metrics_path)]
    slower = median(seconds[first : last + 1]) / median(seconds[1:_FROM_STEP])
    verdict.must(slower >= _SLOWER, f"steps took {slower:.1f} times as long: no slow link at all")
    judge(verdict, found, links, host, limited_at)
    judge_near_end(verdict, place, ground.undisturbed_on_two)
    return verdict.result(
        f"Steps took {slower:.0f} times as long, and it said: "
        f"{found.event['message'] if found else ''}"
    )


def judge(
    verdict: Verdict, found: Sighting | None, links: list[dict[str, Any]], host: str, since: float
) -> None:
    """That host's links are named, no others, and what they take; in time."""
    verdict.must(found is not None, "no event says that a link is slow")
    if found is None:
        return
    seconds = verdict.detected_seconds = found.at - since
    late = f"it was told of after {seconds:.1f} s, not within {_WITHIN_SECONDS:g}"
    verdict.must(seconds <= _WITHIN_SECONDS, late)
    others = [each["message"] for each in links if host not in (each["host"], each["peer"])]
    verdict.must(not others, f"a link is called slow that is not {host}'s: {others}")
    rate = found.event["send_bytes_per_second"]
    wrong = f"it is said to take {rate / 1e6:.2f} MB/s, and takes {_RATE_BYTES / 1e6:g}"
    verdict.must(abs(rate / _RATE_BYTES - 1) <= _LARGEST_ERROR, wrong)


def _find_link(fleet: Fleet) -> Sighting | None:
    """Wait for the word that a link is slow; None if the run ends without it."""
    for _ in fleet.looks():
        for event in fleet.node_events():
            if _names_a_link(event):
                return Sighting(event, time.monotonic())
    return None


def _names_a_link(event: dict[str, Any]) -> bool:
    return event["event"] == "degraded" and "peer" in event


FAULT = Fault(
    _NAME,
    does="Limits the link of one host of three to 8 Mbit/s in the middle of a run.",
    must="It is named with what it takes, though all ranks' steps are slow; nothing is lost.",
    drill=drill,
)
