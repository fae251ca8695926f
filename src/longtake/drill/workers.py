"""Finds a run's decoding processes and what each has open, by /proc: they know of no drill."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longtake.drill.launch import Launch
from longtake.stacks import state_of

_PROGRAM = b"longtake.data.worker"
_LOOK_SECONDS = 0.0002  # a clip of the drills is decoded in half a millisecond
_STOP_SECONDS = 1.0


@dataclass(frozen=True)
class Stopped:
    """A decoding process that was stopped.

    Attributes:
        pid: the process.
        clip: the file that it was decoding.
        at: when, by the monotonic clock, in seconds.
    """

    pid: int
    clip: Path
    at: float


def stop_while_decoding(launch: Launch, folder: Path) -> Stopped:
    """Stop (SIGSTOP) one of a run's decoding processes while it has a file of the folder open.

    Raises:
        RunError: the run ended before one could be caught.
    """
    for _ in launch.looks(_LOOK_SECONDS):
        for pid in decoders(launch.pid):
            if open_file(pid, folder) and (stopped := _stop(pid, folder)):
                return stopped
    raise launch.unexpected("ended before a decoding process could be caught at work")


def decoders(pid: int) -> Iterator[int]:
    """The decoding processes that a process has started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # either may have ended meanwhile
            for child in map(int, children.read_text().split()):
                if _PROGRAM in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    yield child


def open_file(pid: int, folder: Path) -> Path | None:
    """The file of a folder that a process has open, if it has one."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = descriptor.readlink()
                if path.parent == folder:
                    return path
    return None


def _stop(pid: int, folder: Path) -> Stopped | None:
    """Stop a process; let it go on if it has meanwhile closed its file."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        at = time.monotonic()
        while state_of(pid) != "T" and time.monotonic() < at + _STOP_SECONDS:
            pass
        if clip := open_file(pid, folder):
            return Stopped(pid, clip, at)
        os.kill(pid, signal.SIGCONT)
    return None
