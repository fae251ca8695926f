"""There is no room for further checkpoints."""

import resource

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, go_on, must_have_no_leftovers
from longtake.drill.verdict import Verdict

_NAME = "disk-full-while-saving"
_ROOM_BYTES = 2**18
"""A third of the smallest file of weights; several times of what a run writes besides."""


def drill(ground: Ground) -> Result:
    """Let a run's checkpoints find no room any more, to its end; make room, and resume it."""
    place = ground.fresh(_NAME)
    with place.launch() as launch:
        launch.wait_for_checkpoints(1)
        fill(launch)
        at = launch.looked_at
        found = launch.find("checkpoint_failed")
        code = launch.wait()
    saved = place.run.checkpoint_steps()[-1]
    complaints = judge_loss(place, saved, found, code, launch.said)
    verdict = go_on(_NAME, place, ground)
    verdict.complaints[:0] = complaints
    if found:
        verdict.detected_seconds = found.at - at
    return verdict.result(
        f"Without room after the checkpoint of step {saved} it said that the steps since then are "
        f"lost, and ended with an error. Started again, with room, it trained {verdict.steps_lost} "
        f"steps twice; {SAME}."
    )


def fill(launch: Launch) -> None:
    """Let no file of a process grow beyond what small ones need, as on a disk that is full.

    A limit of the kernel's (RLIMIT_FSIZE), which meets writes half-way through a file as a full
    disk does ("File too large" instead of "No space left on device"): a file system of one's own
    to be filled cannot be had everywhere without privileges.
    """
    resource.prlimit(launch.pid, resource.RLIMIT_FSIZE, (_ROOM_BYTES, resource.RLIM_INFINITY))


def judge_loss(place: Place, saved: int, found: Sighting | None, code: int, said: str) -> list[str]:
    """What is wrong with how it was told that there is no room, and what would be lost."""
    verdict = Verdict(_NAME)
    verdict.must(found is not None, "no event says that a checkpoint failed")
    verdict.must(code == 2, f"though its end was not saved, it ended with exit code {code}")
    kept = place.run.checkpoint_path(saved).name
    sentence = f"nothing is lost but the steps since {kept}"
    verdict.must(sentence in " ".join(said.split()), f"nobody is told that {sentence}")
    must_have_no_leftovers(verdict, place)
    return verdict.complaints


FAULT = Fault(
    _NAME,
    does="Leaves a run no room for further checkpoints; then makes room and starts it again.",
    must="It says what is lost: the steps since the last whole checkpoint, and nothing else.",
    drill=drill,
)
