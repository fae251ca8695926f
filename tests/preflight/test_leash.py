"""What is started on a node ends with who asked for it."""

import os
import subprocess
import sys
import time

from longtake.preflight.launched import Launched

_LEASH = [sys.executable, "-P", "-m", "longtake.preflight.leash"]


def _start(*command: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen([*_LEASH, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_command_ends_with_stdin() -> None:
    """The command, and what it has started, are ended when stdin is."""
    with _start("sh", "-c", "sleep 60 & echo $!; wait") as leash:
        assert leash.stdout is not None
        assert leash.stdin is not None
        child = int(leash.stdout.readline())
        assert _is_alive(child)
        leash.stdin.close()
        assert leash.wait(10) == 128 + 15
        end = time.monotonic() + 5
        while _is_alive(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _is_alive(child)


def test_the_command_ends_by_itself() -> None:
    """Its exit status and what it says come through."""
    launched = Launched(_start("sh", "-c", "echo out; echo longtake: no >&2; exit 3"))
    while launched.is_running:
        time.sleep(0.02)
    assert launched.has_failed
    said = launched.end()
    assert (said.status, said.out, said.last_line) == (3, "out\n", "no")
