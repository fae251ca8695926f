"""A process of a run, for tests: some quick steps or clips, and then what it is told to do.

python beating.py FOLDER rank|decode RANK LAUNCH THEN
"""

import os
import signal
import sys
import time
from pathlib import Path

from longtake.heartbeat import Heart
from longtake.stacks.allow import allow_inspection


def main(folder: str, role: str, rank: str, launch: str, then: str) -> None:
    """Beat, and then hang as told."""
    allow_inspection()
    if role == "rank":
        heart = Heart(Path(folder), "rank", rank=int(rank), local_rank=int(rank), world_size=2)
        heart.join(launch)
        _train(heart)
    else:
        heart = Heart(Path(folder), "decode", rank=int(rank))
        _decode(heart)
    globals()[then](heart)


def _train(heart: Heart) -> None:
    for step in range(12):
        heart.begin_step(step, "8x32x32")
        for phase in ("data", "forward", "backward", "collective", "optimizer"):
            heart.enter(phase)
        heart.end_step(0.001)


def _decode(heart: Heart) -> None:
    for number in range(25):  # so many that they are learnt from
        heart.enter("decode", f"clip{number}", f"/data/{number}.mp4")
        heart.enter("idle", "")


def _say() -> None:
    print("beating", flush=True)  # noqa: T201 - to the test


def sleeps(heart: Heart) -> None:
    """Hang in a line that can be named."""
    heart.enter("forward")
    _say()
    time.sleep(100)


def waits(heart: Heart) -> None:
    """Wait for others, as all ranks do for one that hangs."""
    heart.enter("collective")
    _say()
    wait = "def all_reduce():\n    time.sleep(100)\nall_reduce()"
    where = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    exec(compile(wait, where, "exec"), {"time": time})  # noqa: S102 - it looks like torch's


def freezes(heart: Heart) -> None:
    """Hang on a clip."""
    heart.enter("decode", "bad", "/data/bad.mp4")
    _say()
    time.sleep(100)


def idles(heart: Heart) -> None:
    """Have nothing to do."""
    heart.enter("idle", "")
    _say()
    time.sleep(100)


def saves(heart: Heart) -> None:
    """Take long over a checkpoint."""
    heart.enter("checkpoint")
    _say()
    time.sleep(100)


def pauses(heart: Heart) -> None:
    """Hang until SIGUSR1, then go on for a while."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    heart.enter("forward")
    _say()
    signal.pause()
    for _ in range(2000):
        heart.enter("backward")
        time.sleep(0.05)


def steps(heart: Heart) -> None:
    """Train on."""
    _say()
    for step in range(12, 2000):
        heart.begin_step(step, "8x32x32")
        for phase in ("data", "forward", "backward", "collective", "optimizer"):
            heart.enter(phase)
            time.sleep(0.01)
        heart.end_step(0.001)


def ends(heart: Heart) -> None:
    """End as it should, some moments later."""
    heart.enter("forward")
    _say()
    time.sleep(0.5)
    heart.close()


def dies(heart: Heart) -> None:
    """Be gone without a word."""
    heart.enter("backward")
    _say()
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
