"""Programs with a fault: a decode worker that hangs, a watcher with a wrong clock; torch-free.

    python -m longtake.faults.faulty_processes worker in-c 40 (and the arguments of a worker)
    python -m longtake.faults.faulty_processes watcher --step -2.5 --after 1.5 RUN

Each replaces one function of the real program, which contains no code for drills.
"""

import argparse
import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.data import decode_worker
from longtake.data.conditioning import Wanted
from longtake.data.conditioning import read as read_window
from longtake.fsio import read_json, write_once
from longtake.health import clock
from longtake.health.clock import Clocks, read_clocks

PROGRAM = "longtake.faults.faulty_processes"
HANG_FILE = Path("hang.json")  # written before a process hangs, in the folder where it works
CLOCK_FILE = "clock.json"  # written beside the run directory when the clock goes wrong

_SECONDS = 3600.0
# Nothing is ever written to it, and its other end stays open: a read never returns.
_EMPTY_PIPE, _KEPT_OPEN = os.pipe()
_BYTE = ctypes.create_string_buffer(1)


@dataclass(frozen=True)
class Hang:
    """Note in which a process writes where it hangs; the diagnosis of the stall must name that."""

    pid: int
    at: float  # by the monotonic clock, in seconds
    file: str = ""
    function: str = ""
    line: int = 0  # line of the statement in which it hangs; 0: it was stopped from outside
    clip: str = ""  # identity of the clip that it was decoding
    path: str = ""  # file of that clip


def asleep() -> None:
    time.sleep(_SECONDS)


def in_c() -> None:
    ctypes.CDLL(None).read(_EMPTY_PIPE, _BYTE, 1)


def holding_gil() -> None:
    # Unlike `CDLL`, `PyDLL` keeps the GIL during a call.
    ctypes.PyDLL(None).read(_EMPTY_PIPE, _BYTE, 1)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_once(hang: Callable[[], None], clip: str = "", path: str = "") -> None:
    """Write a note of the place and hang for ever, unless a process of this run did before."""
    code = hang.__code__
    # The functions above hang in their last line; a diagnosis has to name it.
    line = max(line for _, _, line in code.co_lines() if line is not None)
    found = Hang(os.getpid(), time.monotonic(), code.co_filename, code.co_name, line, clip, path)
    # The file is created by one process only, so of several workers, or after a restart, one hangs.
    if write_once(HANG_FILE, asdict(found)):
        hang()


def read_hang(folder: Path) -> Hang | None:
    record = read_json(folder / HANG_FILE)
    return Hang(**record) if record else None


@dataclass
class HangingReader:
    """Reader of clips in a decode worker that hangs after some of them, in one worker of a run."""

    hang: Callable[[], None]
    after: int  # number of windows that are read before
    _numbers: "count[int]" = field(default_factory=count)

    def read(self, window: Wanted, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if next(self._numbers) >= self.after:
            hang_once(self.hang, window.identity, str(window.media))
        return read_window(window, out)


@dataclass
class WrongClock:
    """Readings of the machine's clocks that go wrong some time after the first."""

    step_seconds: float  # step of the system time
    ppm: float  # microseconds per second by which the clocks then run fast
    after_seconds: float  # time from the first reading to the fault
    file: Path  # file that is written when the clocks go wrong
    _begun: int | None = field(default=None, init=False)

    def read(self) -> Clocks:
        """Return readings of the machine's clocks, which are wrong once the fault has begun."""
        real, monotonic, raw = read_clocks()
        if self._begun is None:
            self._begun = raw + int(self.after_seconds * 1e9)
        if (since := raw - self._begun) < 0:
            return Clocks(real, monotonic, raw)
        write_once(self.file, {"at": time.monotonic()})
        # adjtimex slews all clocks except CLOCK_MONOTONIC_RAW, and settimeofday sets only the
        # system time.
        drift = int(since * self.ppm / 1e6)
        return Clocks(real + drift + int(self.step_seconds * 1e9), monotonic + drift, raw)


def _decode() -> None:
    """Run a decode worker that hangs after some clips, by the command line's arguments."""
    how, after = sys.argv[1:3]
    # The worker's own arguments remain.
    del sys.argv[1:3]
    hang = {"in-c": in_c, "holding-gil": holding_gil}[how]
    vars(decode_worker).update(read=HangingReader(hang, int(after)).read)
    decode_worker.main()


def _watch() -> None:
    """Run a watcher with a wrong clock, by the command line's arguments."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM} watcher")
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--ppm", type=float, default=0.0)
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    wrong = WrongClock(given.step, given.ppm, given.after, given.run.parent / CLOCK_FILE)
    vars(clock).update(read_clocks=wrong.read)
    sys.argv = ["longtake.monitor.watcher", str(given.run)]
    runpy.run_module("longtake.monitor.watcher", run_name="__main__")


if __name__ == "__main__":
    {"worker": _decode, "watcher": _watch}[sys.argv.pop(1)]()
