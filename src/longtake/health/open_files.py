"""How many files the run's processes have open, and how many they may have."""

import re
from collections.abc import Sequence
from pathlib import Path

from longtake.health.check import Numbers, read_text

_LIMIT = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


def open_files(pids: Sequence[int], proc: Path = Path("/proc")) -> Numbers:
    """Of the process that is nearest to its limit; empty: none can be read.

    Args:
        pids: the processes.
        proc: where the system shows them.
    """
    found = [each for pid in pids if (each := _of(proc / str(pid))) is not None]
    if not found:
        return {}
    count, limit = max(found, key=lambda each: each[0] / each[1])
    return {"open_files": float(count), "open_files_limit": float(limit)}


NUMBERS = {
    "open_files": "Of the run's process on this node that is nearest to its limit",
    "open_files_limit": "How many files that process may have open",
}


def _of(folder: Path) -> tuple[int, int] | None:
    try:
        count = sum(1 for _ in (folder / "fd").iterdir())
    except OSError:
        return None
    limit = _LIMIT.search(read_text(folder / "limits") or "")
    return (count, int(limit[1])) if limit and int(limit[1]) else None
