"""What is read of a process: its threads, and the calls that each is in."""

from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any


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
