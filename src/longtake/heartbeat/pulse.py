"""Reads what processes say of themselves, without asking them."""

import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longtake.heartbeat.record import (
    FACTS,
    FACTS_AT,
    MAGIC,
    PHASES,
    ROLES,
    SEQUENCE,
    SIZE,
    TABLE,
    TABLE_AT,
    TEXT_AT,
    Phase,
    Role,
)

_READ_ATTEMPTS = 100


@dataclass(frozen=True)
class Timing:
    """How long a phase takes in this process.

    Attributes:
        count: how often it was left since the process has settled.
        longest: seconds of the longest time.
        total: seconds of all of them.
    """

    count: int
    longest: float
    total: float


@dataclass(frozen=True)
class Pulse:
    """A record as it was read.

    Attributes:
        path: of the record.
        role: what the process is.
        pid: the process.
        started: when it was started, in clock ticks since the machine's start: with the pid, its
            identity.
        rank: in the run; of a decoding process, its rank's.
        local_rank: on the node; likewise.
        world_size: how many ranks there are.
        launch: the same on all ranks of a launch, and another for each; empty: not known yet.
        step: global step of a rank; how many windows a decoding process has begun.
        steps_done: in this launch.
        phase: what it does.
        seconds: for how long, when it was read.
        detail: the shape of a rank's clips; the identity of the clip that is decoded.
        path_of_clip: the file of that clip; empty: none.
        is_settled: whether a phase's usual length can be expected of it: it is past its first
            steps, and knows the shape of its clips.
        timings: by phase, of those that were left since it has settled.
        work_seconds: what the process itself needed for its steps since it has settled, without
            waiting for others.
        work_count: of how many steps.
    """

    path: Path
    role: Role
    pid: int
    started: int
    rank: int
    local_rank: int
    world_size: int
    launch: str
    step: int
    steps_done: int
    phase: Phase
    seconds: float
    detail: str
    path_of_clip: str
    is_settled: bool
    timings: Mapping[Phase, Timing]
    work_seconds: float
    work_count: int

    @property
    def is_alive(self) -> bool:
        """Whether the process still exists, as itself; a zombie does not."""
        return start_of(self.pid) == self.started

    def as_dict(self) -> dict[str, Any]:
        """What it says, without timings, as what JSON can hold."""
        names = ("role", "pid", "rank", "local_rank", "world_size", "launch", "step", "steps_done")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"phase": self.phase, "seconds": round(self.seconds, 3), "detail": self.detail}
        return {**facts, "path_of_clip": self.path_of_clip, "is_settled": self.is_settled}


def read(path: Path) -> Pulse | None:
    """Read a record; None: there is none, or it is no record of this version."""
    with suppress(OSError, ValueError, LookupError, struct.error), _opened(path) as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():  # another user made it up
            return None
        for _ in range(_READ_ATTEMPTS):
            page, now = os.pread(file.fileno(), SIZE, 0), time.monotonic_ns()
            after = os.pread(file.fileno(), SEQUENCE.size, 0)
            if len(page) < SIZE or SEQUENCE.unpack_from(page)[0] != MAGIC:
                return None
            sequence = SEQUENCE.unpack_from(page)[1]
            if sequence == SEQUENCE.unpack(after)[1] and sequence % 2 == 0:
                return _pulse(path, page, now)
        return _pulse(path, page, now)  # its process was stopped while it wrote
    return None


def read_all(folder: Path) -> list[Pulse]:
    """All records of a folder: ranks first, by rank; also those of processes that are gone."""
    paths = folder.iterdir() if folder.is_dir() else ()
    pulses = (read(path) for path in paths if path.name.startswith(ROLES) and not path.suffix)
    found = [pulse for pulse in pulses if pulse is not None]
    return sorted(found, key=lambda each: (ROLES.index(each.role), each.rank, each.pid))


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
    )


def _pulse(path: Path, page: bytes, now: int) -> Pulse:
    facts = FACTS.unpack_from(page, FACTS_AT)
    pid, started, role, rank, local_rank, world_size, step, steps_done = facts[:8]
    phase, is_settled, since, work_ns, work_count, launch, text_bytes, clip_bytes = facts[8:]
    text = page[TEXT_AT : TEXT_AT + text_bytes].decode(errors="replace")
    clip_at = TEXT_AT + text_bytes
    return Pulse(
        path=path,
        role=ROLES[role],
        pid=pid,
        started=started,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        launch=launch.rstrip(b"\0").decode(errors="replace"),
        step=step,
        steps_done=steps_done,
        phase=PHASES[phase],
        seconds=max(0, now - since) / 1e9,
        detail=text,
        path_of_clip=page[clip_at : clip_at + clip_bytes].decode(errors="replace"),
        is_settled=bool(is_settled),
        timings=dict(_timings(page)),
        work_seconds=work_ns / 1e9,
        work_count=work_count,
    )


def _timings(page: bytes) -> Iterator[tuple[Phase, Timing]]:
    table = TABLE.unpack_from(page, TABLE_AT)
    for number, phase in enumerate(PHASES):
        count, longest, total = table[3 * number : 3 * number + 3]
        if count:
            yield phase, Timing(count, longest / 1e9, total / 1e9)


def age_of(pid: int) -> float:
    """Seconds since a process was started, to a hundredth; no step of the clock touches it."""
    started = start_of(pid) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def start_of(pid: int) -> int:
    """When a process was started, in ticks since the machine's start; 0: it is gone."""
    with suppress(OSError, ValueError, IndexError):
        # The program's name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0
