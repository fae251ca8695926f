"""The program of a decoding worker process, and the pool of such processes.

python -m longtake.data.decode_worker HEARTBEATS RANK PARENT CONNECTION [BUFFER...]

`longtake.data.workers` starts it with these arguments: HEARTBEATS is the folder of its heartbeat,
or empty; the others are its rank, its parent's process id, and inherited file descriptors. It
imports neither torch nor the user's program (unless the task does), and ends when its parent does.
"""

import mmap
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from longtake import errors, process, stacks
from longtake.config import DataSection, StoreSection
from longtake.data import stores
from longtake.data.clip import Media
from longtake.data.conditioning import Wanted, read
from longtake.data.decode_limits import MEMORY_GIB, memory_limited, pixels_limited
from longtake.data.workers import Reply, Task, WorkerIncident, WorkerPool
from longtake.heartbeat import HeartbeatDir, HeartbeatWriter

_SECONDS_BETWEEN_PROGRESS = 0.5
_THREADS = 2  # threads that decode where there are no worker processes
_TRIM_EVERY = 100  # items after which freed memory is returned


@dataclass(frozen=True)
class DecodeTask(Task[Wanted, NDArray[np.uint8]]):
    """Task of worker processes: reads windows of clips and their inputs into shared memory."""

    silence_seconds: float
    memory_gib: float
    store: StoreSection
    examples: tuple[Media, ...]
    start_hint = "; or decode in threads of this process: data.workers=0"

    def do(
        self,
        item: Wanted,
        progress: Callable[[], object],
        out: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        return read(item, out)

    def lost(self, item: Wanted, reason: str) -> NDArray[np.uint8]:
        raise errors.ClipError(str(item.media), reason)


class DecodePool:
    """Pool of processes that decode windows of clips in order, and retry a failed one once.

    Without workers, threads of this process read, without protection from hangs and crashes.
    """

    def __init__(
        self,
        workers: int,
        sample_timeout_seconds: float = 60.0,
        *,
        memory_gib: float = MEMORY_GIB,
        heartbeats: HeartbeatDir | None = None,
        store: StoreSection = StoreSection(),  # noqa: B008 - immutable
        examples: tuple[Media, ...] = (),
    ) -> None:
        self._client = stores.StoreClient(store, memory_gib, examples)
        self._threads: ThreadPoolExecutor | None = None
        self._workers: WorkerPool[Wanted, NDArray[np.uint8]] | None = None
        if workers:
            task = DecodeTask(sample_timeout_seconds, memory_gib, store, examples)
            self._workers = WorkerPool(
                task, workers, attempts=2, num_buffers=2, heartbeats=heartbeats
            )
        else:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")

    @classmethod
    def of_recipe(
        cls, data: DataSection, heartbeats: HeartbeatDir | None, examples: Iterable[Media]
    ) -> Self:
        """Start a decoding pool with a recipe's workers and limits (`examples`: `StoreClient`)."""
        return cls(
            data.workers,
            data.sample_timeout_seconds,
            memory_gib=data.sample_memory_gib,
            heartbeats=heartbeats,
            store=data.store,
            examples=tuple(examples),
        )

    def submit(
        self, wanted: Wanted, out: NDArray[np.uint8] | None = None
    ) -> Future[NDArray[np.uint8]]:
        """Queue a clip's window or an input to read; return the future of its pixels or bytes.

        They are written to `out`, or to a new array of `wanted.shape`. The future raises ClipError
        if the input cannot be read, and DataError if no worker can be started.
        """
        if out is None:
            out = np.empty(wanted.shape, np.uint8)
        if self._workers:
            return self._workers.submit(wanted, out)
        assert self._threads
        return self._threads.submit(_read_twice, wanted, out, self._client)

    def incidents(self) -> list[WorkerIncident]:
        return self._workers.incidents() if self._workers else []

    def take_fetched(self) -> stores.Fetched:
        """Return bytes, seconds and retries of reading object stores since the last call."""
        return (self._workers or self._client).take_fetched()

    def decoding(self) -> dict[int, str]:
        """Return the identity of the clip that each worker process is decoding, by process id."""
        running = self._workers.running() if self._workers else {}
        return {pid: wanted.identity if wanted else "" for pid, wanted in running.items()}

    def close(self) -> None:
        """End the worker processes at once; futures of unread items raise a RuntimeError.

        Threads finish what they have begun; other items are cancelled.
        """
        if self._workers:
            self._workers.close()
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Run a worker process: do the task for each item until the parent closes the connection."""
    if len(sys.argv) < 5:
        raise SystemExit("This is a part of longtake's worker pool, which starts it itself.")
    folder, rank, parent, descriptor, *buffers = sys.argv[1:]
    process.end_with(int(parent))
    stacks.enable_stack_dumps()
    connection: Connection[Reply, Any] = Connection(int(descriptor))
    page = HeartbeatWriter(Path(folder), "decode", rank=int(rank)) if folder else None
    with connection, suppress(EOFError, ConnectionError):
        task = pickle.loads(connection.recv_bytes())  # noqa: S301 - sent by our parent
        client = stores.StoreClient(task.store, task.memory_gib, task.examples)
        # Until then the pool waits longer, as imports and the unpickling of the task take time.
        connection.send(("ready", None))
        for number in count(1):
            if page:
                page.set_phase("idle", "")
            item, buffer = connection.recv()
            if page:
                page.set_phase("decode", item.identity, str(item.media))
            memory = None if buffer is None else int(buffers[buffer])
            reply = _reply(connection, task, item, memory, page, client)
            # Before the reply, so that the traffic is counted when the item's future is done.
            if (fetched := client.take_fetched()) != stores.NOTHING:
                connection.send(("fetched", fetched))
            connection.send(reply)
            if number % _TRIM_EVERY == 0:
                # Frames of varying sizes fragment the heap, which grows over hours.
                process.return_freed_memory()


def _reply(
    connection: "Connection[Reply, Any]",
    task: Task[Any, Any],
    item: Any,
    memory: int | None,
    page: HeartbeatWriter | None,
    client: stores.StoreClient,
) -> Reply:
    last = time.monotonic()

    def progress() -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_PROGRESS:
            connection.send(("progress", None))
            last = time.monotonic()

    def wait_for_store(reason: str) -> None:
        if page:
            page.set_waiting(str(item.media), reason)

    client.progress, client.waiting = progress, wait_for_store
    try:
        with (
            nullcontext() if task.memory_gib is None else memory_limited(task.memory_gib),
            stores.using(client),
        ):
            if memory is None:
                return "done", task.do(item, progress)
            # Mapped for each item: the parent may have enlarged the buffer.
            shared = mmap.mmap(memory, int(np.prod(item.shape)))
            out = np.frombuffer(shared, np.uint8).reshape(item.shape)
            task.do(item, progress, out)  # type: ignore[call-arg]
    # Before ClipError, of which these are kinds: a refused item is not tried a second time.
    except stores.ASKED_ENOUGH as error:
        return "refused", error
    except errors.ClipError as error:
        return "failed", error.reason
    except errors.LongtakeError as error:
        return "refused", error
    except Exception as error:  # any other error counts against this item only
        return "failed", f"{task.doing} raised {type(error).__name__}: {error}"
    return "done", None


def _read_twice(
    wanted: Wanted, out: NDArray[np.uint8], client: stores.StoreClient
) -> NDArray[np.uint8]:
    """Read a clip's window or a conditioning input; try a second time if that fails."""
    assert client.memory_gib is not None
    with pixels_limited(client.memory_gib), stores.using(client):
        try:
            return read(wanted, out)
        # The pool does not repeat a task after these errors either: a second try is useless.
        except stores.ASKED_ENOUGH:
            raise
        except errors.ClipError:
            return read(wanted, out)


if __name__ == "__main__":
    main()
