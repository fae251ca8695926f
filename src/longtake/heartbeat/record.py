"""How a heart's record lies in memory, and where."""

import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Role = Literal["rank", "decode"]
Phase = Literal[
    "start",
    "rendezvous",
    "open",
    "plan",
    "build",
    "load",
    "cache",
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "save",
    "rollback",
    "evaluate",
    "idle",
    "decode",
    "ended",
]
"""`start` to `cache` come before the first step: `start` until the process has imported its code,
`open` for data, run directory and checkpoints; `checkpoint` copies what is saved, `save` waits
until it is whole; `idle` waits for work, and is no stall; `ended`: all went as it should, and the
process is about to be gone."""

PHASES: tuple[Phase, ...] = get_args(Phase)
ROLES: tuple[Role, ...] = get_args(Role)

# A sequence number, odd while the rest is written; then who, where and since when; then a text.
MAGIC = 0x4C54_4842_0002
SEQUENCE = struct.Struct("<QQ")
FACTS = struct.Struct("<IQBiiiqqiBqqq8s2H")
TEXT_BYTES = 1024
TABLE = struct.Struct(f"<{3 * len(PHASES)}Q")
FACTS_AT = SEQUENCE.size
TEXT_AT = FACTS_AT + FACTS.size
TABLE_AT = TEXT_AT + TEXT_BYTES
SIZE = 4096


class Hearts(NamedTuple):
    """Where a rank has the processes that it starts keep their records."""

    folder: Path
    rank: int


def path_of(folder: Path, role: Role, rank: int, pid: int) -> Path:
    """Where a process's record lies, whether there is one or not."""
    return folder / f"{role}_{rank}_{pid}"


def folder_of(run: Path) -> Path:
    """Where the records of a run's processes on this node are kept."""
    memory = Path("/dev/shm")  # noqa: S108 - where a node's processes share memory
    if not os.access(memory, os.W_OK):
        memory = Path("/tmp")  # noqa: S108 - the same for all of a user's shells
    # Containers may share memory and name, and number their processes each for itself.
    numbers = Path("/proc/self/ns/pid").stat().st_ino
    name = hashlib.sha256(f"{numbers} {run.resolve()}".encode()).hexdigest()[:12]
    return memory / f"longtake-{os.getuid()}" / f"{socket.gethostname()}-{name}"
