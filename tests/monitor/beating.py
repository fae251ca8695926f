"""A process of a run, for tests: some quick steps or clips, and then what it is told to do.

python beating.py FOLDER rank|decode RANK LAUNCH THEN
"""

import os
import signal
import sys
import time
from pathlib import Path

from longtake.heartbeat import HeartbeatWriter
from longtake.stacks import enable_stack_dumps


def main(folder: str, role: str, rank: str, launch: str, then: str) -> None:
    enable_stack_dumps()
    if role == "rank":
        heart = HeartbeatWriter(
            Path(folder), "rank", rank=int(rank), local_rank=int(rank), world_size=2
        )
        heart.set_launch(launch)
        _train(heart)
    else:
        heart = HeartbeatWriter(Path(folder), "decode", rank=int(rank))
        _decode(heart)
    globals()[then](heart)


def _train(heart: HeartbeatWriter) -> None:
    for step in range(12):
        heart.begin_step(step, "8x32x32")
        for phase in ("data", "forward", "backward", "collective", "optimizer"):
            heart.set_phase(phase)
        heart.end_step(0.001)


def _decode(heart: HeartbeatWriter) -> None:
    for number in range(25):  # so many that they are learnt from
        heart.set_phase("decode", f"clip{number}", f"/data/{number}.mp4")
        heart.set_phase("idle", "")


def _say() -> None:
    print("beating", flush=True)  # noqa: T201 - to the test


def sleeps(heart: HeartbeatWriter) -> None:
    heart.set_phase("forward")
    _say()
    time.sleep(100)


def waits(heart: HeartbeatWriter) -> None:
    heart.set_phase("collective")
    _say()
    wait = "def all_reduce():\n    time.sleep(100)\nall_reduce()"
    where = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile(wait, where, "exec"), {"time": time})  # noqa: S102 - it looks like torch's


def freezes(heart: HeartbeatWriter) -> None:
    heart.set_phase("decode", "bad", "/data/bad.mp4")
    _say()
    time.sleep(100)


def idles(heart: HeartbeatWriter) -> None:
    heart.set_phase("idle", "")
    _say()
    time.sleep(100)


def saves(heart: HeartbeatWriter) -> None:
    heart.set_phase("checkpoint")
    _say()
    time.sleep(100)


def pauses(heart: HeartbeatWriter) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    heart.set_phase("forward")
    _say()
    signal.pause()
    for _ in range(2000):
        heart.set_phase("backward")
        time.sleep(0.05)


def steps(heart: HeartbeatWriter) -> None:
    _say()
    for step in range(12, 2000):
        heart.begin_step(step, "8x32x32")
        for phase in ("data", "forward", "backward", "collective", "optimizer"):
            heart.set_phase(phase)
            time.sleep(0.01)
        heart.end_step(0.001)


def ends(heart: HeartbeatWriter) -> None:
    heart.set_phase("forward")
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
