"""What a process writes about itself: asked by a signal, or as its last words."""

import os
import re
import time
from pathlib import Path

from longtake.stacks import proc
from longtake.stacks.allow import SIGNAL
from longtake.stacks.frames import Frame, StackDump, Thread

_SIGNAL_SECONDS = 1.0
_LOOK_SECONDS = 0.05
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


def by_signal(pid: int, file: Path) -> str:
    """What a process writes about itself when asked, once it has written no more for a moment.

    Empty where it has no handler, for then the signal would end it, and where it does not answer.
    """
    if not proc.catches(pid, SIGNAL):
        return ""
    before = proc.read(file)
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    now, end = before, time.monotonic() + _SIGNAL_SECONDS
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        last, now = now, proc.read(file)
        if now == last != before:
            break
    return now.removeprefix(before)
