"""The watcher itself is killed."""

import os
import signal
import time

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict, identities_of

_NAME = "dead-watcher"
_WITHIN_SECONDS = 5.0
_SLOW_FROM = 38


def drill(ground: Ground) -> Result:
    """Kill a run's watcher, and train to the end."""
    place = ground.fresh(_NAME)
    with place.launch(sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch:
        launch.wait_for_rows(_SLOW_FROM)
        pid = launch.wait_for_watcher()
        os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        found = find_another(launch, pid)
        launch.finish()
    verdict = judge(place, pid, at, found, ground.undisturbed)
    return verdict.result(
        f"{verdict.detected_seconds or 0:.1f} s after watcher {pid} was killed there was another; "
        "every step is the undisturbed run's to the bit."
    )


def find_another(launch: Launch, pid: int) -> Sighting | None:
    """Wait for the word of a watcher that is another process; None if the run ends without it."""
    for _ in launch.looks():
        for event in launch.node_events():
            if event["event"] == "watching" and event["pid"] != pid:
                return Sighting(event, time.monotonic())
    return None


def judge(place: Place, pid: int, at: float, found: Sighting | None, undisturbed: Place) -> Verdict:
    """Another is there in time, and the run has not noticed."""
    verdict = Verdict(_NAME)
    verdict.must(found is not None, f"no watcher has taken the place of process {pid}")
    if found:
        seconds = verdict.detected_seconds = found.at - at
        verdict.must(
            seconds <= _WITHIN_SECONDS,
            f"another watches after {seconds:.1f} s, not within {_WITHIN_SECONDS:g}",
        )
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)
    return verdict


FAULT = Fault(
    _NAME,
    does="Kills a run's watcher (SIGKILL).",
    must="The run goes on, the same to the bit, and has another watcher within 5 s.",
    drill=drill,
)
