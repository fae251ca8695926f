"""Worker processes that run a task and are watched, killed and replaced.

A decoder can hang, crash or run out of memory inside a library, and a thread cannot be stopped from
outside. So each worker is a process of `longtake.data.decode_worker`, started afresh (not forked),
which has one item at a time. A worker counts as hung when it has sent nothing for
`Task.silence_seconds`.
"""

import os
import pickle
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from numpy.typing import NDArray

from longtake import errors, heartbeat, process, stacks
from longtake.config import StoreSection
from longtake.data import clip
from longtake.data.clip import Media
from longtake.data.stores import Fetched, StoreClient

Item = TypeVar("Item")
ClipItem = TypeVar("ClipItem", bound=clip.Clip | clip.Item)
Result = TypeVar("Result")
Reply = tuple[Literal["ready", "progress", "fetched", "done", "failed", "refused"], Any]
"""Message of a worker process: its kind and value.

A worker sends `ready` once. For each item it sends any number of `progress`, `fetched` with the
traffic from stores, and at the end `done` with the result, `failed` with the reason, or
`refused` with an error that ends the work."""

PROGRAM: tuple[str, ...] = ("longtake.data.decode_worker",)
SILENCE_SECONDS = 60.0

_START_SECONDS = 300.0  # importing from a cold network file system takes long
_END_SECONDS = 2.0  # time in which a killed process must be gone
_MAX_FAILED_STARTS = 3  # consecutive failures after which the pool gives up
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Task(ABC, Generic[Item, Result]):
    """Work that worker processes do for each item. Tasks, items and results are pickled.

    Expensive state such as a model is a `cached_property`: each process creates its own at its
    first item.
    """

    doing: str = "decoding"  # the work, in messages
    silence_seconds: float = SILENCE_SECONDS  # limit without a message
    memory_gib: float | None = None  # limit for one item, beyond what a process holds
    store = StoreSection()  # settings for fetching items from object stores
    examples: tuple[Media, ...] = ()  # objects that should exist in their stores: see `StoreClient`
    num_cpus: int = 1  # cores that a process computes on
    uses_gpu: bool = False  # on a cluster with GPUs, each worker gets one
    start_hint: str = ""  # further advice for the error that no process can be started

    # Cached properties are left out: each process creates its own.
    def __getstate__(self) -> dict[str, Any]:
        of_class = {name: getattr(type(self), name, None) for name in vars(self)}
        made = {name for name, value in of_class.items() if isinstance(value, cached_property)}
        return {name: value for name, value in vars(self).items() if name not in made}

    @abstractmethod
    def do(self, item: Item, progress: Callable[[], object]) -> Result:
        """Do the work for an item; call `progress` often, or the process counts as hung."""

    @abstractmethod
    def lost(self, item: Item, reason: str) -> Result:
        """Return the result of an item that failed, or whose process hung or crashed."""

    def reads(self, item: Item) -> str:
        """Return the path of an item's file, which every machine must see; "" if it has none."""
        return ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that the task writes to, which must be shared by all machines."""
        return ()


class ClipTask(Task[ClipItem, Result | errors.ClipError]):
    """Task whose items are clips or files; the result of an unreadable one is a ClipError."""

    def do(self, item: ClipItem, progress: Callable[[], object]) -> Result | errors.ClipError:
        try:
            return self.compute(item, progress)
        except errors.ClipError as error:
            return error

    @abstractmethod
    def compute(self, item: ClipItem, progress: Callable[[], object]) -> Result:
        """Return the result of an item as `do` does; may raise ClipError."""

    def lost(self, item: ClipItem, reason: str) -> Result | errors.ClipError:
        return errors.ClipError(str(item.media), reason)

    def reads(self, item: ClipItem) -> str:
        return "" if item.media.is_remote else item.media.path


@dataclass(frozen=True)
class WorkerIncident:
    """A worker process that hung (`stalled`) or ended by itself (`died`), and was replaced."""

    kind: Literal["stalled", "died"]
    pid: int
    item: Any  # the item it worked on; None if it was idle
    seconds: float  # time since it began with the item
    reason: str
    stack: stacks.StackDump  # stack of the process; for a dead one, from its last output

    @property
    def identity(self) -> str:
        """Identity of the clip that the lost worker was at; empty if there was none."""
        return getattr(self.item, "identity", "")

    @property
    def path(self) -> str:
        """Path of the clip that the lost worker was at; empty if there was none."""
        return str(getattr(self.item, "media", ""))


class WorkerPool(Generic[Item, Result]):
    """Runs a task in `count` processes; items are begun in the order of submission.

    A failed item is tried up to `attempts` times. With `num_buffers` (shared memory buffers for
    each process) results are arrays, which are not pickled.
    """

    def __init__(
        self,
        task: Task[Item, Result],
        count: int,
        *,
        attempts: int = 1,
        num_buffers: int = 0,
        heartbeats: heartbeat.HeartbeatDir | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._task = task
        self._count = count
        self._attempts = attempts
        # Pickled once for all processes of the pool.
        self._start = _Start(pickle.dumps(task), task.num_cpus, num_buffers, heartbeats, cwd)
        self._queue: deque[_Job] = deque()
        self._incidents: list[WorkerIncident] = []
        self._client = StoreClient(task.store)  # counts what the workers have fetched
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._end: Exception | None = None  # set when no further item is begun, with the reason
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Linux kills a worker when the thread that started it ends (PR_SET_PDEATHSIG), so this
        # thread must live as long as the pool.
        self._supervisor = threading.Thread(target=self._supervise, name=task.doing, daemon=True)
        self._supervisor.start()

    def submit(self, item: Item, out: NDArray[Any] | None = None) -> Future[Any]:
        """Queue an item and return the future of its result.

        The future can be cancelled until a worker begins. With `out`, the result is copied into
        this array.

        Raises:
            RuntimeError: the pool is closed; or the error that ended it.
        """
        job = _Job(item, out, Future())
        with self._lock:
            if self._end:
                raise self._end
            self._queue.append(job)
            os.eventfd_write(self._wake, 1)
        return job.future

    def incidents(self) -> list[WorkerIncident]:
        """Return the worker processes that hung or died since the last call."""
        with self._lock:
            happened, self._incidents = self._incidents, []
        return happened

    def take_fetched(self) -> Fetched:
        """Return bytes, seconds and retries of reading object stores since the last call."""
        return self._client.take_fetched()

    def running(self) -> dict[int, Item | None]:
        """Return the item that each worker process is at, or None, by process id."""
        jobs = {each.pid: each.job for each in tuple(self._workers)}
        return {pid: job.item if job else None for pid, job in jobs.items()}

    def close(self) -> None:
        """Kill the worker processes; futures that are not done raise a RuntimeError."""
        self._stop(RuntimeError("the pool is closed"))
        self._supervisor.join()
        with self._lock:
            if self._wake >= 0:
                # Under the lock: `_stop` must not write to a number that another file may have by
                # then.
                os.close(self._wake)
            self._wake = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, why: Exception) -> None:
        with self._lock:
            self._end = self._end or why
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # All methods below run in the supervising thread.

    def _supervise(self) -> None:
        try:
            # Nothing here may block for long: it watches all workers.
            while not self._end:
                while len(self._workers) < self._count and not self._end:
                    self._workers.append(_Worker(self._start, self._task.doing))
                self._dispatch()
                for worker in self._wait():
                    self._on_message(worker)
                for worker in [each for each in self._workers if each.is_silent()]:
                    self._on_silence(worker)
        except Exception as error:  # otherwise futures would wait forever
            self._stop(error)
        finally:
            assert self._end
            for worker in self._workers:
                worker.end()
            with self._lock:
                jobs = [*(each.job for each in self._workers if each.job), *self._queue]
                self._workers.clear()
                self._queue.clear()
            for job in jobs:
                job.fail(self._end)

    def _dispatch(self) -> None:
        for worker in self._workers:
            if worker.is_idle and (job := self._next()):
                try:
                    worker.begin(job, self._task.silence_seconds)
                except ConnectionError:  # it has ended: its connection will report it
                    self._put_first(job)
                except Exception as error:  # such as a lack of memory; the future raises it
                    job.fail(error)

    def _next(self) -> "_Job | None":
        with self._lock:
            while self._queue:
                job = self._queue.popleft()
                # A job that is tried again is running already, and cannot be set to running twice.
                if job.future.running() or job.future.set_running_or_notify_cancel():
                    return job
        return None

    def _put_first(self, job: "_Job") -> None:
        with self._lock:
            self._queue.appendleft(job)

    def _wait(self) -> "list[_Worker]":
        """Wait for messages until the nearest deadline; return the workers that have sent any."""
        begun = time.monotonic()
        deadlines = [each.deadline for each in self._workers if not each.is_idle]
        timeout = min(1.0, max(0.0, min(deadlines) - begun)) if deadlines else None
        ready = wait([self._wake, *(each.connection for each in self._workers)], timeout)
        if timeout is not None:
            late = max(0.0, time.monotonic() - begun - timeout)
            for each in self._workers:  # this process was suspended, and the workers perhaps too
                each.deadline += late
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return [each for each in self._workers if each.connection in ready]

    def _on_message(self, worker: "_Worker") -> None:
        reply = worker.receive()
        if reply is None:
            self._on_end(worker)
            return
        kind, value = reply
        # Any message is a sign of life.
        worker.deadline = time.monotonic() + self._task.silence_seconds
        if kind == "progress":
            return
        if kind == "fetched":
            self._client.count(value)
            return
        job, buffer = worker.job, worker.buffer
        worker.finish()
        self._failed_starts = 0
        self._dispatch()  # the worker works while its last result is copied
        if job is None:
            return
        if kind == "failed":
            self._fail(job, value)
        elif kind == "refused":
            job.fail(value)
        else:
            try:
                job.succeed(value if job.out is None else worker.copy(buffer, job.out))
            except Exception as error:  # such as a lack of memory
                job.fail(error)

    def _on_silence(self, worker: "_Worker") -> None:
        # The stack must be taken while the process still lives.
        doing, stack = self._task.doing, stacks.dump_process(worker.pid, worker.stderr)
        worker.end()
        if worker.is_ready:
            reason = f"{doing} made no progress for {self._task.silence_seconds:g} s"
        else:
            reason = f"a {doing} process did not start within {_START_SECONDS:g} s"
        self._replace(worker, "stalled", reason, stack)

    def _on_end(self, worker: "_Worker") -> None:
        # Its connection closed first, so wait a moment for its exit status.
        status, words = worker.end(patience_seconds=_END_SECONDS)
        reason = f"the {self._task.doing} process {_how_it_ended(status)}"
        if status and status > 0 and (last := words.strip().splitlines()[-1:]):
            reason = f"{reason} ({last[0].strip()})"
        self._replace(worker, "died", reason, stacks.parse_faulthandler(worker.pid, words))

    def _replace(
        self,
        worker: "_Worker",
        kind: Literal["stalled", "died"],
        reason: str,
        stack: stacks.StackDump,
    ) -> None:
        self._workers.remove(worker)
        job, seconds = worker.job, time.monotonic() - worker.begun
        item = job.item if job else None
        with self._lock:
            self._incidents.append(WorkerIncident(kind, worker.pid, item, seconds, reason, stack))
        if job:
            self._fail(job, reason, stack.where)
        # A process that never became ready points at the installation and not at an item.
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                said = (stack.raw.strip().splitlines() or ["nothing"])[-1]
                raise errors.DataError(
                    f"No {self._task.doing} process can be started; the last of "
                    f"{_MAX_FAILED_STARTS}: {reason}. It said: {said}. Try `python -m "
                    f"{PROGRAM[0]}`, which should say that it is a part of the pool"
                    f"{self._task.start_hint}."
                )

    def _fail(self, job: "_Job", reason: str, where: str | None = None) -> None:
        """Queue an item again whose worker failed; after the last attempt, finish it as lost.

        `where` is the place in the code where the process hung or crashed; None if the item failed
        by itself.
        """
        job.reasons.append(reason)
        if len(job.reasons) < self._attempts:
            self._put_first(job)
            return
        reasons = dict.fromkeys(job.reasons)
        is_twice = where is not None and len(job.reasons) == 2 and len(reasons) == 1
        seen = f"; last seen in {where}" if where else ""
        try:
            reason = f"{'; then '.join(reasons)}{', twice' if is_twice else ''}{seen}"
            result = self._task.lost(job.item, reason)
        except errors.LongtakeError as error:
            job.fail(error)
        else:
            job.succeed(result)


@dataclass(eq=False)
class _Job:
    item: Any
    out: NDArray[Any] | None
    future: Future[Any]
    reasons: list[str] = field(default_factory=list)  # reasons of its failed attempts

    def succeed(self, result: Any) -> None:
        with suppress(InvalidStateError):  # its owner may have cancelled it
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(frozen=True)
class _Start:
    """Arguments with which each worker process of a pool is started."""

    task: bytes  # pickled task
    num_threads: int
    num_buffers: int
    heartbeats: heartbeat.HeartbeatDir | None
    cwd: Path | None


class _Worker:
    """Handle of a worker process, which runs `longtake.data.decode_worker`.

    Arrays come back in anonymous shared memory (memfd, which the size of /dev/shm does not limit).
    Buffers are used in turn: one is copied out while the worker fills the other.
    """

    def __init__(self, start: _Start, doing: str) -> None:
        self._heartbeats = start.heartbeats
        self.is_ready = False
        self.job: _Job | None = None
        self.buffer = 0
        self.begun = time.monotonic()
        self.deadline = self.begun + _START_SECONDS
        self._buffers = [os.memfd_create("longtake-worker") for _ in range(start.num_buffers)]
        # A file in memory: a pipe could fill up and block the worker.
        self._stderr = os.memfd_create("longtake-stderr")
        self.connection: Connection[Any, Reply]
        self.connection, theirs = Pipe()
        inherited = [theirs.fileno(), *self._buffers]
        numbers = (str(number) for number in (os.getpid(), *inherited))
        # The process inherits the blocked signals: Ctrl-C and a scheduler's signals go to the whole
        # process group, and only the parent decides what they mean.
        blocked = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                process.program(*PROGRAM, *map(str, start.heartbeats or ("", 0)), *numbers),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=inherited,
                env=process.environment(
                    **dict.fromkeys(_THREAD_VARIABLES, str(start.num_threads)),
                    OMP_WAIT_POLICY="PASSIVE",  # waiting threads do not spin on a core
                ),
                cwd=start.cwd,
            )
        except OSError as error:
            self._close()
            raise errors.DataError(f"A {doing} process could not be started: {error}.") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid
        with suppress(ConnectionError):  # it has ended: its connection will report it
            self.connection.send_bytes(start.task)

    @property
    def stderr(self) -> Path:
        return Path(f"/proc/self/fd/{self._stderr}")

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.job is None

    def is_silent(self) -> bool:
        is_late = not self.is_idle and time.monotonic() >= self.deadline
        # A message that waits in the pipe is progress, even if it was not read in time.
        return is_late and not self.connection.poll()

    def begin(self, job: _Job, silence_seconds: float) -> None:
        number = None
        if job.out is not None:
            number = self.buffer = (self.buffer + 1) % len(self._buffers)
            # Buffers only grow, so that most samples need no system call.
            if os.fstat(self._buffers[number]).st_size < job.out.nbytes:
                os.ftruncate(self._buffers[number], job.out.nbytes)
        self.given.set(str(getattr(job.item, "media", "")))
        self.connection.send((job.item, number))
        self.job, self.begun = job, time.monotonic()
        self.deadline = self.begun + silence_seconds

    def finish(self) -> None:
        """Record that the worker is done with its item, or ready for the first one."""
        self.job, self.is_ready = None, True
        self.given.set("")

    @cached_property
    def given(self) -> heartbeat.GivenClip:
        """Field of the worker's heartbeat for its current clip.

        It is opened late, as the worker creates the page.
        """
        folder, rank = self._heartbeats or (Path(), 0)
        return heartbeat.GivenClip(heartbeat.page_path(folder, "decode", rank, self.pid))

    def receive(self) -> Reply | None:
        """Return the worker's next message, or None if it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def copy(self, buffer: int, out: NDArray[Any]) -> NDArray[Any]:
        """Copy a result from a shared buffer into `out`, and return `out`."""
        content, num_read = out.reshape(-1).view("uint8").data, 0
        while num_read < out.nbytes:  # one read returns at most 2 GiB
            num_read += os.preadv(self._buffers[buffer], [content[num_read:]], num_read)
        return out

    def end(self, patience_seconds: float = 0.0) -> tuple[int | None, str]:
        """Kill the worker process unless it ends in this time; return exit status and stderr."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_seconds)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        words = self.stderr.read_text(errors="replace")
        if self._heartbeats is not None:
            folder, rank = self._heartbeats
            heartbeat.page_path(folder, "decode", rank, self.pid).unlink(missing_ok=True)
        self._close()
        return self._process.returncode, words

    def _close(self) -> None:
        self.connection.close()
        for descriptor in (*self._buffers, self._stderr):
            os.close(descriptor)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "cannot be killed: it waits for a device"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = " (by hand, or the machine was out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
