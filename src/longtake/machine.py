"""What there is of the machine that this process runs on."""

import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any


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


def identity() -> dict[str, Any]:
    """Who begins a run where: user, host name, and what tells hosts of one name apart."""
    return {"uid": os.getuid(), "host": socket.gethostname(), "machine": _machine()}


def _machine() -> str:
    """The same after a restart; a hash, because machine-id itself should stay on its machine."""
    with suppress(OSError):
        number = Path("/etc/machine-id").read_text(encoding="ascii").strip()
        return hashlib.sha256(f"longtake {number}".encode()).hexdigest()[:16]
    return ""
