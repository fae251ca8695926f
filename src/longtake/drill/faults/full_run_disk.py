"""The disk of the run directory is full: first for the watcher, then for the trainer."""

import resource
import time

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.harms import Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, go_on
from longtake.drill.verdict import Verdict

_NAME = "full-run-disk"
_FULL_SECONDS = 3.0
_SLOW_FROM = 20
_NO_LIMIT = resource.RLIM_INFINITY


def drill(ground: Ground) -> Result:
    """Leave the watcher no room for a while, then the trainer; make room, and resume the run."""
    place = ground.fresh(_NAME)
    with place.launch(sabotage=Sabotage("dawdle", _SLOW_FROM)) as launch:
        launch.wait_for_rows(_SLOW_FROM)
        watcher = launch.wait_for_watcher()
        leave_room(watcher, 0)
        at = time.monotonic()
        _let_pass(launch, _FULL_SECONDS)
        leave_room(watcher, _NO_LIMIT)
        found = launch.find_on_node("disk_full")
        if found is None:  # and the run has ended
            return Verdict(_NAME, judge_watcher(None, watcher, watcher)).result("")
        pid = launch.wait_for_watcher()
        step = len(place.run.metrics())
        leave_room(launch.pid, place.run.metrics_path.stat().st_size)
        code = launch.wait()
    complaints = judge_watcher(found, watcher, pid)
    complaints += judge_end(code, launch.said, place)
    verdict = go_on(_NAME, place, ground)
    verdict.complaints[:0] = complaints
    verdict.detected_seconds = found.at - at
    return verdict.result(
        f"Without room for {_FULL_SECONDS:g} s the watcher watched on, and said so when it could; "
        f"the run did not notice. Without room itself, after step {step}, it ended with an error. "
        f"Started again, with room, it trained {verdict.steps_lost} steps twice; {SAME}."
    )


def leave_room(pid: int, num_bytes: int) -> None:
    """Let no file of a process grow beyond some size, as on a disk that is full; see `fill`."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, _NO_LIMIT))


def judge_watcher(found: Sighting | None, before: int, after: int) -> list[str]:
    """What is wrong with how the watcher bore it: it has to live on, and to tell of it."""
    verdict = Verdict(_NAME)
    verdict.must(before == after, f"the watcher was process {before}, and {after} afterwards")
    verdict.must(found is not None, "no event tells that the watcher found no room")
    return verdict.complaints


def judge_end(code: int, said: str, place: Place) -> list[str]:
    """What is wrong with how the trainer ended: with an error that names the disk."""
    verdict, words = Verdict(_NAME), " ".join(said.split())
    verdict.must(code == 2, f"without room it ended with exit code {code} and not 2")
    wanted = "cannot be written"
    verdict.must(wanted in words, f"nobody is told that the run directory {wanted}")
    verdict.must("Traceback" not in said, "it ended with a traceback")
    verdict.must(bool(place.run.checkpoint_steps()), "no checkpoint is left")
    return verdict.complaints


def _let_pass(launch: Launch, seconds: float) -> None:
    begun = time.monotonic()
    for _ in launch.looks():
        if time.monotonic() - begun > seconds:
            return
    raise launch.unexpected("ended though it had room")


FAULT = Fault(
    _NAME,
    does="Leaves a run's watcher no room on the disk, then the run itself; then starts it again.",
    must="The watcher lives on and tells of it; the run says what is wrong; nothing else is lost.",
    drill=drill,
)
