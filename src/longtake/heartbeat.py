"""Heartbeat pages: each process's current phase and step, in shared memory; torch-free.

Each rank and decode worker writes one page in `/dev/shm` (not on a disk that may hang), which the
watcher reads. Readers do not involve the process, so a process that hangs or was killed still shows
its last phase. Times are CLOCK_MONOTONIC, which all processes of a node share and which changes of
the system time do not affect.
"""

import ctypes
import hashlib
import mmap
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from longtake import errors, process

Role = Literal["rank", "decode"]
Phase = Literal[
    "start",  # until the process has imported its code
    "rendezvous",
    "open",  # data, run directory, checkpoints
    "plan",
    "build",
    "load",
    "cache",  # the last phase before the first step
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",  # copies what is saved
    "save",  # waits until the checkpoint is complete
    "rollback",
    "sampling",
    "idle",  # waits for work; never a stall
    "decode",
    "ended",  # without a failure; the process exits next
]
PHASES: tuple[Phase, ...] = get_args(Phase)
ROLES: tuple[Role, ...] = get_args(Role)
PHASE_WORDS: Mapping[str, str] = {
    "start": "while it starts",
    "rendezvous": "while the ranks find each other",
    "open": "while it opens data and run directory",
    "plan": "while it plans the memory",
    "build": "while it builds the model",
    "load": "while it loads the checkpoint",
    "cache": "while it fills the cache",
    "data": "waiting for data after step {step}",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "collective": "where the ranks compare step {step}",
    "optimizer": "in the update of step {step}",
    "checkpoint": "at the checkpoint after step {step}",
    "save": "waiting for a checkpoint to be complete, after step {step}",
    "rollback": "while it rolls back from step {step}",
    "sampling": "while it samples presets after step {step}",
}
"""Words for each phase of a rank in messages; `{step}` stands for its global step."""

STORE_WAIT = " (waiting for its store: "  # in the clip's path
_MAGIC = 0x4C54_4842_0004  # "LTHB" and the format's number: pages of other versions are ignored
_SIZE = 4096
_DETAIL_BYTES, _CLIP_BYTES, _ERROR_BYTES = 128, 896, 512
_READ_ATTEMPTS = 100  # a write takes microseconds, so a few are enough unless the writer stands
_SETTLING_STEPS = 5  # first steps of a launch, slow by compilation and allocation
_SETTLING_STEPS_OF_SHAPE = 2
_PREFIX = "longtake-"


class _TimingPage(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_uint64),
        ("longest_ns", ctypes.c_uint64),
        ("total_ns", ctypes.c_uint64),
    )


