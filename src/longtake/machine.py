"""What there is of the machine that this process runs on."""

import os


def num_cores() -> int:
    """Cores that this process may use: its own share where the system says so (Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
