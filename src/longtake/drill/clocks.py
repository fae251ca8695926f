"""The clock of a node goes wrong while a run is under way: what must hold then."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longtake.drill.false_clock import WORD
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.verdict import Verdict, identities_of
from longtake.fsio import read_json, read_json_lines
from longtake.health.clock import STEP_SECONDS
from longtake.node_dir import NodeEventKind, this_node
from longtake.process import environment, program

UNWATCHED = "watch.enabled=false"
"""So that no other watcher than the one below looks after the run."""


def befall(
    ground: Ground,
    fault: str,
    kind: NodeEventKind,
    within_seconds: float,
    slow_from: int,
    *arguments: str,
) -> tuple[Verdict, Sighting | None]:
    """Train a run whose watcher's clock goes wrong as the arguments say; how that was told of.

    Args:
        ground: of the drills.
        fault: its name.
        kind: of the event that must tell of it.
        within_seconds: how soon.
        slow_from: the step from which the run dawdles, so that it lasts long enough.
        arguments: of `drill.false_clock`.
    """
    place = ground.fresh(fault)
    with place.launch(UNWATCHED, sabotage=Sabotage("dawdle", slow_from)) as launch:
        launch.wait_for_rows(1)
        with watched_by_false_clock(place, *arguments):
            found = find(launch, place, kind)
            launch.finish()
    return judge(fault, place, found, kind, within_seconds, ground.undisturbed), found


def told(found: Sighting | None) -> str:
    """How a drill ends that went well."""
    said = found.event["message"] if found else ""
    return (
        f"It said: {said} No stall was called, and every step is the undisturbed run's to the bit."
    )


@contextmanager
def watched_by_false_clock(place: Place, *arguments: str) -> Iterator[None]:
    """Watch a place's run by a clock that goes wrong as the arguments say; ended with the block."""
    with (place.folder / "watcher.log").open("wb") as log:
        watcher = subprocess.Popen(  # noqa: S603 - ourselves
            program("longtake.drill.false_clock", *arguments, str(place.run.path)),
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
        )
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def find(launch: Launch, place: Place, kind: NodeEventKind) -> Sighting | None:
    """Wait for the word that the clock goes wrong; None if the run ends without it."""
    for _ in launch.looks():
        for event in _events(place):
            if event["event"] == kind:
                return Sighting(event, time.monotonic())
    return None


def judge(
    fault: str,
    place: Place,
    found: Sighting | None,
    kind: NodeEventKind,
    within_seconds: float,
    undisturbed: Place,
) -> Verdict:
    """It is told of in time, nobody is called stuck for it, and the run is the undisturbed one."""
    verdict = Verdict(fault)
    began = read_json(place.folder / WORD).get("at")
    verdict.must(began is not None, "the clock has never gone wrong")
    verdict.must(found is not None, f"no event {kind} tells of the clock")
    if found and began is not None:
        seconds = verdict.detected_seconds = found.at - began
        verdict.must(seconds <= within_seconds, f"it was told of after {seconds:.1f} s")
    others = {"stalled", "clock_stepped", "clock_slewed", "rank_died"} - {kind}
    told = [event["event"] for event in _events(place)]
    wrong = sorted(others.intersection(told))
    verdict.must(not wrong, f"what there was not was told of as well: {', '.join(wrong)}")
    verdict.must(told.count(kind) <= 1, f"it was told of {told.count(kind)} times")
    everything = identities_of(place.catalog())
    verdict.must_be_exact(place.run, everything, everything)
    verdict.must_be_equal(place.run, undisturbed.run)
    return verdict


def _events(place: Place) -> list[dict[str, Any]]:
    """What was told of, but for what the machine's own clock may have done by next to nothing."""
    events = read_json_lines(this_node(place.run).events_path)
    return [
        event
        for event in events
        if event["event"] != "clock_stepped" or abs(event["seconds"]) >= STEP_SECONDS
    ]
