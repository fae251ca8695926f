"""A decoding process is killed, as the kernel does when memory runs out."""

import os
import signal

from longtake.drill.decoder_fault import judge
from longtake.drill.fault import Fault
from longtake.drill.ground import Ground
from longtake.drill.result import Result
from longtake.drill.workers import stop_while_decoding

_NAME = "killed-loader-worker"


def drill(ground: Ground) -> Result:
    """Kill a decoding process while it has a clip open."""
    place = ground.fresh(_NAME)
    with place.launch() as launch:
        launch.wait_for_rows(1)
        stopped = stop_while_decoding(launch, place.clips)  # so that it is killed at work
        os.kill(stopped.pid, signal.SIGKILL)
        found = launch.find("decoder_died", pid=stopped.pid)
        launch.finish()
    verdict = judge(_NAME, "decoder_died", place, stopped, found, ground.undisturbed)
    return verdict.result(
        f"Process {stopped.pid} was killed while it decoded {stopped.clip.name} and was replaced; "
        "every step is the undisturbed run's to the bit."
    )


FAULT = Fault(
    _NAME,
    does="Kills a decoding process (SIGKILL) while it decodes a clip.",
    must="It is replaced; every step stays the same to the bit.",
    drill=drill,
)
