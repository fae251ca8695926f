"""What /proc says of one process, whoever's it is, without stopping or asking it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = re.compile(r"\d+ \((.*)\) (.*)", re.DOTALL)
_PPID, _USER_TICKS, _SYSTEM_TICKS = 1, 11, 12  # counted from the state, which follows the name


@dataclass(frozen=True)
class ProcessFacts:
    """What /proc says of a process.

    Attributes:
        pid: the process.
        ppid: its parent.
        command: its command line; in brackets its name alone, where the line could not be read.
        state: one letter; see `StackDump`.
        cpu_seconds: user and system time of all its threads since it was started.
    """

    pid: int
    ppid: int
    command: str
    state: str
    cpu_seconds: float


def facts(pid: int) -> ProcessFacts | None:
    """What can be known of a process; None: there is none."""
    if not (found := _STAT.match(read(Path(f"/proc/{pid}/stat")))):
        return None
    fields = found[2].split()
    state, ticks = fields[0], int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    command = f"[{found[1]}]"
    if state not in "DZ":  # a command line lies in the process's memory, and reading it can wait
        command = read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip() or command
    return ProcessFacts(pid, int(fields[_PPID]), command, state, ticks / _TICKS)


def parent_of(pid: int) -> int:
    """A process's parent; 0: it has none, or there is no such process."""
    found = _STAT.match(read(Path(f"/proc/{pid}/stat")))
    return int(found[2].split(maxsplit=2)[_PPID]) if found else 0


def state_of(pid: int) -> str:
    """The letter that /proc gives a process's state; empty if there is no such process."""
    found = re.search(r"^State:\s+(\w)", read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1] if found else ""


def catches(pid: int, signal_number: int) -> bool:
    """Whether a process has a handler for a signal."""
    found = re.search(r"^SigCgt:\s+(\w+)", read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signal_number - 1) & 1)


def account(pid: int) -> Iterator[str]:
    """What /proc says of where a process is, as far as it may be read."""
    for name in ("status", "wchan", "stack", "syscall"):
        if text := read(Path(f"/proc/{pid}/{name}")).strip():
            yield f"{name}: {text}"


def read(path: Path) -> str:
    """A file's text; empty where there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
