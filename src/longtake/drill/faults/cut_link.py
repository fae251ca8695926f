"""The link of one host of two goes down, and comes back."""

import time

from longtake.drill.comeback import await_comeback, judge, judge_same_end
from longtake.drill.fault import Fault
from longtake.drill.fleet import Fleet, cluster_of
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.looking import Sighting
from longtake.drill.result import Result
from longtake.drill.resumption import SAME
from longtake.drill.verdict import Verdict

_NAME = "cut-link"
_STEP = 12
_WITHIN_SECONDS = 30.0
_CHANGES = (
    *ON_TWO,
    "watch.action=kill",
    "watch.min_seconds=4",
    "watch.round_seconds=0.5",
    "watch.health_seconds=1",
)


def drill(ground: Ground) -> Result:
    """Cut it until a rank that waits is ended, and join it again."""
    place, verdict = ground.fresh(_NAME), Verdict(_NAME)
    with (
        cluster_of(2, place.folder) as cluster,
        Fleet(place.folder, cluster, "2", _CHANGES) as fleet,
    ):
        reachable, cut = cluster.names
        fleet.wait_for_rows(_STEP)
        cluster.unplug(cut)
        cut_at = time.monotonic()
        named = _find_silent(fleet, reachable, cut)
        ended = fleet.find_on_node("killed_rank")
        cluster.plug(cut)
        comeback = await_comeback(fleet, place, plugged_at := time.monotonic())
        fleet.finish()
    down = plugged_at - cut_at
    verdict.must(named is not None, f"nobody says that {cut} does not answer")
    verdict.must(ended is not None, "no rank that waited was ended")
    if named is not None:
        seconds = verdict.detected_seconds = named.at - cut_at
        late = f"it was told of after {seconds:.1f} s, not within {_WITHIN_SECONDS:g}"
        verdict.must(seconds <= _WITHIN_SECONDS, late)
    judge(verdict, comeback)
    judge_same_end(verdict, place, ground.undisturbed_on_two)
    return verdict.result(
        f"{named.event['message'] if named else ''} A rank that waited was ended, and the link "
        f"joined after {down:.1f} s: {comeback.seconds:.1f} s later a step was trained, and "
        f"{verdict.steps_lost} steps twice. From the first to the last, {SAME}."
    )


def _find_silent(fleet: Fleet, by: str, host: str) -> Sighting | None:
    """Wait for the word of one host that another does not answer."""
    for _ in fleet.looks():
        for event in fleet.node_events():
            if event["event"] == "degraded" and event["host"] == by and host in event["reason"]:
                return Sighting(event, time.monotonic())
    return None


FAULT = Fault(
    _NAME,
    does="Takes the link of one host of two down, with watch.action = kill, and up again.",
    must="Who does not answer is named; a rank that waits is ended, and both go on, to the bit.",
    drill=drill,
)
