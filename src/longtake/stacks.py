"""Says where one process is: by py-spy, by faulthandler, or by what /proc tells.

A process that hangs is asked from outside, so nothing here waits for it, and nothing raises: a dump
that could not be had says so. py-spy reads a process that holds Python's lock or is stopped; where
it is not allowed to (another user's process, a container without ptrace), a process that has
registered faulthandler for SIGUSR1 writes its own stacks to a file.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NATIVE_SECONDS, _PLAIN_SECONDS, _SIGNAL_SECONDS = 4.0, 2.0, 1.0
_STOPPED = ("T", "t", "D")  # py-spy would wait for these to stop, which they cannot


@dataclass(frozen=True)
class Frame:
    """One call. `line` is 0 where the code has no line numbers."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


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
        method: `py-spy --native`, `py-spy`, `py-spy --nonblocking`, `faulthandler`, `proc`, or
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


def dump(pid: int, signal_file: Path | None = None) -> StackDump:
    """Find out where a process is, by the first way that works, within some seconds.

    Args:
        pid: the process; it goes on undisturbed.
        signal_file: where it writes its stacks when it gets SIGUSR1 (`faulthandler.register`).
    """
    state = state_of(pid)
    options = [["--nonblocking"]] if state in _STOPPED else [["--native"], []]
    for some in options if state else []:
        if threads := _by_py_spy(pid, some):
            method = " ".join(["py-spy", *some])
            return StackDump(pid, state, method, *threads)
    can_answer = state and state not in _STOPPED and _catches_sigusr1(pid)
    if signal_file and can_answer and (text := _by_signal(pid, signal_file)):
        return from_faulthandler(pid, text, state)
    raw = "\n".join(_by_proc(pid))
    return StackDump(pid, state, "proc" if raw else "none", raw=raw)


def state_of(pid: int) -> str:
    """The letter that /proc gives a process's state; empty if there is no such process."""
    found = re.search(r"^State:\s+(\w)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1] if found else ""


def _by_py_spy(pid: int, options: list[str]) -> tuple[tuple[Thread, ...], str] | None:
    if not (program := _py_spy()):
        return None
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    limit = _NATIVE_SECONDS if "--native" in options else _PLAIN_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, check=True)  # noqa: S603 - py-spy, by its path
        found = sorted(json.loads(done.stdout), key=lambda each: each["os_thread_id"] != pid)
        return tuple(map(_thread, found)), done.stdout.decode()
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return None


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _thread(found: dict[str, Any]) -> Thread:
    frames = [Frame(call["name"], call["filename"], call["line"]) for call in found["frames"]]
    is_main = found["os_thread_id"] == found["pid"]
    name = found["thread_name"] or ("MainThread" if is_main else f"0x{found['thread_id']:x}")
    return Thread(name, found["active"], found["owns_gil"], tuple(frames))


def _catches_sigusr1(pid: int) -> bool:
    """Whether it has a handler: without one SIGUSR1 would end it."""
    found = re.search(r"^SigCgt:\s+(\w+)", _read(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _by_signal(pid: int, file: Path) -> str:
    """What the process has written about itself, once it has written no more for a moment."""
    before = _read(file)
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return ""
    now, end = before, time.monotonic() + _SIGNAL_SECONDS
    while time.monotonic() < end:
        time.sleep(0.05)
        last, now = now, _read(file)
        if now == last != before:
            break
    return now.removeprefix(before)


_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x(\w+)(?: \[(.*?)\])? \(most recent call first\):"
)
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def from_faulthandler(pid: int, text: str, state: str = "") -> StackDump:
    """Read what faulthandler wrote, of a living process or as the last words of a dead one."""
    threads: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if begun := _THREAD.fullmatch(line):
            name = begun[2] or f"0x{begun[1]}"
            threads.append((name, line.startswith("Current"), []))
        elif threads and (call := _CALL.fullmatch(line)):
            threads[-1][2].append(Frame(call[3], call[1], int(call[2])))
    # Python lists the youngest thread first, so that the main thread comes last.
    found = [Thread(name, now, has_gil=now, frames=tuple(f)) for name, now, f in reversed(threads)]
    return StackDump(pid, state, "faulthandler" if found else "none", tuple(found), text)


def _by_proc(pid: int) -> Iterator[str]:
    for name in ("status", "wchan", "stack", "syscall"):
        if text := _read(Path(f"/proc/{pid}/{name}")).strip():
            yield f"{name}: {text}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