class HeartbeatPage(ctypes.Structure):
    """Memory layout of a heartbeat page, in which a process writes its phase and step.

    `sequence` is a seqlock: the owner increments it before and after each change, so it is odd
    while the page is being written.
    """

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("since_ns", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("steps_done", ctypes.c_int64),
        ("work_ns", ctypes.c_int64),
        ("work_count", ctypes.c_int64),
        ("pid", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("local_rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("role", ctypes.c_uint8),
        ("phase", ctypes.c_uint8),
        ("is_settled", ctypes.c_bool),
        ("launch", ctypes.c_char * 9),
        ("detail", ctypes.c_char * _DETAIL_BYTES),
        ("clip", ctypes.c_char * _CLIP_BYTES),
        ("timings", _TimingPage * len(PHASES)),
        ("error", ctypes.c_char * _ERROR_BYTES),
        ("given", ctypes.c_char * _CLIP_BYTES),  # by the parent, outside of `sequence`
    )


class HeartbeatDir(NamedTuple):
    """Folder of a run's heartbeat pages, and a rank: what a rank passes to its child processes."""

    folder: Path
    rank: int


@dataclass(frozen=True)
class PhaseTiming:
    """Statistics of a phase's durations, each time it ended since the process has settled."""

    count: int
    longest: float  # seconds
    total: float  # seconds


@dataclass(frozen=True)
class Heartbeat:
    """The heartbeat of one process (phase, step ...), read from its page at one moment."""

    path: Path
    role: Role
    pid: int
    started: int  # clock ticks since boot; with the pid, the process's identity
    rank: int  # for a decode worker, the rank that started it
    local_rank: int
    world_size: int
    launch: str  # equal on all ranks of a launch; empty: not known yet
    step: int  # global step; for a decode worker, the number of windows begun
    steps_done: int  # in this launch
    phase: Phase
    seconds: float  # time in the phase when the page was read
    detail: str  # shape of a rank's clips; identity of the clip that is decoded
    path_of_clip: str  # empty: none
    is_settled: bool  # past its first steps, and those of its shape: durations are representative
    timings: Mapping[Phase, PhaseTiming]
    work_seconds: float  # own work of its steps since it has settled, without waiting
    work_count: int  # steps in `work_seconds`
    given: str = ""  # the file that a decode worker's parent waits for; empty: none
    error: str = ""  # error by which a rank ends, in one line; empty: it has recorded none

    @property
    def is_alive(self) -> bool:
        return process.start_ticks(self.pid) == self.started

    def read_again(self) -> "Heartbeat":
        """Return the last page of the same process, or this heartbeat if there is none.

        A process that is dead may have ended normally after its page was read: by the earlier page
        it would count as one that died in the phase before.
        """
        last = read_heartbeat(self.path) or self
        return last if (last.pid, last.started) == (self.pid, self.started) else self

    def as_dict(self) -> dict[str, Any]:
        """Return the heartbeat's fields except its timings as JSON values."""
        names = ("role", "pid", "rank", "local_rank", "world_size", "launch", "step", "steps_done")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"phase": self.phase, "seconds": round(self.seconds, 3), "detail": self.detail}
        facts |= {"path_of_clip": self.path_of_clip, "given": self.given}
        return {**facts, "is_settled": self.is_settled}


class HeartbeatWriter:
    """Writes the heartbeat page of this process.

    If the folder cannot be written, the page stays private memory: no other process sees it, and
    training goes on.

    Args:
        folder: `heartbeat_dir` of the run; it is created.
        role: rank or decode worker.
        rank: global rank; for a decode worker, the rank that started it.
        local_rank: rank on the node.
        world_size: number of ranks.
    """

    def __init__(
        self, folder: Path, role: Role, *, rank: int = 0, local_rank: int = 0, world_size: int = 1
    ) -> None:
        pid = os.getpid()
        self.path = page_path(folder, role, rank, pid)
        self._lock = threading.Lock()  # the saver reports durations from a thread of its own
        self._shapes: dict[str, int] = {}
        self._steps_since_rollback = 0
        self._launch_ns: dict[Phase, int] = {}
        # Private memory until `_share` succeeds, so that every method works without a folder, too.
        self._page = HeartbeatPage.from_buffer(mmap.mmap(-1, _SIZE))
        page = self._page
        page.magic, page.pid, page.started = _MAGIC, pid, process.start_ticks(pid) or 0
        page.role, page.rank, page.local_rank = ROLES.index(role), rank, local_rank
        page.world_size, page.since_ns = world_size, time.monotonic_ns()
        page.is_settled = role != "rank"  # only ranks have steps that compile
        self._share()

    @property
    def phase(self) -> Phase:
        return PHASES[int(self._page.phase)]

    def set_waiting(self, clip: str, store: str) -> None:
        """Show that the file of a clip waits for an object store, without ending the phase.

        Args:
            clip: the clip's file.
            store: the store and the reason for waiting; empty: the wait is over.
        """
        with self._writing() as page:
            text = f"{clip}{STORE_WAIT}{store})" if store else clip
            # The end of a long path is kept, as it has the file's name.
            page.clip = text.encode(errors="replace")[-_CLIP_BYTES:]

    def set_phase(self, phase: Phase, detail: str | None = None, clip: str = "") -> None:
        """Record that this process begins a phase, such as saving; this ends the current one.

        Args:
            phase: the phase that begins.
            detail: a decode worker's clip identity; None: unchanged.
            clip: the clip's file.
        """
        with self._writing() as page:
            now = time.monotonic_ns()
            if page.is_settled:
                self._add_duration(self.phase, now - page.since_ns)
            self._add_launch_time(now)
            if phase == "decode" and self.phase != "decode":
                page.step += 1
            if phase == "rollback":  # warm-up repeats: decode workers and allocations are new
                page.is_settled, self._steps_since_rollback = False, 0
                self._shapes.clear()
            page.phase, page.since_ns = PHASES.index(phase), now
            if detail is not None:
                page.detail = _first(detail)
                page.clip = clip.encode(errors="replace")[-_CLIP_BYTES:]

    def begin_step(self, step: int, shape: str) -> None:
        """Record the global step that this process begins, and the shape of the step's clips."""
        with self._writing() as page:
            # The first steps of a launch and of each shape compile kernels and allocate memory.
            # Their durations say nothing about later steps, so they do not enter the statistics.
            known = self._shapes[shape] = self._shapes.get(shape, -1) + 1
            page.is_settled = (
                self._steps_since_rollback >= _SETTLING_STEPS and known >= _SETTLING_STEPS_OF_SHAPE
            )
            page.step, page.detail, page.clip = step, _first(shape), b""

    def end_step(self, work_seconds: float = 0.0) -> None:
        """Record that this process has done a training step.

        Args:
            work_seconds: time that this process computed, without waiting for others; 0: unknown.
        """
        with self._writing() as page:
            self._add_launch_time(time.monotonic_ns())
            page.steps_done += 1
            self._steps_since_rollback += 1
            if page.is_settled and work_seconds:
                page.work_ns += int(work_seconds * 1e9)
                page.work_count += 1

    def set_launch(self, launch: str) -> None:
        with self._writing() as page:
            page.launch = launch.encode()[:8]  # and a zero: ctypes reads up to the first

    def set_error(self, error: str) -> None:
        with self._writing() as page:
            page.error = error.encode(errors="replace")[:_ERROR_BYTES]

    def record_duration(self, phase: Phase, seconds: float) -> None:
        with self._writing():
            self._add_duration(phase, int(seconds * 1e9))

    def count_from_process_start(self) -> None:
        # The interpreter and the imports ran before this page existed, and belong to the start.
        age = int(process.age_seconds(self._page.pid) * 1e9)
        self._launch_ns["start"] = age - (time.monotonic_ns() - self._page.since_ns)

    def launch_seconds(self) -> dict[Phase, float]:
        """Return seconds per phase of this process from the launch to the end of its first step.

        Before the first step is done, the current phase counts up to now.
        """
        taken = dict(self._launch_ns)
        if not self._page.steps_done:
            now = time.monotonic_ns()
            taken[self.phase] = taken.get(self.phase, 0) + now - self._page.since_ns
        return {phase: nanoseconds / 1e9 for phase, nanoseconds in taken.items()}

    def close(self) -> None:
        self.set_phase("ended")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def move_to(self, folder: Path) -> None:
        self.remove()
        self.path = folder / self.path.name
        self._share()

    @contextmanager
    def _writing(self) -> Iterator[HeartbeatPage]:
        with self._lock:
            page = self._page
            page.sequence += 1
            try:
                yield page
            finally:
                page.sequence += 1

    def _share(self) -> None:
        aside = self.path.with_suffix(".new")
        for _ in range(2):  # the watcher of an ended run may remove the empty folder meanwhile
            # No room, no permission, or another user's folder: the page stays private.
            with suppress(OSError, errors.RunError):
                make_private_dir(self.path.parent)
                with os.fdopen(open_private(aside), "wb+") as file:
                    # Writing to a mapped page that has no memory would kill this process.
                    os.posix_fallocate(file.fileno(), 0, _SIZE)
                    memory = mmap.mmap(file.fileno(), _SIZE)
                # Renamed when it is filled, so that no reader sees a page of zeros.
                memory[: ctypes.sizeof(HeartbeatPage)] = bytes(self._page)
                aside.rename(self.path)
                self._page = HeartbeatPage.from_buffer(memory)
                break

    def _add_duration(self, phase: Phase, nanoseconds: int) -> None:
        timing = self._page.timings[PHASES.index(phase)]
        timing.count += 1
        timing.longest_ns = max(timing.longest_ns, nanoseconds)
        timing.total_ns += nanoseconds

    def _add_launch_time(self, now: int) -> None:
        # After the first step the launch is over, and later phases are not part of it.
        if not self._page.steps_done:
            before = self._launch_ns.get(self.phase, 0)
            self._launch_ns[self.phase] = before + now - self._page.since_ns


def _first(text: str) -> bytes:
    return text.encode(errors="replace")[:_DETAIL_BYTES]


# --- This process's own writer. Without one, the functions below do nothing, so that the code that
# computes a step need not be handed a writer.

_writer: HeartbeatWriter | None = None
_is_first_session = True  # only the first session's start phase includes the interpreter's start


@contextmanager
def heartbeat_session(writer: HeartbeatWriter) -> Iterator[HeartbeatWriter]:
    """Use `writer` for this process's heartbeat within the block, and close the page at the end.

    A LongtakeError, Ctrl-C and SystemExit also close it. After any other exception the page keeps
    its last phase, so that a watcher sees where the process failed.
    """
    global _writer, _is_first_session
    if _is_first_session:
        writer.count_from_process_start()
    _writer, _is_first_session = writer, False
    try:
        yield writer
        writer.close()
    except (errors.LongtakeError, KeyboardInterrupt, SystemExit):
        writer.close()
        raise
    finally:
        _writer = None


def restart_launch_timer() -> None:
    global _is_first_session
    _is_first_session = False


def set_phase(phase: Phase) -> None:
    if _writer is not None:
        _writer.set_phase(phase)


def current_phase() -> Phase | None:
    return None if _writer is None else _writer.phase


def launch_seconds() -> dict[Phase, float]:
    return {} if _writer is None else _writer.launch_seconds()


def begin_step(step: int, shape: str) -> None:
    if _writer is not None:
        _writer.begin_step(step, shape)


def end_step(work_seconds: float = 0.0) -> None:
    if _writer is not None:
        _writer.end_step(work_seconds)


def record_duration(phase: Phase, seconds: float) -> None:
    if _writer is not None:
        _writer.record_duration(phase, seconds)


class GivenClip:
    """Field `given` of a decode worker's page: the clip that its parent process assigned to it.

    The worker may hang or die before it begins the clip, so it cannot write the field itself.
    """

    def __init__(self, path: Path) -> None:
        self._page: HeartbeatPage | None = None
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError, ValueError), os.fdopen(os.open(path, flags), "rb+") as file:
            self._page = HeartbeatPage.from_buffer(mmap.mmap(file.fileno(), _SIZE))

    def set(self, clip: str) -> None:
        # Not under the seqlock: that belongs to the worker, which may be in the middle of a write.
        if self._page is not None:
            self._page.given = clip.encode(errors="replace")[-_CLIP_BYTES:]


