"""What a watcher does in the run directory, in a thread of its own.

The run directory may lie on a disk that hangs or is full, and just then it is that somebody must
watch. So the watcher's loop hands over what is to be written, and whoever wants something from
there waits only so long. Its log is there as well, so what it says goes the same way.
"""

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswerInTime
from contextlib import suppress
from typing import Any, TypeVar

from longtake.formatting import printable_lines
from longtake.fsio import now
from longtake.node_dir import NodeDirectory, NodeEventKind

_T = TypeVar("_T")
_MOST_LINES = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskSilentError(OSError):
    """The run directory's disk gives no answer."""


class Disk:
    """Writes to a node's folder, the newest heartbeat and all events, whenever that is possible.

    Args:
        node: the folder.
    """

    def __init__(self, node: NodeDirectory) -> None:
        self._node = node
        self._thread = ThreadPoolExecutor(1, "disk")
        self._writing: Future[None] | None = None
        self._silent: Future[Any] | None = None
        self._beat: Mapping[str, Any] | None = None
        self._events: deque[tuple[NodeEventKind, dict[str, Any]]] = deque()
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._trouble: OSError | None = None
        self._is_in_trouble = False

    def beat(self, record: Mapping[str, Any]) -> None:
        """Have heartbeat.json replaced; one that was not written yet is dropped."""
        self._beat = record
        self._write_soon()

    def tell(self, kind: NodeEventKind, fields: Mapping[str, Any]) -> None:
        """Have an event appended, with the time that it is now."""
        self._events.append((kind, {"time": now(), **fields}))
        self._write_soon()

    def say(self, text: str) -> None:
        """Have a line printed."""
        self._lines.append(f"{now()} {text}")
        self._write_soon()

    def ask(self, work: Callable[[], _T], seconds: float) -> _T:
        """Have something done there, and wait for it.

        Args:
            work: what.
            seconds: for how long.

        Raises:
            DiskSilentError: it was not done in time, or what was asked before is not done yet.
            OSError: it cannot be done.
        """
        if self._silent is not None and not self._silent.done():
            raise DiskSilentError(f"{self._node.run.path} does not answer")
        future = self._thread.submit(work)
        try:
            return future.result(seconds)
        except NoAnswerInTime:
            if not future.cancel():
                self._silent = future
            text = f"{self._node.run.path} did not answer in {seconds:g} s"
            raise DiskSilentError(text) from None

    def take_trouble(self) -> OSError | None:
        """Why nothing can be written, once each time that this begins."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def close(self, seconds: float) -> None:
        """Wait until everything is written, for so long at most."""
        end = time.monotonic() + seconds
        while self._is_behind() and time.monotonic() < end:
            self._write_soon()
            if self._writing is not None:
                with suppress(NoAnswerInTime):
                    self._writing.result(max(0.0, end - time.monotonic()))
            if self._is_in_trouble:
                time.sleep(0.1)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_behind(self) -> bool:
        return bool(self._lines or self._events or self._beat)

    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            with suppress(RuntimeError):  # it is closed
                self._writing = self._thread.submit(self._write)

    def _write(self) -> None:
        while self._lines:
            line = self._lines.popleft()
            with suppress(OSError, ValueError):  # nobody listens, or there is no room
                print(printable_lines(line), flush=True)  # noqa: T201 - to the log, or to a person
        try:
            while self._events:
                kind, fields = self._events[0]
                self._node.append_event(kind, **fields)
                self._events.popleft()
            if (record := self._beat) is not None:
                self._beat = None
                times = {"monotonic": time.monotonic(), "wall": time.time()}
                self._node.write_heartbeat({**record, **times})
        except OSError as error:
            if not self._is_in_trouble:
                self._is_in_trouble, self._trouble = True, error
        else:
            self._is_in_trouble = False


def is_full(error: OSError) -> bool:
    """Whether it is room that was wanting."""
    return error.errno is not None and error.errno in _FULL
