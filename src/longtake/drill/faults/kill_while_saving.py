"""The training process is killed while it writes a checkpoint."""

import os
import signal
import time
from pathlib import Path

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.launch import Launch
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, go_on
from longtake.stacks import state_of

_NAME = "kill-while-saving"
_LOOK_SECONDS = 0.0005  # a checkpoint of the drills is written in some 50 ms
_STOP_SECONDS = 1.0


def drill(ground: Ground) -> Result:
    """Kill a run whose newest checkpoint is half written, and resume it."""
    place = ground.fresh(_NAME)
    with place.launch() as launch:
        launch.wait_for_checkpoints(1)
        half = stop_while_saving(launch, place)
        launch.kill()
    verdict = go_on(_NAME, place, ground)
    return verdict.result(
        f"Killed while {half.name} was written, it went on from the checkpoint before; "
        f"{verdict.steps_lost} steps were trained twice, nothing was left of it, and {SAME}."
    )


def stop_while_saving(launch: Launch, place: Place) -> Path:
    """Stop (SIGSTOP) a run while a checkpoint is half written; returns the folder of that.

    Raises:
        RunError: the run ended before it could be caught.
    """
    for _ in launch.looks(_LOOK_SECONDS):
        if half := half_saved(place):
            os.kill(launch.pid, signal.SIGSTOP)
            at = time.monotonic()
            while state_of(launch.pid) != "T" and time.monotonic() < at + _STOP_SECONDS:
                pass
            if half.is_dir():
                return half
            os.kill(launch.pid, signal.SIGCONT)
    raise launch.unexpected("ended before it could be caught while it saved")


def half_saved(place: Place) -> Path | None:
    """The folder of a checkpoint that is being written, if there is one."""
    return next(place.run.checkpoints_path.glob(".step_*.partial"), None)


FAULT = Fault(
    _NAME,
    does="Kills a run (SIGKILL) while it writes a checkpoint, and starts it again.",
    must="It goes on from the checkpoint before; what follows is the same to the bit.",
    drill=drill,
)