# --- Reading.


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a process's heartbeat page; None: missing, another user's, or of another format."""
    # Another user may have put a link or a pipe here: O_NOFOLLOW refuses the one, and O_NONBLOCK
    # keeps the other from blocking this process.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError, ValueError, LookupError), os.fdopen(os.open(path, flags), "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return None
        # Seqlock: retry until `sequence` is even and unchanged after the copy. A process stopped
        # in the middle of a write leaves it odd for ever; then the last copy must do.
        for _ in range(_READ_ATTEMPTS):
            data, now = os.pread(file.fileno(), _SIZE, 0), time.monotonic_ns()
            after = os.pread(file.fileno(), HeartbeatPage.started.offset, 0)
            page = HeartbeatPage.from_buffer_copy(data)
            if len(data) < _SIZE or page.magic != _MAGIC:
                return None
            sequence = int.from_bytes(after[HeartbeatPage.sequence.offset :], "little")
            if page.sequence == sequence and sequence % 2 == 0:
                break
        return _heartbeat(path, page, now)
    return None


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Read all heartbeat pages of a folder, also those of dead processes; ranks come first."""
    files = folder.iterdir() if folder.is_dir() else ()
    paths = (path for path in files if path.name.startswith(ROLES) and not path.suffix)
    found = [page for page in map(read_heartbeat, paths) if page is not None]
    return sorted(found, key=lambda each: (ROLES.index(each.role), each.rank, each.pid))


