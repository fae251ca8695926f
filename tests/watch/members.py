"""A process of a run for tests of dumps: says who it is, starts others, and hangs as told.

python members.py FOLDER rank|decode RANK HOW [COMMAND OF A CHILD...]
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from longtake.heartbeat import Heart
from longtake.stacks import allow_inspection, signal_path


def main(folder: str, role: str, rank: str, how: str, *child: str) -> None:
    """Join the run, start a child, and hang."""
    place = Path(folder)
    if role == "rank":
        heart = Heart(place, "rank", rank=int(rank), world_size=2)
        heart.join("abcdefgh")
        allow_inspection(signal_path(place, os.getpid()))
        heart.enter("forward")
    else:
        heart = Heart(place, "decode", rank=int(rank))
        memory = os.memfd_create("stderr")
        os.dup2(memory, 2)
        allow_inspection()
        heart.enter("decode", "a clip", "/clips/a.mp4")
    if child:
        subprocess.Popen(child)
    print("here", flush=True)  # noqa: T201
    globals()[how](heart)


def sleeps(heart: Heart) -> None:
    """Hang in Python."""
    time.sleep(600)


def holds(heart: Heart) -> None:
    """Hang in C without giving Python's lock back."""
    while True: ctypes.PyDLL(None).sleep(600)  # noqa: E701  # fmt: skip


def works(heart: Heart) -> None:
    """Go on."""
    while True:
        heart.enter("backward")
        time.sleep(0.01)
        heart.enter("forward")


def idles(heart: Heart) -> None:
    """Have nothing to do."""
    heart.enter("idle", "")
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
