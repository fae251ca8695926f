"""What is read of a process: its threads, and the calls that each is in."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import takewhile
from operator import itemgetter
from pathlib import PurePath
from typing import Any

Call = tuple[str, str, int]
"""Function, file and line."""
Stack = tuple[Call, ...]
"""The innermost call first."""

_call = itemgetter("function", "file", "line")


@dataclass(frozen=True)
class Frame:
    """One call. `line` is 0 where the code has no line numbers."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Thread:
    """One thread's calls, the innermost first."""

    name: str
    is_active: bool
    has_gil: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class StackDump:
    """Where a process was.

    Attributes:
        pid: the process.
        state: as in /proc: R running, S waiting, D waiting for a device, T stopped, Z dead and not
            yet reaped; empty: there is no such process.
        method: `py-spy --native`, `py-spy --nonblocking`, `py-spy`, `faulthandler`, `proc`, or
            `none`.
        threads: what they were doing, the main thread first; empty if only /proc could be read.
        raw: what was read, as text.
    """

    pid: int
    state: str
    method: str
    threads: tuple[Thread, ...] = ()
    raw: str = ""

    @property
    def where(self) -> str:
        """The innermost Python line of the main thread, as `file.py:12 in function`; or nothing."""
        frames = self.threads[0].frames if self.threads else ()
        return next((str(frame) for frame in frames if frame.file.endswith(".py")), "")

    def as_dict(self) -> dict[str, Any]:
        """All of it, as what JSON can hold."""
        return asdict(self)


def unmoved(stacks: Sequence[Stack]) -> Stack:
    """The calls that are the same in all stacks, counted from the outermost."""
    outermost_first = zip(*(reversed(stack) for stack in stacks), strict=False)
    same = takewhile(lambda calls: len(set(calls)) == 1, outermost_first)
    return tuple(calls[0] for calls in same)[::-1]


def stack_of(thread: Mapping[str, Any]) -> Stack:
    """A thread's Python calls, of a `Thread` as JSON has it.

    Without those of C, so that a stack that was read with them equals one that was not.
    """
    return _of_python(tuple(map(_call, thread["frames"])))


@lru_cache(4096)
def _of_python(calls: Stack) -> Stack:
    return tuple(call for call in calls if is_python(call[1]))


def native_of(thread: Mapping[str, Any]) -> Stack:
    """The calls of C that a thread's innermost Python call has led to; empty if none are known."""
    calls = map(_call, thread["frames"])
    return tuple(takewhile(lambda call: not is_python(call[1]), calls))


def is_python(file: str) -> bool:
    """Whether a call's file is Python code: a module, or such as <string>, <frozen posixpath>."""
    return file.endswith(".py") or file.startswith("<")
