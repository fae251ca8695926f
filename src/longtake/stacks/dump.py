"""Finds out where processes are, by the first way that works.

py-spy reads a process that holds Python's lock or is stopped. Where it is not allowed to (another
user's process, a container without ptrace), a process that has allowed its inspection writes its
own stacks to a file. What is left is what /proc tells.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from longtake.stacks import proc
from longtake.stacks.frames import StackDump, Thread
from longtake.stacks.last_words import by_signal, from_faulthandler
from longtake.stacks.pyspy import by_py_spy

_NATIVE_SECONDS, _OTHER_SECONDS = 4.0, 2.0
_STOPPED = ("T", "t", "D")  # py-spy would wait for these to stop, which they cannot
_NATIVE, _NONBLOCKING, _PLAIN = ("--native",), ("--nonblocking",), ()
_AT_ONCE, _NATIVE_AT_ONCE = 2 * (os.cpu_count() or 1), max(2, (os.cpu_count() or 1) // 2)


def dump(pid: int, signal_file: Path | None = None, native: bool = True) -> StackDump:
    """Find out where a process is, within some seconds; it goes on undisturbed.

    Args:
        pid: the process.
        signal_file: where it writes its stacks when it gets SIGUSR2; see `allow_inspection`.
        native: calls of C below Python's as well, where that works; it is paused meanwhile.
            Otherwise it is not, unless it runs too fast to be read so.
    """
    state = proc.state_of(pid)
    for options in _ways(state, native):
        limit = _NATIVE_SECONDS if options == _NATIVE else _OTHER_SECONDS
        threads = by_py_spy(pid, options, limit)
        if threads:
            return StackDump(pid, state, " ".join(("py-spy", *options)), threads)
        if threads is None and options != _NATIVE:
            break  # it would hang again
    can_answer = bool(state) and state not in _STOPPED
    if signal_file and can_answer and (text := by_signal(pid, signal_file)):
        return from_faulthandler(pid, text, state)
    raw = "\n".join(proc.account(pid))
    return StackDump(pid, state, "proc" if raw else "none", raw=raw)


def dump_all(processes: Mapping[int, Path | None], native: bool = False) -> dict[int, StackDump]:
    """Dump several processes, some at a time.

    Args:
        processes: each with its signal file; see `dump`.
        native: see `dump`.
    """
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="dump") as threads:
        begun = {pid: threads.submit(dump, pid, processes[pid], native) for pid in processes}
        return {pid: future.result() for pid, future in begun.items()}


def read_natively(pids: Sequence[int], seconds: float) -> dict[int, tuple[Thread, ...]]:
    """Read as many processes with their calls of C as can be in so many seconds, in this order.

    Each is paused for a second or less, and py-spy needs some 300 MB for one that uses torch.
    """
    end = time.monotonic() + seconds

    def read(pid: int) -> tuple[Thread, ...] | None:
        left = min(_NATIVE_SECONDS, end - time.monotonic())
        stopped = proc.state_of(pid) in ("", "Z", *_STOPPED)
        return () if stopped or left <= 0 else by_py_spy(pid, _NATIVE, left)

    with ThreadPoolExecutor(_NATIVE_AT_ONCE, thread_name_prefix="dump") as threads:
        found = dict(zip(pids, threads.map(read, pids), strict=True))
    return {pid: threads for pid, threads in found.items() if threads}


def _ways(state: str, native: bool) -> Iterator[tuple[str, ...]]:
    """Options of py-spy; what is read of a process that runs may fail, and not the next time."""
    if state in ("", "Z"):
        return
    if state in _STOPPED:
        yield from (_NONBLOCKING, _NONBLOCKING)
    elif native:
        yield from (_NATIVE, _NONBLOCKING, _PLAIN)
    else:
        yield from (_NONBLOCKING, _NONBLOCKING, _PLAIN)
