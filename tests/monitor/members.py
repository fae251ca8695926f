"""A process of a run for tests of dumps: says who it is, starts others, and hangs as told.

python members.py FOLDER rank|decode RANK HOW [COMMAND OF A CHILD...]
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from longtake.heartbeat import HeartbeatWriter
from longtake.stacks import enable_stack_dumps, stack_file


def main(folder: str, role: str, rank: str, how: str, *child: str) -> None:
    place = Path(folder)
    if role == "rank":
        heart = HeartbeatWriter(place, "rank", rank=int(rank), world_size=2)
        heart.set_launch("abcdefgh")
        enable_stack_dumps(stack_file(place, os.getpid()))
        heart.set_phase("forward")
    else:
        heart = HeartbeatWriter(place, "decode", rank=int(rank))
        memory = os.memfd_create("stderr")
        os.dup2(memory, 2)
        enable_stack_dumps()
        heart.set_phase("decode", "a clip", "/clips/a.mp4")
    if child:
        subprocess.Popen(child)
    print("here", flush=True)  # noqa: T201
    globals()[how](heart)


def sleeps(heart: HeartbeatWriter) -> None:
    time.sleep(600)


def holds(heart: HeartbeatWriter) -> None:
    while True: ctypes.PyDLL(None).sleep(600)  # noqa: E701  # fmt: skip


def works(heart: HeartbeatWriter) -> None:
    while True:
        heart.set_phase("backward")
        time.sleep(0.01)
        heart.set_phase("forward")


def idles(heart: HeartbeatWriter) -> None:
    heart.set_phase("idle", "")
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
