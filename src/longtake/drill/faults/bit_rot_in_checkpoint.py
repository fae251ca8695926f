"""One bit of the newest checkpoint is another than was saved."""

import random
from pathlib import Path

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, fall_back, file_of_newest

_NAME = "bit-rot-in-checkpoint"
_FILE = "optimizer/__0_0.distcp"


def drill(ground: Ground) -> Result:
    """Kill a run, flip a bit of its newest optimizer state, and resume it."""
    place = ground.stopped(_NAME)
    path = file_of_newest(place, _FILE)
    bit = random.randrange(8 * path.stat().st_size)  # noqa: S311 - not a secret
    flip(path, bit)
    verdict = fall_back(_NAME, place, _FILE, ground)
    return verdict.result(
        f"Bit {bit} of {_FILE} was flipped. It said so, went on from the checkpoint before and "
        f"trained {verdict.steps_lost} steps twice; {SAME}."
    )


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file; the eighth is the first of the second byte."""
    with path.open("rb+") as file:
        file.seek(bit // 8)
        octet = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([octet ^ 1 << bit % 8]))


FAULT = Fault(
    _NAME,
    does="Kills a run and flips one bit of its newest checkpoint, at random.",
    must="It names the file and goes on from the checkpoint before; the rest is the same.",
    drill=drill,
)
