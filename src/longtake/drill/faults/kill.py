"""The training process is killed, as the kernel, a scheduler or a power cut does."""

import random

from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.place import Place
from longtake.drill.result import Result
from longtake.drill.resumption import SAME, go_on
from longtake.errors import RunError

_NAME = "kill"
_STEPS = range(8, 36)
"""Those it is killed after: there is a checkpoint, and the run is far from its end."""


def drill(ground: Ground) -> Result:
    """Kill a run after a random step, and resume it."""
    place = ground.fresh(_NAME)
    step = random.choice(_STEPS)  # noqa: S311 - not a secret
    kill_after(place, step)
    verdict = go_on(_NAME, place, ground)
    return verdict.result(
        f"Killed after step {step}, it went on by the same command; {verdict.steps_lost} steps "
        f"were trained twice. From the first to the last, {SAME}."
    )


def kill_after(place: Place, step: int) -> None:
    """Train, and kill the run when it has done so many steps, and has something to go on from.

    Raises:
        RunError: it had ended before.
    """
    with place.launch() as launch:
        launch.wait_for_rows(step)
        launch.wait_for_checkpoints(1)
        if not launch.kill():
            raise RunError(f"The run was over before it could be killed after step {step}.")


FAULT = Fault(
    _NAME,
    does="Kills a run (SIGKILL) after a random step and starts the same command again.",
    must="Every step, and weights, averages and optimizer at the end, are the same to the bit.",
    drill=drill,
)
