"""A file of the newest checkpoint is cut off, as a copy that was interrupted is."""

import os
from pathlib import Path

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, fall_back, file_of_newest

_NAME = "truncated-checkpoint"
_FILE = "model/__0_0.distcp"


def drill(ground: Ground) -> Result:
    """Kill a run, cut off the second half of its newest weights, and resume it."""
    place = ground.stopped(_NAME)
    truncate(file_of_newest(place, _FILE))
    verdict = fall_back(_NAME, place, _FILE, ground)
    return verdict.result(
        f"Half of {_FILE} was gone. It said so, went on from the checkpoint before and trained "
        f"{verdict.steps_lost} steps twice; {SAME}."
    )


def truncate(path: Path) -> None:
    """Cut off the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


FAULT = Fault(
    _NAME,
    does="Kills a run and cuts off half of a file of its newest checkpoint.",
    must="It names the file and goes on from the checkpoint before; the rest is the same.",
    drill=drill,
)
