"""What there is of the machine that this process runs on."""

import os
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use: its own share where the system says so (Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the processor, as Linux names them on x86; elsewhere none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())
