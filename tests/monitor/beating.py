"""A process of a run, for tests: some quick steps or clips, and then what it is told to do.

python beating.py FOLDER rank|decode RANK LAUNCH THEN [COMMAND OF A CHILD...]
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from longtake.heartbeat import HeartbeatWriter, Phase
from longtake.stacks import enable_stack_dumps, stack_file

_PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "collective", "optimizer")


def main(folder: str, role: str, rank: str, launch: str, then: str, *child: str) -> None:
    place = Path(folder)
    if role == "rank":
        heart = HeartbeatWriter(place, "rank", rank=int(rank), local_rank=int(rank), world_size=2)
        heart.set_launch(launch)
        enable_stack_dumps(stack_file(place, os.getpid()))
        for step in range(12):
            _train(heart, step)
        heart.set_phase("forward")
    else:
        heart = HeartbeatWriter(place, "decode", rank=int(rank))
        os.dup2(os.memfd_create("stderr"), 2)
        enable_stack_dumps()
        for number in range(25):  # so many that they are learnt from
            heart.set_phase("decode", f"clip{number}", f"/data/{number}.mp4")
            heart.set_phase("idle", "")
        heart.set_phase("decode", "bad", "/data/bad.mp4")
    if child:
        subprocess.Popen(child)
    globals()[then](heart)


def _train(heart: HeartbeatWriter, step: int, seconds: float = 0.0) -> None:
    heart.begin_step(step, "8x32x32")
    for phase in _PHASES:
        heart.set_phase(phase)
        time.sleep(seconds)
    heart.end_step(0.001)


def _say() -> None:
    print("beating", flush=True)  # noqa: T201 - to the test


def sleeps(heart: HeartbeatWriter) -> None:
    _say()
    time.sleep(600)


def holds(heart: HeartbeatWriter) -> None:
    """Hang in C without giving the GIL back."""
    _say()
    while True: ctypes.PyDLL(None).sleep(600)  # noqa: E701  # fmt: skip


def waits(heart: HeartbeatWriter) -> None:
    """Wait for others, as all ranks do for one that hangs."""
    heart.set_phase("collective")
    _say()
    wait = "def all_reduce():\n    time.sleep(600)\nall_reduce()"
    where = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile(wait, where, "exec"), {"time": time})  # noqa: S102 - it looks like torch's


def idles(heart: HeartbeatWriter) -> None:
    heart.set_phase("idle", "")
    sleeps(heart)


def saves(heart: HeartbeatWriter) -> None:
    heart.set_phase("checkpoint")
    sleeps(heart)


def pauses(heart: HeartbeatWriter) -> None:
    """Hang until SIGUSR1, then go on for a while."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    _say()
    signal.pause()
    for _ in range(2000):
        heart.set_phase("backward")
        time.sleep(0.05)


def steps(heart: HeartbeatWriter) -> None:
    _say()
    for step in range(12, 2000):
        _train(heart, step, 0.01)


def ends(heart: HeartbeatWriter) -> None:
    _say()
    time.sleep(0.5)
    heart.close()


def dies(heart: HeartbeatWriter) -> None:
    heart.set_phase("backward")
    _say()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
