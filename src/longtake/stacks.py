"""Stack dumps of running processes, from py-spy, faulthandler or /proc; torch-free.

py-spy reads even a process that holds the GIL or is stopped. Where it has no permission (another
user's process, a container without ptrace), a process that called `enable_stack_dumps` writes its
own stacks at a signal. No dump raises or waits without limit: its `method` shows how it was read.
"""

import ctypes
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import takewhile
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, TextIO

from longtake.process import read_stat

SIGNAL = signal.SIGUSR2
"""Signal at which a process writes its stacks. (SIGUSR1 is Slurm's warning before a time limit.)"""

Call = tuple[str, str, int]
"""One call of a thread's stack: function, file and line."""
Stack = tuple[Call, ...]
"""Stack: the calls of one thread, innermost first."""

_SET_PTRACER, _ANYONE = 0x59616D61, ctypes.c_ulong(-1)  # from linux/prctl.h
_NATIVE_SECONDS, _OTHER_SECONDS = 4.0, 2.0
# py-spy pauses a process by ptrace and waits for it to stop; these would never answer.
_STOPPED = ("T", "t", "D")
_NATIVE, _NONBLOCKING, _PLAIN = ("--native",), ("--nonblocking",), ()
# Few for C calls: py-spy needs some 300 MB for each process that uses torch.
_NUM_THREADS, _NUM_NATIVE_THREADS = 2 * (os.cpu_count() or 1), max(2, (os.cpu_count() or 1) // 2)
_KILL_SECONDS = 1.0  # py-spy may itself wait for the device that the process waits for
_SIGNAL_SECONDS, _POLL_SECONDS = 1.0, 0.05
_THREAD_LINE = re.compile(
    r"(?:Current thread|Thread) 0x(\w+)(?: \[(.*?)\])? \(most recent call first\):"
)
_CALL_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_call = itemgetter("function", "file", "line")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?t?/|.*/python3\d*\.zip/|(?=<frozen )")
_LIBRARIES = ("torch/", "torchgen/", "functorch/", "triton/", "numpy/")
"""Packages whose calls `user_frame` skips to find the line of the user's code."""


@dataclass(frozen=True)
class Frame:
    """One call of a thread's stack; `line` is 0 in code without line numbers."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"


@dataclass(frozen=True)
class ThreadStack:
    """A thread with its stack, innermost call first."""

    name: str
    is_active: bool
    has_gil: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class StackDump:
    """Stack dump of a process: the stacks of its threads, and its state."""

    pid: int
    state: str  # in /proc: R runs, S waits, D waits for a device, T stopped, Z zombie; empty: gone
    method: str  # py-spy --native, py-spy --nonblocking, py-spy, faulthandler, proc or none
    threads: tuple[ThreadStack, ...] = ()  # the main thread first; empty: only /proc could be read
    raw: str = ""  # what was read, as text

    @property
    def where(self) -> str:
        frames = self.threads[0].frames if self.threads else ()
        return next((str(frame) for frame in frames if frame.file.endswith(".py")), "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- In the process that may be dumped.

_dump_file: TextIO | None = None  # faulthandler keeps its number, not the file


def enable_stack_dumps(file: Path | None = None) -> None:
    """Make this process write its stacks at SIGUSR2 and at a crash, and allow py-spy to read it.

    Stacks of a crash go to stderr. py-spy is allowed by PR_SET_PTRACER, where Yama forbids ptrace.

    Args:
        file: file for the stacks at SIGUSR2; an old one is replaced. None: stderr.

    Raises:
        OSError: the file cannot be written.
    """
    global _dump_file
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANYONE)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    opened = None
    if file is None:
        faulthandler.register(SIGNAL)
    else:
        file.unlink(missing_ok=True)
        opened = file.open("x")  # not through a link
        faulthandler.register(SIGNAL, opened)
    # The new file is registered before the old one is closed: faulthandler keeps the number of a
    # descriptor, which a file opened later may get.
    before, _dump_file = _dump_file, opened
    if before is not None:
        before.close()


def stack_file(folder: Path, pid: int) -> Path:
    return folder / f"stacks_{pid}.txt"


# --- Dumping other processes.


def dump_process(pid: int, signal_file: Path | None = None, native: bool = True) -> StackDump:
    """Dump the stacks of a process within some seconds; the process continues.

    Args:
        pid: the process.
        signal_file: file to which it writes its stacks at SIGUSR2; see `enable_stack_dumps`.
        native: also read C calls where possible, which pauses the process for up to a second. With
            False it is paused only if it cannot be read while it runs.
    """
    state = state_of(pid)
    for options in _py_spy_options(state, native):
        limit = _NATIVE_SECONDS if options == _NATIVE else _OTHER_SECONDS
        threads = _by_py_spy(pid, options, limit)
        if threads:
            return StackDump(pid, state, " ".join(("py-spy", *options)), threads)
        if threads is None and options != _NATIVE:
            break  # it would time out again
    can_answer = bool(state) and state not in _STOPPED
    # A process that is stopped or in state D runs no signal handler.
    if signal_file and can_answer and (text := _by_signal(pid, signal_file)):
        return parse_faulthandler(pid, text, state)
    texts = ((name, _read(f"/proc/{pid}/{name}").strip()) for name in _PROC_FILES)
    raw = "\n".join(f"{name}: {text}" for name, text in texts if text)
    return StackDump(pid, state, "proc" if raw else "none", raw=raw)


_PROC_FILES = ("status", "wchan", "stack", "syscall")


def dump_all(processes: Mapping[int, Path | None]) -> dict[int, StackDump]:
    """Dump the stacks of processes in parallel, without C calls.

    `processes` has the file to which each process writes its stacks at SIGUSR2, by pid.
    """
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dump") as threads:
        begun = {
            pid: threads.submit(dump_process, pid, file, False) for pid, file in processes.items()
        }
        return {pid: future.result() for pid, future in begun.items()}


def read_native_stacks(pids: Sequence[int], seconds: float) -> dict[int, tuple[ThreadStack, ...]]:
    """Read the stacks of processes with their C calls, in the given order, until time is up.

    Each process is paused for up to a second. py-spy needs some 300 MB for one that uses torch, so
    only a few are read at the same time. A process that could not be read is missing.
    """
    end = time.monotonic() + seconds

    def read(pid: int) -> tuple[ThreadStack, ...] | None:
        left = min(_NATIVE_SECONDS, end - time.monotonic())
        stopped = state_of(pid) in ("", "Z", *_STOPPED)
        return () if stopped or left <= 0 else _by_py_spy(pid, _NATIVE, left)

    with ThreadPoolExecutor(_NUM_NATIVE_THREADS, thread_name_prefix="dump") as threads:
        found = dict(zip(pids, threads.map(read, pids), strict=True))
    return {pid: threads for pid, threads in found.items() if threads}


def parse_faulthandler(pid: int, text: str, state: str = "") -> StackDump:
    """Parse stacks from the text that Python's faulthandler writes at a signal or at a crash."""
    threads: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if begun := _THREAD_LINE.fullmatch(line):
            name = begun[2] or f"0x{begun[1]}"
            threads.append((name, line.startswith("Current"), []))
        elif threads and (call := _CALL_LINE.fullmatch(line)):
            threads[-1][2].append(Frame(call[3], call[1], int(call[2])))
    # faulthandler lists the youngest thread first, so the main thread comes last.
    found = tuple(
        ThreadStack(name, is_active=now, has_gil=now, frames=tuple(each))
        for name, now, each in reversed(threads)
    )
    return StackDump(pid, state, "faulthandler" if found else "none", found, text)


def _py_spy_options(state: str, native: bool) -> tuple[tuple[str, ...], ...]:
    """Return py-spy's options in the order in which to try them on a process.

    Some come twice: reading a running process may fail once and succeed the next time.
    """
    if state in ("", "Z"):
        return ()
    if state in _STOPPED:
        return _NONBLOCKING, _NONBLOCKING
    return _NATIVE if native else _NONBLOCKING, _NONBLOCKING, _PLAIN


def _by_py_spy(pid: int, options: Sequence[str], seconds: float) -> tuple[ThreadStack, ...] | None:
    """Return a process's thread stacks by py-spy, main first; empty: unreadable; None: too late.

    With --nonblocking the process is not paused, and the stacks may be inconsistent; --native
    pauses it for a tenth of a second or more.
    """
    if not (program := _py_spy(sys.executable)):
        return ()
    command = [program, "dump", "--json", *options, "--pid", str(pid)]
    try:
        found = json.loads(_output_of(command, seconds))
        # On Linux the main thread's id is the pid. A stable sort keeps the order of the others.
        found.sort(key=lambda each: each["os_thread_id"] != pid)
        threads = tuple(map(_thread_stack, found))
    except subprocess.TimeoutExpired:
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return threads if any(thread.frames for thread in threads) else ()


def _output_of(command: Sequence[str], seconds: float) -> bytes:
    # Not subprocess.run: after a timeout it waits for the killed process without limit.
    process = subprocess.Popen(  # noqa: S603 - py-spy, by its path
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return output if process.returncode == 0 else b""


@cache
def _py_spy(python: str) -> str | None:
    beside = Path(python).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _thread_stack(found: dict[str, Any]) -> ThreadStack:
    frames = [Frame(call["name"], call["filename"], call["line"]) for call in found["frames"]]
    is_main = found["os_thread_id"] == found["pid"]
    name = found["thread_name"] or ("MainThread" if is_main else f"0x{found['thread_id']:x}")
    return ThreadStack(name, found["active"], found["owns_gil"], tuple(frames))


def _by_signal(pid: int, file: Path) -> str:
    """Send SIGUSR2 to a process, and return the text of the stacks that it writes to `file`.

    Empty: the process does not answer, or has no handler.
    """
    # SigCgt is the mask of caught signals. Without a handler SIGUSR2 would end the process.
    caught = re.search(r"^SigCgt:\s+(\w+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    if not caught or not int(caught[1], 16) >> (SIGNAL - 1) & 1:
        return ""
    # The file keeps earlier dumps: only what is added now is this one's.
    before = _read(file)
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    now, end = before, time.monotonic() + _SIGNAL_SECONDS
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        last, now = now, _read(file)
        # There is no end mark: the text is complete when it has not grown between two looks.
        if now == last != before:
            break
    return now.removeprefix(before)


# --- Comparing stacks, which dumps hold as JSON.


def common_calls(stacks: Sequence[Stack]) -> Stack:
    outermost_first = zip(*(reversed(stack) for stack in stacks), strict=False)
    same = takewhile(lambda calls: len(set(calls)) == 1, outermost_first)
    return tuple(calls[0] for calls in same)[::-1]


def python_stack(thread: Mapping[str, Any]) -> Stack:
    """Return the Python calls of a `ThreadStack` that was read from JSON, innermost first.

    C calls are dropped, so that stacks read with and without them compare equal.
    """
    return _without_native(tuple(map(_call, thread["frames"])))


@lru_cache(4096)
def _without_native(calls: Stack) -> Stack:
    return tuple(call for call in calls if is_python_file(call[1]))


def native_stack(thread: Mapping[str, Any]) -> Stack:
    return tuple(takewhile(lambda call: not is_python_file(call[1]), map(_call, thread["frames"])))


def is_python_file(file: str) -> bool:
    return file.endswith(".py") or file.startswith("<")


def user_frame(calls: Stack) -> Call | None:
    return next((call for call in calls if not is_library_file(call[1])), None)


def is_library_file(file: str) -> bool:
    if packages := _PACKAGES.match(file):
        return file[packages.end() :].startswith(_LIBRARIES)
    return _STANDARD.match(file) is not None


def short_file(file: str) -> str:
    """Shorten the path of a source file to start at its package; other paths stay as they are."""
    if found := _PACKAGES.match(file) or _STANDARD.match(file):
        return file[found.end() :]
    _, ours, rest = file.rpartition("/longtake/")
    return f"longtake/{rest}" if ours else file


# --- Which processes there are.


def state_of(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat else ""


def parents() -> dict[int, int]:
    """Return the pid of the parent process of each process on this machine, by pid."""
    found: dict[int, int] = {}
    with suppress(OSError):
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and (stat := read_stat(int(path.name))) and stat.parent:
                found[stat.pid] = stat.parent
    return found


def descendants(
    pid: int, known: Mapping[int, int] | None = None, without: Collection[int] = ()
) -> list[int]:
    """Return the pids of all descendants of a process, parents before their children.

    Args:
        pid: the process, which is not in the result.
        known: result of `parents`; None: it is called.
        without: processes that are left out with all their descendants.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in sorted((parents() if known is None else known).items()):
        children[parent].append(child)
    found = [pid]
    for each in found:  # the list grows during the loop: a breadth-first search
        found += (child for child in children[each] if child not in without)
    return found[1:]


def _read(path: Path | str) -> str:
    """Read a file of /proc or of stacks; empty: it is missing or cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
