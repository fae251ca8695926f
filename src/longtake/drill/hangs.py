"""Ways in which a process hangs; each is one statement, whose line a verdict has to name.

Before it hangs a process writes down what it is about to do, once in a run: the drill holds what
the watcher says against that, and a process that is started again does not hang again.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from longtake.fsio import read_json, write_once

WORD = Path("hang.json")
"""The file that it leaves, in the folder in which the process works."""

_SECONDS = 3600.0
_NOTHING, _KEPT_OPEN = os.pipe()  # nobody ever writes into it
_BYTE = ctypes.create_string_buffer(1)


@dataclass(frozen=True)
class Hang:
    """What a process wrote down before it hung.

    Attributes:
        pid: the process.
        at: when, by the monotonic clock, in seconds.
        file: with the statement in which it hangs.
        function: around it.
        line: of the statement.
        clip: that it was decoding, by its identity; empty: none.
        path: of that clip.
    """

    pid: int
    at: float
    file: str
    function: str
    line: int
    clip: str = ""
    path: str = ""


def asleep() -> None:
    """Sleep in Python."""
    time.sleep(_SECONDS)


def in_c() -> None:
    """Wait inside a C library, which has given Python's lock back."""
    ctypes.CDLL(None).read(_NOTHING, _BYTE, 1)


def holding_gil() -> None:
    """Wait inside a C library that keeps Python's lock, so that no thread of Python goes on."""
    ctypes.PyDLL(None).read(_NOTHING, _BYTE, 1)


def stopped() -> None:
    """Stop the process, as a debugger or a scheduler does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_once(hang: Callable[[], None], clip: str = "", path: str = "") -> None:
    """Write down what comes, and hang; do nothing if a process of this run already has."""
    code = hang.__code__
    word = Hang(
        os.getpid(), time.monotonic(), code.co_filename, code.co_name, line_of(hang), clip, path
    )
    if write_once(WORD, asdict(word)):
        hang()


def line_of(hang: Callable[[], None]) -> int:
    """The line of the statement that a function consists of."""
    return max(line for _, _, line in hang.__code__.co_lines() if line is not None)


def read_word(folder: Path) -> Hang | None:
    """What a process that worked in a folder has left, if one hung."""
    record = read_json(folder / WORD)
    return Hang(**record) if record else None
