"""What a process is doing, as one small record in memory that a watcher reads; torch-free.

Each rank and each decoding process has a record of its own, a file of one page in the node's
memory (`/dev/shm`: a disk that hangs must not stop who tells of it). Only that process writes it,
a microsecond each time, and whoever watches reads it without asking: a process that hangs, holds
Python's lock or is stopped leaves behind what it was doing, and since when. Times are those of
CLOCK_MONOTONIC, which all processes of one node share and which no clock step touches.
"""

import hashlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from longtake.errors import LongtakeError

Role = Literal["rank", "decode"]
Phase = Literal[
    "start",
    "rendezvous",
    "build",
    "load",
    "cache",
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "rollback",
    "evaluate",
    "idle",
    "decode",
    "ended",
]
"""`start` to `cache` come before the first step; `idle` waits for work, and is no stall; `ended`:
all went as it should, and the process is about to be gone."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_ROLES: tuple[Role, ...] = get_args(Role)
_SETTLING_STEPS = 5
"""The first steps of a launch, from which nothing is learnt (compilation, allocation)."""
_SETTLING_OF_A_SHAPE = 2

# A sequence number, odd while the rest is written; then who, where and since when; then a text.
_MAGIC = 0x4C54_4842_0001
_SEQUENCE = struct.Struct("<QQ")
_FACTS = struct.Struct("<IQBiiiqqiBqqq8s2H")
_TEXT_BYTES = 1024
_TABLE = struct.Struct(f"<{3 * len(_PHASES)}Q")
_FACTS_AT = _SEQUENCE.size
_TEXT_AT = _FACTS_AT + _FACTS.size
_TABLE_AT = _TEXT_AT + _TEXT_BYTES
_SIZE = 4096
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
        return _start_of(self.pid) == self.started

    def as_dict(self) -> dict[str, Any]:
        """What it says, without timings, as what JSON can hold."""
        names = ("role", "pid", "rank", "local_rank", "world_size", "launch", "step", "steps_done")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"phase": self.phase, "seconds": round(self.seconds, 3), "detail": self.detail}
        return {**facts, "path_of_clip": self.path_of_clip, "is_settled": self.is_settled}


class Hearts(NamedTuple):
    """Where a rank has the processes that it starts keep their records."""

    folder: Path
    rank: int


class Heart:
    """Writes this process's record.

    Args:
        folder: that of `folder_of`; it is made.
        role: what this process is.
        rank: in the run.
        local_rank: on the node.
        world_size: how many ranks there are.

    Where the folder has no room, nobody sees the record, and nothing else changes.
    """

    def __init__(
        self, folder: Path, role: Role, *, rank: int = 0, local_rank: int = 0, world_size: int = 1
    ) -> None:
        pid = os.getpid()
        self.path = path_of(folder, role, rank, pid)
        self._who = (pid, _start_of(pid), _ROLES.index(role), rank, local_rank, world_size)
        self._launch = b""
        self._step = self._steps_done = 0
        self._shapes: dict[str, int] = {}
        self._phase: Phase = "start"
        self._since = time.monotonic_ns()
        self._text, self._clip = b"", b""
        self._is_settled = role != "rank"
        self._table = [0] * (3 * len(_PHASES))
        self._work_ns = self._work_count = 0
        self._sequence = 0
        self._memory = mmap.mmap(-1, _SIZE)
        self._write()
        for _ in range(2):  # the watcher of a run that has ended may take the empty folder away
            with suppress(OSError):
                self._memory = _shared(self.path, self._memory[:])
                break

    def enter(self, phase: Phase, detail: str | None = None, clip: str = "") -> None:
        """Say that a phase begins, which ends the one before; `detail` stays what it was if None.

        Args:
            phase: what begins.
            detail: of a decoding process, the identity of the clip.
            clip: the clip's file.
        """
        now = time.monotonic_ns()
        if self._is_settled:
            self._learn(now - self._since)
        if self._phase != "decode" and phase == "decode":
            self._step += 1
        self._phase, self._since = phase, now
        if detail is not None:
            self._text, self._clip = detail.encode(), clip.encode()
        self._write()

    def begin_step(self, step: int, shape: str) -> None:
        """Say which step begins, on clips of what shape."""
        known = self._shapes[shape] = self._shapes.get(shape, -1) + 1
        self._is_settled = self._steps_done >= _SETTLING_STEPS and known >= _SETTLING_OF_A_SHAPE
        self._step = step
        self._text, self._clip = shape.encode(), b""
        self._write()

    def end_step(self, work_seconds: float = 0.0) -> None:
        """Say that a step is done, and what this process itself needed for it."""
        self._steps_done += 1
        if self._is_settled and work_seconds:
            self._work_ns += int(work_seconds * 1e9)
            self._work_count += 1
        self._write()

    def join(self, launch: str) -> None:
        """Say which launch this is: eight letters that all its ranks have been told."""
        self._launch = launch.encode()
        self._write()

    def close(self) -> None:
        """Say that the process ends as it should; the record stays, for the watcher to remove."""
        self.enter("ended")

    def remove(self) -> None:
        """Take the record away, and the folder with the last one."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _learn(self, nanoseconds: int) -> None:
        at = 3 * _PHASES.index(self._phase)
        self._table[at] += 1
        self._table[at + 1] = max(self._table[at + 1], nanoseconds)
        self._table[at + 2] += nanoseconds

    def _write(self) -> None:
        memory = self._memory
        self._sequence += 1
        memory[: _SEQUENCE.size] = _SEQUENCE.pack(_MAGIC, self._sequence)  # not zero in between
        text, clip = self._text[:128], self._clip[-(_TEXT_BYTES - 128) :]
        pid, started, role, rank, local_rank, world_size = self._who
        _FACTS.pack_into(
            memory,
            _FACTS_AT,
            pid,
            started,
            role,
            rank,
            local_rank,
            world_size,
            self._step,
            self._steps_done,
            _PHASES.index(self._phase),
            self._is_settled,
            self._since,
            self._work_ns,
            self._work_count,
            self._launch,
            len(text),
            len(clip),
        )
        memory[_TEXT_AT : _TEXT_AT + len(text) + len(clip)] = text + clip
        _TABLE.pack_into(memory, _TABLE_AT, *self._table)
        self._sequence += 1
        memory[: _SEQUENCE.size] = _SEQUENCE.pack(_MAGIC, self._sequence)  # not zero in between


