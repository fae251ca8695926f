"""One rank of two hangs, and the other waits for it."""

import os
import signal
from functools import partial

from longtake.drill import culprit
from longtake.drill.comeback import judge_near_end
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.hangs import Hang
from longtake.drill.harms import Harm, Sabotage
from longtake.drill.launch import Launch
from longtake.drill.looking import Sighting
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.verdict import Verdict

_FAMILY = "hung-rank"
_STEP = 23
_RANKS = 2
_HUNG, _WAITING = 1, 0


def drill(ground: Ground, name: str, harm: Harm) -> Result:
    """Train until rank 1 hangs and somebody says so."""
    place, verdict = ground.fresh(name), Verdict(name)
    with _launch(place, harm) as launch:
        hang = launch.wait_for_hang()
        sentence = _judge_verdict(verdict, launch, place, hang)
    return verdict.result(sentence)


def drill_stopped(ground: Ground) -> Result:
    """Let the rank that was stopped go on when it has been named, and train to the end."""
    name = f"{_FAMILY}-stopped"
    place, verdict = ground.fresh(name), Verdict(name)
    with _launch(place, "hang-rank-1-stopped") as launch:
        hang = launch.wait_for_hang()
        sentence = _judge_verdict(verdict, launch, place, hang)
        os.kill(hang.pid, signal.SIGCONT)
        went_on = launch.find_on_node("went_on")
        launch.finish()
        culprit.must_be_the_only_alarm(verdict, launch)
    verdict.must(went_on is not None, "no event says that it went on")
    judge_near_end(verdict, place, ground.undisturbed)
    return verdict.result(f"{sentence} Let go on, it trained to its end, and nothing was lost.")


def drill_killed(ground: Ground) -> Result:
    """Let the watcher kill the rank that hangs, so that torchrun starts all of them again."""
    name = f"{_FAMILY}-killed"
    place, verdict = ground.fresh(name), Verdict(name)
    with _launch(place, "hang-rank-1-asleep", "watch.action=kill", restarts=1) as launch:
        hang = launch.wait_for_hang()
        sentence = _judge_verdict(verdict, launch, place, hang)
        killed = launch.find_on_node("killed_rank")
        resumed = launch.find("resumed")
        launch.finish()
    judge_restart(verdict, hang, killed, resumed)
    judge_near_end(verdict, place, ground.undisturbed)
    seconds = resumed.at - hang.at if resumed else 0.0
    return verdict.result(
        f"{sentence} It was killed, and torchrun started all ranks again: {seconds:.1f} s after it "
        f"had hung the run went on, and trained {verdict.steps_lost} steps twice."
    )


def judge_restart(
    verdict: Verdict, hang: Hang, killed: Sighting | None, resumed: Sighting | None
) -> None:
    """That rank was killed, and the run went on from a checkpoint of before it hung."""
    pid = killed.event["pid"] if killed else None
    verdict.must(pid == hang.pid, f"rank {_HUNG} is process {hang.pid}, and {pid} was killed")
    step = resumed.event["step"] if resumed else None
    verdict.must(
        step is not None and 0 < step <= _STEP, f"it went on from step {step}, and hung in {_STEP}"
    )


def _launch(place: Place, harm: Harm, *changes: str, restarts: int = 0) -> Launch:
    sabotage = Sabotage(harm, _STEP)
    changes = ("data.workers=1", *changes)
    return place.launch(*changes, processes=_RANKS, sabotage=sabotage, restarts=restarts)


def _judge_verdict(verdict: Verdict, launch: Launch, place: Place, hang: Hang) -> str:
    found, said = culprit.find_stall(launch, place)
    culprit.judge(verdict, found, said, hang, rank=_HUNG)
    culprit.must_wait(verdict, said, [_WAITING])
    return str(said.get("sentence"))


def _fault(how: str, does: str, harm: Harm) -> Fault:
    name = f"{_FAMILY}-{how}"
    return Fault(
        name,
        does=does,
        must="It is named with its line in 15 s, and it is said who waits for it.",
        drill=partial(drill, name=name, harm=harm),
    )


ASLEEP = _fault("asleep", "Lets one rank of two sleep for ever in Python.", "hang-rank-1-asleep")
HOLDING_GIL = _fault(
    "holding-gil",
    "Lets one rank of two wait for ever in a C library that keeps Python's lock.",
    "hang-rank-1-holding-gil",
)
IN_COLLECTIVE = _fault(
    "in-collective",
    "Lets one rank of two begin a collective that the other never joins.",
    "hang-rank-1-in-collective",
)
STOPPED = Fault(
    f"{_FAMILY}-stopped",
    does="Stops one rank of two (SIGSTOP), and lets it go on when it was named.",
    must="It is named with its line in 15 s; then the run goes on, and nothing is lost.",
    drill=drill_stopped,
)
KILLED = Fault(
    f"{_FAMILY}-killed",
    does="Lets one rank of two sleep for ever, with watch.action = kill and torchrun's restarts.",
    must="It is named and killed; all ranks go on from the last checkpoint, and the run ends well.",
    drill=drill_killed,
)
