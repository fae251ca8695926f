"""How a heart's record lies in memory, and where."""

import hashlib
import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from longtake.errors import RunError

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
_PREFIX = "longtake-"


class Hearts(NamedTuple):
    """Where a rank has the processes that it starts keep their records."""

    folder: Path
    rank: int


def path_of(folder: Path, role: Role, rank: int, pid: int) -> Path:
    """Where a process's record lies, whether there is one or not."""
    return folder / f"{role}_{rank}_{pid}"


def make_private(folder: Path) -> None:
    """Make a folder of `folder_of`, which nobody but this user may write to.

    Other users of the node can make it first, under the same name.

    Raises:
        RunError: it, or the folder that it lies in, is another user's or is no folder.
        OSError: it cannot be made.
    """
    for each in (folder.parent, folder):
        if each == folder.parent and not each.name.startswith(_PREFIX):
            each.mkdir(parents=True, exist_ok=True)
            continue  # a test's, or a drill's
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise RunError(
                f"{each} belongs to user {found.st_uid}, expected a folder of user {os.getuid()}. "
                "The run's processes cannot be watched through it. Ask that user or an "
                "administrator to remove it, or train without: --set watch.enabled=false"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            each.chmod(0o700)


def open_private(path: Path) -> int:
    """Open a new file in such a folder to read and write; one that is there is replaced.

    Raises:
        OSError: it cannot be made.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def folder_of(run: Path) -> Path:
    """Where the records of a run's processes on this node are kept."""
    memory = Path("/dev/shm")  # noqa: S108 - where a node's processes share memory
    if not os.access(memory, os.W_OK):
        memory = Path("/tmp")  # noqa: S108 - the same for all of a user's shells
    # Containers may share memory and name, and number their processes each for itself.
    numbers = Path("/proc/self/ns/pid").stat().st_ino
    name = hashlib.sha256(f"{numbers} {run.resolve()}".encode()).hexdigest()[:12]
    return memory / f"{_PREFIX}{os.getuid()}" / f"{socket.gethostname()}-{name}"