def _shared(path: Path, page: bytes) -> mmap.mmap:
    """A file in memory that holds a page already when it is found.

    Raises:
        OSError: there is no room, or it is not allowed.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_suffix(".new")
    with aside.open("wb+") as file:
        os.posix_fallocate(file.fileno(), 0, _SIZE)  # writing to a page that is not there kills
        memory = mmap.mmap(file.fileno(), _SIZE)
    memory[:] = page
    aside.rename(path)
    return memory


def path_of(folder: Path, role: Role, rank: int, pid: int) -> Path:
    """Where a process's record lies, whether there is one or not."""
    return folder / f"{role}_{rank}_{pid}"


def read(path: Path) -> Pulse | None:
    """Read a record; None: there is none, or it is no record of this version."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        for _ in range(_READ_ATTEMPTS):
            page, now = os.pread(file.fileno(), _SIZE, 0), time.monotonic_ns()
            after = os.pread(file.fileno(), _SEQUENCE.size, 0)
            if len(page) < _SIZE or _SEQUENCE.unpack_from(page)[0] != _MAGIC:
                return None
            sequence = _SEQUENCE.unpack_from(page)[1]
            if sequence == _SEQUENCE.unpack(after)[1] and sequence % 2 == 0:
                return _pulse(path, page, now)
        return _pulse(path, page, now)  # its process was stopped while it wrote
    return None


def read_all(folder: Path) -> list[Pulse]:
    """All records of a folder: ranks first, by rank; also those of processes that are gone."""
    paths = folder.iterdir() if folder.is_dir() else ()
    pulses = (read(path) for path in paths if path.name.startswith(_ROLES) and not path.suffix)
    found = [pulse for pulse in pulses if pulse is not None]
    return sorted(found, key=lambda each: (_ROLES.index(each.role), each.rank, each.pid))


def folder_of(run: Path) -> Path:
    """Where the records of a run's processes on this node are kept."""
    memory = Path("/dev/shm")  # noqa: S108 - where a node's processes share memory
    if not os.access(memory, os.W_OK):
        memory = Path(tempfile.gettempdir())
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return memory / f"longtake-{os.getuid()}" / f"{socket.gethostname()}-{name}"


def _pulse(path: Path, page: bytes, now: int) -> Pulse:
    facts = _FACTS.unpack_from(page, _FACTS_AT)
    pid, started, role, rank, local_rank, world_size, step, steps_done = facts[:8]
    phase, is_settled, since, work_ns, work_count, launch, text_bytes, clip_bytes = facts[8:]
    text = page[_TEXT_AT : _TEXT_AT + text_bytes].decode(errors="replace")
    clip_at = _TEXT_AT + text_bytes
    return Pulse(
        path=path,
        role=_ROLES[role],
        pid=pid,
        started=started,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        launch=launch.rstrip(b"\0").decode(errors="replace"),
        step=step,
        steps_done=steps_done,
        phase=_PHASES[phase],
        seconds=max(0, now - since) / 1e9,
        detail=text,
        path_of_clip=page[clip_at : clip_at + clip_bytes].decode(errors="replace"),
        is_settled=bool(is_settled),
        timings=dict(_timings(page)),
        work_seconds=work_ns / 1e9,
        work_count=work_count,
    )


def _timings(page: bytes) -> Iterator[tuple[Phase, Timing]]:
    table = _TABLE.unpack_from(page, _TABLE_AT)
    for number, phase in enumerate(_PHASES):
        count, longest, total = table[3 * number : 3 * number + 3]
        if count:
            yield phase, Timing(count, longest / 1e9, total / 1e9)


def _start_of(pid: int) -> int:
    """When a process was started, in ticks since the machine's start; 0: it is gone."""
    with suppress(OSError, ValueError, IndexError):
        # The program's name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0


# A process has one heart. The functions below speak of it, and do nothing where there is none, so
# that what computes a step need not be handed what only an onlooker wants to know.
_heart: Heart | None = None


@contextmanager
def beating(heart: Heart) -> Iterator[Heart]:
    """Make a heart the process's own; at the end it says that all went as it should.

    That includes an error that a person was told of. After any other, it says what it said last.
    """
    global _heart
    _heart = heart
    try:
        yield heart
        heart.close()
    except LongtakeError:
        heart.close()
        raise
    finally:
        _heart = None


def enter(phase: Phase) -> None:
    """Say that a phase of this process begins."""
    if _heart is not None:
        _heart.enter(phase)


def begin_step(step: int, shape: str) -> None:
    """Say which step of this process begins, on clips of what shape."""
    if _heart is not None:
        _heart.begin_step(step, shape)


def end_step(work_seconds: float = 0.0) -> None:
    """Say that a step is done, and what this process itself needed for it."""
    if _heart is not None:
        _heart.end_step(work_seconds)
