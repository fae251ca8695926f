"""One tracker's share of the follower: what is new goes there until it has arrived.

In a thread of its own, so that a tracker that cannot be reached keeps no other waiting.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from longtake.lease import Lease
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor
from longtake.tracking.cursor import Position
from longtake.tracking.log import say
from longtake.tracking.news import News, Reader, Record
from longtake.tracking.refusals import Refusals
from longtake.tracking.tracker import Tracker

_POLL_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 120.0
_SECONDS_BETWEEN_SAVES = 5.0  # of the cursor, while only rows come


class Feed:
    """Tells one tracker of a run.

    Args:
        run: the run.
        tracker: to be told.
        path: of its cursor.
        lease: of the writer; nothing is noted when another has it. None: nobody else writes.

    Attributes:
        name: the tracker's.
        trouble: why it could not be told the last time; empty if it could.
        is_over: whether it has been told everything, and was closed.
    """

    def __init__(
        self, run: RunDirectory, tracker: Tracker, path: Path, lease: Lease | None = None
    ) -> None:
        self.name = tracker.name
        self._tracker, self._path, self._lease = tracker, path, lease
        self._reader, self._refusals = Reader(run), Refusals(tracker.name)
        self._saved = self._kept = self._read = Position()
        self._saved_at = float("-inf")
        self._marks: deque[Position] = deque()
        self._next = 0
        self._is_open = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._is_last = self._is_abandoned = self._may_write = False
        self._wake = threading.Event()
        self.trouble = ""
        self.is_over = False
        self._thread = threading.Thread(target=self._keep_telling, name=tracker.name, daemon=True)

    def start(self) -> None:
        """Begin where the cursor says."""
        self._saved = self._kept = self._read = cursor.load(self._path)
        self._thread.start()

    def finish(self) -> None:
        """Let it end when it has sent what there is; it tries until it can."""
        if not self._is_last:
            self._is_last = True
            self._wake.set()

    def end_now(self, *, may_write: bool) -> None:
        """Let it end though it cannot be told now; not `may_write`: somebody else writes."""
        self._is_abandoned, self._may_write = True, may_write
        self.finish()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for its end; whether it has come."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_settled(self) -> bool:
        """Whether it is over, or nothing can be done about it now."""
        return self.is_over or bool(self.trouble)

    def _keep_telling(self) -> None:
        while not self._is_abandoned or self._may_write:
            is_last = self._is_last  # asked before it is read what there is
            try:
                has_more = self._tell(thoroughly=is_last)
                if is_last and not has_more:
                    self._end()
                    return
                self._wait(0.0 if has_more else _POLL_SECONDS)
            except Exception as error:  # whatever a tracker's library raises
                self._recover(error)
                if self._is_abandoned:
                    return
                self._wait_longer()
        self._leave()

    def _tell(self, *, thoroughly: bool) -> bool:
        """Send what is new, and note what has arrived; whether there may be more."""
        news = self._reader.read(self._read, thoroughly=thoroughly)
        self._complain()
        if news and not self._is_open:
            self._next = self._tracker.open(self._read)
            self._is_open = True
        if news:
            self._write(news)
        if news.position != self._read:
            self._read = replace(news.position, rows=self._next)
            self._marks.append(self._read)
        if self._marks:
            self._commit(self._tracker.flush() if self._is_open else self._next)
        self._save(at_once=thoroughly)
        self._went_well()
        return bool(news)

    def _write(self, news: News) -> None:
        for record in news.records():
            if not self._refusals.is_given_up(record):
                with self._refusals.noted(record):
                    self._next += self._put(record)

    def _put(self, record: Record) -> bool:
        match record:
            case "row", row:
                return self._tracker.write_row(self._next, row)
            case "event", event:
                return self._tracker.write_event(self._next, event)
            case _, evaluation:
                return self._tracker.write_evaluation(self._next, evaluation)

    def _commit(self, arrived: int) -> None:
        """Move on to the last mark up to which everything has arrived."""
        while self._marks and self._marks[0].rows <= arrived:
            self._kept = self._marks.popleft()

    def _save(self, *, at_once: bool) -> None:
        """Move the cursor to what has arrived; while only rows come, not each time."""
        has_results = self._kept.evaluations != self._saved.evaluations
        is_time = time.monotonic() > self._saved_at + _SECONDS_BETWEEN_SAVES
        is_due = at_once or has_results or is_time
        if is_due and self._kept != self._saved and self._may_save():
            cursor.save(self._path, self._kept)
            self._saved, self._saved_at = self._kept, time.monotonic()

    def _may_save(self) -> bool:
        if self._is_abandoned and not self._may_write:
            return False
        return self._lease is None or self._lease.is_held

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._commit(self._tracker.close())
        if self._marks:
            raise OSError(f"{self.name} has closed without the last rows")
        self._save(at_once=True)
        self.is_over = True

    def _recover(self, error: Exception) -> None:
        """Begin again at what has arrived, after a while."""
        reason = f"{type(error).__name__}: {error}"
        if reason != self.trouble:
            say(f"{self.name}: {reason}. It is tried again, and told then what it missed.")
        self.trouble = reason
        self._leave()
        self._read = self._kept
        self._reader.forget()
        self._marks.clear()

    def _leave(self) -> None:
        """Close the tracker, if it is open, whatever it says to that."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._commit(self._tracker.close())
        with suppress(OSError):
            self._save(at_once=True)

    def _wait_longer(self) -> None:
        self._wait(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _went_well(self) -> None:
        if self.trouble:
            say(f"{self.name}: it can be told again.")
        self.trouble, self._pause = "", _FIRST_PAUSE_SECONDS

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _complain(self) -> None:
        while self._reader.complaints:
            say(self._reader.complaints.pop(0))
