"""Decodes windows in processes of their own, which are watched.

A decoder can freeze, crash or run out of memory inside a library, and no thread can be rescued from
that. So each worker is a process that is started afresh (not forked) and decodes one window at a
time. One thread here waits for their answers. A worker that misses its deadline is dumped and
killed, one that dies is noticed at once; either is replaced and its window is read again, so that
whoever waits for a window gets the same pixels, later.
"""

import os
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from longtake import stacks
from longtake.data import worker as protocol
from longtake.data.limits import MEMORY_GIB, pixels_limited
from longtake.data.process import WorkerProcess, how_it_ended
from longtake.data.references import Reference, read
from longtake.data.window import Window
from longtake.errors import ClipError, DataError
from longtake.heartbeat import HeartbeatDir

_START_SECONDS = 120.0  # a cold network file system takes long to import from
_MAX_FAILED_STARTS = 3  # in a row


@dataclass(frozen=True)
class Incident:
    """What befell a worker. It was replaced, and its window was read again.

    Attributes:
        kind: `stalled`: it missed the deadline and was killed; `died`: it ended by itself.
        pid: the process.
        identity: of the clip it was decoding; empty: none.
        path: of the clip.
        seconds: since it had begun with it.
        reason: what happened, in words.
        stack: where it was; of a dead one, what it had written last.
    """

    kind: Literal["stalled", "died"]
    pid: int
    identity: str
    path: str
    seconds: float
    reason: str
    stack: stacks.StackDump


@dataclass(frozen=True)
class _Failure:
    """Why a window could not be read: by what the file is, or by what became of the process."""

    reason: str
    is_of_process: bool = False
    where: str = ""


@dataclass(eq=False)
class _Task:
    window: Window | Reference
    out: NDArray[np.uint8]
    future: Future[NDArray[np.uint8]]
    failures: list[_Failure] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):  # its owner may have cancelled it
            self.future.set_exception(error)


@dataclass(eq=False)
class _Worker:
    """A process, and what is expected of it by when; first, that it starts."""

    process: WorkerProcess
    deadline: float
    begun: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    task: _Task | None = None
    slot: int = 0

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.task is None

    def begin(self, task: _Task, seconds: float) -> None:
        self.slot = self.process.send(task.window)
        self.task, self.begun = task, time.monotonic()
        self.deadline = self.begun + seconds

    def is_overdue(self) -> bool:
        is_late = not self.is_idle and time.monotonic() >= self.deadline
        return is_late and not self.process.connection.poll()


