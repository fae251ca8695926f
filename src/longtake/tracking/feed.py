"""Sends one tracker what a run directory gains, until it has arrived.

In a thread of its own, so that a tracker that cannot be reached delays no other.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace

from longtake.evaluation_dir import cursor_path
from longtake.lease import Lease
from longtake.run_dir import RunDirectory
from longtake.tracking.reader import Cursor, UpdateReader
from longtake.tracking.tracker import TrackedRecord, Tracker, log

_POLL_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 120.0
_SAVE_SECONDS = 5.0  # between two saves of the cursor, while only rows come
_MAX_FAILURES = 5


class Feed:
    """Sends to one tracker."""

    def __init__(
        self, run: RunDirectory, name: str, tracker: Tracker, lease: Lease | None = None
    ) -> None:
        self.name, self.trouble, self.is_over = name, "", False
        self._run, self._tracker, self._lease = run, tracker, lease
        self._path, self._reader = cursor_path(run, name), UpdateReader(run)
        self._saved = self._arrived = self._read = Cursor()
        self._saved_at = float("-inf")
        self._sent: deque[Cursor] = deque()  # after what was sent, and may not have arrived
        self._next = 0
        self._is_open = self._is_last = self._is_abandoned = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._rejected: set[str] = set()
        self._failure, self._num_failures = ("", ""), 0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._send_updates, name=name, daemon=True)

    def start(self) -> None:
        self._saved = self._arrived = self._read = Cursor.load(self._path)
        self._thread.start()

    def finish(self) -> None:
        if not self._is_last:
            self._is_last = True
            self._wake.set()

    def end_now(self) -> None:
        self._is_abandoned = self._is_last = True
        self._wake.set()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_settled(self) -> bool:  # all is sent, or cannot be now
        return self.is_over or bool(self.trouble)

    def _send_updates(self) -> None:
        while not self._is_abandoned or self._may_write():
            is_last = self._is_last  # asked before it is read what there is
            try:
                has_more = self._send(thoroughly=is_last)
                if is_last and not has_more:
                    self._end()
                    return
                self._wait(0.0 if has_more else _POLL_SECONDS)
            except Exception as error:  # whatever a tracker's library raises
                self._recover(error)
                if self._is_abandoned:
                    return
                self._wait(self._pause)
                self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        self._close()

    def _send(self, *, thoroughly: bool) -> bool:
        """Send what is new, and note what has arrived; whether there may be more."""
        updates = self._reader.read(self._read, thoroughly=thoroughly)
        while self._reader.warnings:
            log(self._reader.warnings.pop(0))
        if updates.records and not self._is_open:
            self._next = self._tracker.open(self._read.rows)
            self._is_open = True
        for record in updates.records:
            self._write(record)
        if updates.cursor != self._read:
            self._read = replace(updates.cursor, rows=self._next)
            self._sent.append(self._read)
        if self._sent:
            self._note_arrival(self._tracker.flush() if self._is_open else self._next)
        self._save(at_once=thoroughly)
        if self.trouble:
            log(f"{self.name}: it can be reached again.")
        self.trouble, self._pause = "", _FIRST_PAUSE_SECONDS
        return bool(updates.records)

    def _write(self, record: TrackedRecord) -> None:
        """Write a record, unless the tracker has rejected it several times for the same reason.

        Such a record would delay all that come after it for ever. What the system reports, such as
        a full disk, is not due to the record.
        """
        if self._rejected and repr(record) in self._rejected:
            return
        try:
            self._next += self._tracker.write(self._next, record)
        except Exception as error:
            if not (isinstance(error, OSError) and error.errno is not None):
                failure = repr(record), f"{type(error).__name__}: {error}"
                self._num_failures = self._num_failures + 1 if failure == self._failure else 1
                self._failure = failure
                if self._num_failures == _MAX_FAILURES:
                    self._rejected.add(failure[0])
                    log(f"{self.name}: rejected, and left out ({failure[1]}): {failure[0][:300]}")
            raise

    def _note_arrival(self, arrived: int) -> None:
        while self._sent and self._sent[0].rows <= arrived:
            self._arrived = self._sent.popleft()

    def _save(self, *, at_once: bool) -> None:
        """Save how much has arrived; while only rows come, not each time."""
        has_results = self._arrived.evaluations != self._saved.evaluations
        is_due = at_once or has_results or time.monotonic() > self._saved_at + _SAVE_SECONDS
        if is_due and self._arrived != self._saved and self._may_write():
            self._arrived.save(self._path)
            self._saved, self._saved_at = self._arrived, time.monotonic()

    def _may_write(self) -> bool:
        return self._lease is None or (self._lease.is_held and self._run.exists())

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._note_arrival(self._tracker.close())
        if self._sent:
            raise OSError(f"{self.name} was closed without the last rows")
        self._save(at_once=True)
        self.is_over = True

    def _recover(self, error: Exception) -> None:
        """Begin again after what has arrived."""
        reason = f"{type(error).__name__}: {error}"
        if reason != self.trouble:
            log(f"{self.name}: {reason}. It is tried again, and then gets all that it missed.")
        self.trouble = reason
        self._close()
        self._read = self._arrived
        self._reader.forget()
        self._sent.clear()

    def _close(self) -> None:
        """Close the tracker if it is open, whatever that raises."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._note_arrival(self._tracker.close())
        with suppress(OSError):
            self._save(at_once=True)

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()
