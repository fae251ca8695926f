"""The ranks of this node as processes: which have ended, and how."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS = 0.02


def ended_badly(pids: Iterable[int]) -> dict[int, int]:
    """Exit codes other than 0, negative for signals, of children that nobody has waited for yet."""
    found = {}
    for pid in pids:
        with suppress(ChildProcessError):
            told = _end_of(pid)
            if told is not None and told.si_status:
                is_exit = told.si_code == os.CLD_EXITED
                found[pid] = told.si_status if is_exit else -told.si_status
    return found


def await_end(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait for children to end by themselves; returns those that have not."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    return left


def tell(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the children that still run."""
    for pid in pids:
        if _runs(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def kernel_kills() -> int:
    """Processes of this machine that the kernel has ended for want of memory, ever."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _runs(pid: int) -> bool:
    try:
        return _end_of(pid) is None
    except ChildProcessError:  # it was waited for
        return False


def _end_of(pid: int) -> "os.waitid_result | None":
    """How a child has ended; it can still be waited for.

    Raises:
        ChildProcessError: it was waited for before.
    """
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