class Pool:
    """Reads windows, in the order in which they are submitted.

    A window fails, with a ClipError, when it could not be read twice: a network file system may
    hiccup once, and a worker may be killed for what is not the clip's fault.

    Args:
        workers: how many processes. 0: a few threads of this process, which start at once and
            which nothing watches: a decoder that hangs or crashes takes the program with it.
        sample_timeout_seconds: how long one window may take.
        memory_gib: how much memory decoding one may take; threads only limit the size of pictures.
        threads: how many threads, if there are no workers.
        hearts: where the workers say what they do; None: nowhere.
    """

    def __init__(
        self,
        workers: int,
        sample_timeout_seconds: float = 60.0,
        *,
        memory_gib: float = MEMORY_GIB,
        threads: int = 2,
        hearts: HeartbeatDir | None = None,
    ) -> None:
        self._num_workers = workers
        self._memory_gib = memory_gib
        self._hearts = hearts
        self._timeout = sample_timeout_seconds
        self._queue: deque[_Task] = deque()
        self._incidents: list[Incident] = []
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._end: Exception | None = None  # why no window is read any more
        self._threads: ThreadPoolExecutor | None = None
        self._wake = -1
        if not workers:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A worker ends when the thread that started it does: this one lives as long as the pool.
        self._supervisor = threading.Thread(target=self._supervise, name="decoding", daemon=True)
        self._supervisor.start()

    def submit(
        self, window: Window | Reference, out: NDArray[np.uint8] | None = None
    ) -> Future[NDArray[np.uint8]]:
        """Ask for a window, or for a further picture of a clip.

        Args:
            window: what to read.
            out: where to write the pixels: contiguous, of the window's shape. None: a new array.

        Returns:
            A future of its pixels, [3, F, H, W] uint8, in `out`. It can be
            cancelled until a worker begins with it. It raises ClipError if the window cannot be
            read, and DataError if no worker can be started.

        Raises:
            DataError: no worker can be started.
            RuntimeError: the pool is closed.
        """
        if out is None:
            out = np.empty(window.shape, np.uint8)
        if self._threads:
            return self._threads.submit(_read_twice, window, out, self._memory_gib)
        task = _Task(window, out, Future())
        with self._lock:
            if self._end:
                raise self._end
            self._queue.append(task)
            os.eventfd_write(self._wake, 1)
        return task.future

    def incidents(self) -> list[Incident]:
        """What befell the workers since this was last asked."""
        with self._lock:
            happened, self._incidents = self._incidents, []
        return happened

    def decoding(self) -> dict[int, str]:
        """The workers' process ids, and the identity of the clip that each decodes, or nothing."""
        tasks = {each.process.pid: each.task for each in tuple(self._workers)}
        return {pid: task.window.identity if task else "" for pid, task in tasks.items()}

    def close(self) -> None:
        """End the workers at once. What they have not read fails with a RuntimeError.

        Threads, where there are no workers, finish what they have begun; the rest is cancelled.
        """
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)
            return
        self._stop(RuntimeError("the pool is closed"))
        self._supervisor.join()
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(self, why: Exception) -> None:
        with self._lock:
            self._end = self._end or why
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # From here on everything runs in the supervising thread.

    def _supervise(self) -> None:
        try:
            while not self._end:
                self._hire()
                self._dispatch()
                for each in self._wait():
                    self._hear(each)
                for each in [each for each in self._workers if each.is_overdue()]:
                    self._stall(each)
        except Exception as error:  # whoever waits for a window has to get it
            self._stop(error)
        finally:
            self._dismiss()

    def _hire(self) -> None:
        while len(self._workers) < self._num_workers and not self._end:
            try:
                process = WorkerProcess(self._memory_gib, self._hearts)
            except OSError as error:
                raise DataError(f"A decoding process could not be started: {error}.") from error
            self._workers.append(_Worker(process, time.monotonic() + _START_SECONDS))

    def _dispatch(self) -> None:
        for each in self._workers:
            if each.is_idle and (task := self._next()):
                try:
                    each.begin(task, self._timeout)
                except ConnectionError:  # it has ended, which will be heard
                    self._put_first(task)
                except Exception as error:  # such as no memory; for whoever waits for the window
                    task.fail(error)

    def _next(self) -> _Task | None:
        with self._lock:
            while self._queue:
                task = self._queue.popleft()
                if task.future.running() or task.future.set_running_or_notify_cancel():
                    return task
        return None

    def _put_first(self, task: _Task) -> None:
        with self._lock:
            self._queue.appendleft(task)

    def _wait(self) -> list[_Worker]:
        """The workers that have something to say, by the nearest deadline."""
        begun = time.monotonic()
        deadlines = [each.deadline for each in self._workers if not each.is_idle]
        timeout = min(1.0, max(0.0, min(deadlines) - begun)) if deadlines else None
        ready = wait([self._wake, *(each.process.connection for each in self._workers)], timeout)
        if timeout is not None:
            late = max(0.0, time.monotonic() - begun - timeout)
            for each in self._workers:  # this process was stopped, and they perhaps with it
                each.deadline += late
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return [each for each in self._workers if each.process.connection in ready]

    def _hear(self, each: _Worker) -> None:
        if (said := each.process.receive()) is None:
            self._bury(each)
            return
        answer, reason = said
        task, slot = each.task, each.slot
        each.task, each.is_ready, self._failed_starts = None, True, 0
        self._dispatch()  # so that it goes on while its last window is copied
        if task and answer == protocol.FAILED:
            self._fail(task, _Failure(reason))
        elif task:
            try:
                each.process.take(slot, task.out)
                task.future.set_result(task.out)
            except Exception as error:  # as above
                task.fail(error)

    def _stall(self, each: _Worker) -> None:
        stack = stacks.dump_process(each.process.pid, each.process.stderr)
        each.process.end()
        limit = self._timeout if each.is_ready else _START_SECONDS
        verb = "decoding did not finish" if each.is_ready else "a decoding process did not start"
        self._lose(each, "stalled", f"{verb} within {limit:g} s", stack)

    def _bury(self, each: _Worker) -> None:
        status, words = each.process.end()
        stack = stacks.parse_faulthandler(each.process.pid, words)
        self._lose(each, "died", f"the decoding process {how_it_ended(status)}", stack)

    def _lose(
        self, each: _Worker, kind: Literal["stalled", "died"], reason: str, stack: stacks.StackDump
    ) -> None:
        self._workers.remove(each)
        window, seconds = each.task and each.task.window, time.monotonic() - each.begun
        identity, path = (window.identity, str(window.media)) if window else ("", "")
        incident = Incident(kind, each.process.pid, identity, path, seconds, reason, stack)
        with self._lock:
            self._incidents.append(incident)
        if each.task:
            self._fail(each.task, _Failure(reason, is_of_process=True, where=stack.where))
        if not each.is_ready:
            self._failed_starts += 1
            if self._failed_starts == _MAX_FAILED_STARTS:
                raise DataError(_cannot_start(reason, stack))

    def _fail(self, task: _Task, failure: _Failure) -> None:
        task.failures.append(failure)
        if len(task.failures) < 2:
            self._put_first(task)
        else:
            task.fail(ClipError(str(task.window.media), _why(*task.failures)))

    def _dismiss(self) -> None:
        assert self._end
        for each in self._workers:
            each.process.end()
        with self._lock:
            tasks = [*(each.task for each in self._workers if each.task), *self._queue]
            self._workers.clear()
            self._queue.clear()
        for task in tasks:
            task.fail(self._end)


def _read_twice(
    window: Window | Reference, out: NDArray[np.uint8], memory_gib: float
) -> NDArray[np.uint8]:
    with pixels_limited(memory_gib):
        try:
            return read(window, out)
        except ClipError:
            return read(window, out)


def _why(first: _Failure, second: _Failure) -> str:
    seen = f"; last seen in {second.where}" if second.where else ""
    if first.reason != second.reason:
        return f"{first.reason}; then {second.reason}{seen}"
    return f"{second.reason}{', twice' if second.is_of_process else ''}{seen}"


def _cannot_start(reason: str, stack: stacks.StackDump) -> str:
    said = (stack.raw.strip().splitlines() or ["nothing"])[-1]
    return (
        f"No decoding process can be started; the last of {_MAX_FAILED_STARTS}: {reason}. It said: "
        f"{said}. Try `python -m longtake.data.worker`, which should say that it is a part of the "
        "pool; or decode in threads of this process: data.workers=0."
    )