def _heartbeat(path: Path, page: HeartbeatPage, now: int) -> Heartbeat:
    numbers = ("pid", "started", "rank", "local_rank", "world_size", "step", "steps_done")
    same: Any = {name: getattr(page, name) for name in (*numbers, "is_settled", "work_count")}
    return Heartbeat(
        **same,
        path=path,
        role=ROLES[page.role],
        launch=page.launch.decode(errors="replace"),
        phase=PHASES[page.phase],
        seconds=max(0, now - page.since_ns) / 1e9,
        detail=page.detail.decode(errors="replace"),
        path_of_clip=page.clip.decode(errors="replace"),
        timings={
            phase: PhaseTiming(each.count, each.longest_ns / 1e9, each.total_ns / 1e9)
            for phase, each in zip(PHASES, page.timings, strict=True)
            if each.count
        },
        work_seconds=page.work_ns / 1e9,
        given=page.given.decode(errors="replace"),
        error=page.error.decode(errors="replace"),
    )


# --- Where pages are.


def heartbeat_dir(run: Path) -> Path:
    """Return the folder of a run's heartbeat pages on this node."""
    memory = Path("/dev/shm")  # noqa: S108 - where a node's processes share memory
    if not os.access(memory, os.W_OK):
        memory = Path("/tmp")  # noqa: S108 - the same for all of a user's shells
    # Containers may share memory and host name, and each number its processes from 1.
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    name = hashlib.sha256(f"{namespace} {run.resolve()}".encode()).hexdigest()[:12]
    return memory / f"{_PREFIX}{os.getuid()}" / f"{socket.gethostname()}-{name}"


def page_path(folder: Path, role: Role, rank: int, pid: int) -> Path:
    return folder / f"{role}_{rank}_{pid}"


def make_private_dir(folder: Path) -> None:
    """Create a folder for heartbeat pages that only this user can write to.

    Raises:
        RunError: the folder or its parent belongs to another user or is not a folder.
        OSError: the folder cannot be created.
    """
    for each in (folder.parent, folder):
        if each == folder.parent and not each.name.startswith(_PREFIX):
            each.mkdir(parents=True, exist_ok=True)
            continue  # a test's or drill's folder, outside of /dev/shm: its permissions stay
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
        # /dev/shm is world-writable: another user can create the folder or a link first.
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise errors.RunError(
                f"{each} belongs to user {found.st_uid}, expected a folder of user {os.getuid()}. "
                "The run's processes cannot be watched through it. Ask that user or an "
                "administrator to remove it, or train without: --set watch.enabled=false"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            each.chmod(0o700)


def open_private(path: Path) -> int:
    """Create a file of mode 0600, replacing an old one, and return its read-write descriptor.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
