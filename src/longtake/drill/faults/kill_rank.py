"""One rank of two is killed, and its launcher starts both again."""

import os
import random
import signal
import time

from longtake import heartbeat
from longtake.drill.comeback import await_comeback, judge, judge_same_end, must_name, must_note
from longtake.drill.fault import Fault
from longtake.drill.ground import ON_TWO, Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.resumption import SAME
from longtake.drill.verdict import Verdict
from longtake.errors import RunError

_NAME = "kill-rank"
_RANK = 1
_STEPS = range(8, 30)
"""Those it is killed after: there is a checkpoint, and the run is far from its end."""


def drill(ground: Ground) -> Result:
    """Kill it after a random step, and let all go on."""
    place, verdict, undisturbed = ground.fresh(_NAME), Verdict(_NAME), ground.undisturbed_on_two
    step = random.choice(_STEPS)  # noqa: S311 - not a secret
    with place.launch(*ON_TWO, processes=2, restarts=1) as launch:
        launch.wait_for_rows(step)
        launch.wait_for_checkpoints(1)
        os.kill(_pid_of(place, _RANK), signal.SIGKILL)
        comeback = await_comeback(launch, place, time.monotonic())
        launch.finish()
        must_note(verdict, launch, _RANK)
        must_name(verdict, launch, f"Rank {_RANK} of 2")
    judge(verdict, comeback)
    judge_same_end(verdict, place, undisturbed)
    verdict.detected_seconds = comeback.seconds
    return verdict.result(
        f"Rank {_RANK} was killed after step {step} and named; {comeback.seconds:.1f} s later a "
        f"step was trained again, and {verdict.steps_lost} steps twice. From the first to the "
        f"last, {SAME}."
    )


def _pid_of(place: Place, rank: int) -> int:
    """The process of a rank of a run on this machine.

    Raises:
        RunError: it is not there.
    """
    for pulse in heartbeat.read_all(heartbeat.folder_of(place.run.path)):
        if pulse.role == "rank" and pulse.rank == rank and pulse.is_alive:
            return pulse.pid
    raise RunError(f"Rank {rank} of {place.run.path} was over before it could be killed.")


FAULT = Fault(
    _NAME,
    does="Kills one rank of two (SIGKILL) after a random step of `longtake launch`.",
    must="It is named; both go on from the newest checkpoint, and the end is the same to the bit.",
    drill=drill,
)
