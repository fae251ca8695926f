"""The follower: the only process that writes to a run's experiment trackers (TensorBoard, W&B).

`python -P -m longtake.tracking.follower RUN --as trainer` follows the run's files and holds the
lease `tracking/writer`. A training starts one; an evaluation server starts one for a run that has
none.
"""

import argparse
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from longtake import errors, evaluation_dir, fsio
from longtake.config import TrackingSection
from longtake.evaluation_dir import EvaluationDirectory, writer_path
from longtake.lease import Lease, Leases, is_alive, kept, newest
from longtake.process import Beat, KeptProcess, StopSignal, program
from longtake.run_dir import BEGINNINGS, RunDirectory
from longtake.tracking.reader import Cursor, UpdateReader
from longtake.tracking.tracker import TrackedRecord, Tracker, log, make_trackers, wanted_trackers

Role = Literal["trainer", "evaluator"]

_LEASE_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_LOOK_SECONDS_AT_END = 0.05  # short, as the end of a launch waits for it
_MAX_TROUBLE_SECONDS = 60.0  # an evaluator's follower then gives another one the chance
_MAX_END_SECONDS = 60.0  # limit of sending after the end of a launch
_MAX_CLOSE_SECONDS = 30.0
_EVALUATOR_WAIT_SECONDS = 30.0  # limit of the wait for the lease, which seemed to be free
_EVALUATOR_WAIT_SECONDS_AT_END = 2.0

_SILENT_SECONDS = 120.0  # more than any wait for a tracker's library or a slow disk
_POLL_SECONDS = 0.02
_CATCH_UP_SECONDS = 10.0
_SERVER_LOOK_SECONDS = 5.0
_FREE_SECONDS = 30.0  # longer than a lease lasts without a beat
_QUIET_SECONDS = 60.0
_MAX_RETRY_SECONDS = 600.0
# W&B: share no service with a parent process that uses it too; print and report nothing.
_QUIET = {"WANDB_SERVICE": "", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
_FEED_POLL_SECONDS = 1.0  # interval of looking for new records
_ARRIVAL_POLL_SECONDS = 0.1  # interval of checking if sent records have arrived
_ARRIVAL_SECONDS = 30.0  # limit of the wait for sent records to arrive
_FIRST_PAUSE_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 120.0
_SAVE_SECONDS = 5.0  # interval of saving the cursor while only rows come
_MAX_FAILURES = 5


# --- Sending to one tracker -------------------------------------------------------------------


class Feed:
    """Sends new records of a run directory to one tracker, and repeats them until they arrive.

    Each tracker's feed has a thread of its own, so that an unreachable one does not delay others.

    Attributes:
        trouble: the current error; empty: there is none.
        is_over: everything has arrived, and the tracker is closed.
    """

    def __init__(
        self, run: RunDirectory, name: str, tracker: Tracker, lease: Lease | None = None
    ) -> None:
        self.name, self.trouble, self.is_over = name, "", False
        self._run, self._tracker, self._lease = run, tracker, lease
        self._path, self._reader = evaluation_dir.cursor_path(run, name), UpdateReader(run)
        self._saved = self._arrived = Cursor()
        self._saved_at = float("-inf")
        self._sent: Cursor | None = None  # position after sent records that have not arrived yet
        self._deadline = math.inf  # for these to arrive
        self._next = 0
        self._is_open = self._is_last = self._is_abandoned = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._rejected: set[str] = set()
        self._failure, self._num_failures = ("", ""), 0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._send_updates, name=name, daemon=True)

    def start(self) -> None:
        self._saved = self._arrived = Cursor.load(self._path)
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
    def is_settled(self) -> bool:  # everything was sent, or cannot be sent now
        return self.is_over or bool(self.trouble)

    def _send_updates(self) -> None:
        # A feed that is abandoned without the lease sends nothing more: another process writes now.
        while not self._is_abandoned or self._may_write():
            is_last = self._is_last  # before reading: then `_send` surely reads the last records
            try:
                has_more = self._send(thoroughly=is_last)
                if is_last and not has_more:
                    self._end()
                    return
                pause = 0.0 if self._sent is None else _ARRIVAL_POLL_SECONDS
                self._wait(pause if has_more else _FEED_POLL_SECONDS)
            except Exception as error:  # whatever a tracker's library raises
                reason = f"{type(error).__name__}: {error}"
                if reason != self.trouble:
                    log(f"{self.name}: {reason}. It is tried again, and then gets all it missed.")
                self.trouble = reason
                # Close the tracker, to start again after the records that have arrived. The
                # reader would otherwise leave out results that it has returned and that were lost.
                self._close()
                self._reader.forget()
                self._sent = None
                if self._is_abandoned:
                    return
                self._wait(self._pause)
                self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
        self._close()

    def _send(self, *, thoroughly: bool) -> bool:
        """Send new records, and note which have arrived; return True if there may be more.

        Further records are read only once these have arrived, so that sending can start again from
        the cursor after an error.
        """
        num_sent = 0
        if self._sent is None:
            updates = self._reader.read(self._arrived, thoroughly=thoroughly)
            num_sent = len(updates.records)
            while self._reader.warnings:
                log(self._reader.warnings.pop(0))
            # Opened with the first record, so that a launch that fails leaves no empty W&B run.
            if updates.records and not self._is_open:
                self._next = self._tracker.open(self._arrived.rows)
                self._is_open = True
            for record in updates.records:
                self._write(record)
            if updates.cursor != self._arrived:
                self._sent = replace(updates.cursor, rows=self._next)
                self._deadline = time.monotonic() + _ARRIVAL_SECONDS
        self._note_arrival(self._tracker.flush() if self._is_open else self._next)
        # A process of W&B that was killed or hangs takes records and fails at none of them.
        if self._sent is not None and time.monotonic() > self._deadline:
            raise TimeoutError(f"records have not arrived for {_ARRIVAL_SECONDS:g} s")
        self._save(at_once=thoroughly)
        # No error until here, so the tracker has accepted what it was given.
        if self.trouble:
            log(f"{self.name}: it can be reached again.")
        self.trouble, self._pause = "", _FIRST_PAUSE_SECONDS
        return num_sent > 0 or self._sent is not None

    def _write(self, record: TrackedRecord) -> None:
        """Write a record to the tracker, unless that rejected it five times for the same reason.

        Such a record would block all later ones for ever. Errors of the system, such as a full
        disk, are not counted, as the record is not their cause.
        """
        # Records have no other identity that survives reading them again.
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
        if self._sent is not None and self._sent.rows <= arrived:
            self._arrived, self._sent = self._sent, None

    def _save(self, *, at_once: bool) -> None:
        """Save the position up to which records have arrived; for rows alone, at most every 5 s."""
        has_results = self._arrived.evaluations != self._saved.evaluations
        is_due = at_once or has_results or time.monotonic() > self._saved_at + _SAVE_SECONDS
        # Without the lease the file belongs to another process, whose cursor is ahead.
        if is_due and self._arrived != self._saved and self._may_write():
            self._arrived.save(self._path)
            self._saved, self._saved_at = self._arrived, time.monotonic()

    def _may_write(self) -> bool:
        return self._lease is None or (self._lease.is_held and self._run.exists())

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._note_arrival(self._tracker.close())
        # Raised, so that the loop opens the tracker again and repeats them.
        if self._sent is not None:
            raise OSError(f"{self.name} was closed without the last rows")
        self._save(at_once=True)
        self.is_over = True

    def _close(self) -> None:
        """Close the tracker if it is open, ignoring errors, and save the position it reached."""
        if self._is_open:
            self._is_open = False
            with suppress(Exception):
                self._note_arrival(self._tracker.close())
        with suppress(OSError):
            self._save(at_once=True)

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()


# --- The process ------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Send a run's records to trackers; return the exit code: 0, or 1 to let another take over."""
    parser = argparse.ArgumentParser(prog="python -m longtake.tracking.follower")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--as", dest="role", choices=get_args(Role), required=True)
    text = "end after this process, or when it closes standard input"
    parser.add_argument("--until-parent", type=int, metavar="PID", help=text)
    parser.add_argument("--section", help="the recipe's `tracking`, as JSON")
    parsed = parser.parse_args(arguments)
    run = RunDirectory(parsed.run)
    try:
        given = parsed.section
        section = TrackingSection.model_validate_json(given) if given else run.recipe().tracking
        with Shutdown(parsed.until_parent) as shutdown:
            is_over = follow(run, parsed.role, section, shutdown)
        return 0 if is_over and not shutdown.is_immediate else 1
    except Exception:
        traceback.print_exc()
        return 1


class Shutdown(StopSignal):
    """Request to a follower to send the remaining records and end.

    The request comes by a signal, by stdin, or by the end of the parent process.
    """

    def __init__(self, parent: int | None) -> None:
        # SIGUSR1, a scheduler's warning, is meant for the parent, whose end then ends this process.
        super().__init__(
            ignored=(signal.SIGUSR1,), on_signal=self._end_at_once, keeps_ignored=False
        )
        self.is_immediate = False
        self.beat = Beat()
        self._parent = parent
        if parent is not None:
            threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the end is requested; return True once it is requested.

        Once the request has come, every call waits only 0.05 s.
        """
        self.beat()
        if self._parent is not None and os.getppid() != self._parent:
            self.request("the parent has ended")
        # The base class would return at once after the request, and the loop would be busy.
        if self.is_requested:
            time.sleep(_LOOK_SECONDS_AT_END)
            return True
        return super().wait(seconds)

    def _listen(self) -> None:
        sys.stdin.buffer.read(1)  # a byte, or the end of the pipe
        self.request("the parent requests it")

    def _end_at_once(self, received: signal.Signals, is_first: bool) -> None:
        self.is_immediate = True


def follow(run: RunDirectory, role: Role, section: TrackingSection, shutdown: Shutdown) -> bool:
    """Send a run's new records to its trackers while this process holds the lease to write.

    A trainer's follower waits for the lease and keeps it while the training runs. An evaluator's
    follower gives it back when a launch begins, or if a tracker cannot be reached for a minute.

    Returns:
        True if the work is done; False if another process should take over.
    """
    return _RunWriter(run, role, section, shutdown).follow()


class _RunWriter:
    def __init__(
        self, run: RunDirectory, role: Role, section: TrackingSection, shutdown: Shutdown
    ) -> None:
        self._run, self._role, self._section, self._shutdown = run, role, section, shutdown
        size = 0
        with suppress(OSError):
            size = run.events_path.stat().st_size
        # From the end of the file: only launches that begin from now on matter.
        self._events = fsio.Tail(run.events_path, dict[str, Any], size)
        self._is_launch_over = role == "evaluator"

    def follow(self) -> bool:
        leases = Leases(_LEASE_SECONDS, {"role": self._role, "caught_up": False})
        path, began, trouble = writer_path(self._run), time.monotonic(), ""
        while self._run.exists():
            lease = None
            try:
                path.parent.mkdir(exist_ok=True)  # no parents: a deleted run must not come back
                lease = leases.take(path)
            except OSError as error:  # such as a full disk: try again until it has room
                if str(error) != trouble:
                    trouble = str(error)
                    log(f"{path} cannot be written: {error}")
            if lease is not None:
                is_over = self._write(lease)
                if is_over is not None:
                    return is_over
            elif self._has_launch_begun() or self._is_too_late(began):
                return True
            self._shutdown.wait(_LOOK_SECONDS)
        return True

    def _has_launch_begun(self) -> bool:
        """Return True if a launch of the run has begun, whose own follower should write.

        For a trainer's follower only a launch after its own counts, that is, one that begins after
        the end of this follower was requested.
        """
        # The value before this call, as events that are read with the request may be older.
        was_over = self._is_launch_over
        self._is_launch_over |= self._shutdown.is_requested
        with suppress(OSError):
            kinds = [event.get("event") for event in self._events.read()]
            return was_over and any(kind in BEGINNINGS for kind in kinds)
        return False

    def _is_too_late(self, began: float) -> bool:
        """Return True if waiting for the lease to write should end: its holder sends everything."""
        is_trainer, shutdown = self._role == "trainer", self._shutdown
        if shutdown.is_requested:
            seconds = _MAX_END_SECONDS if is_trainer else _EVALUATOR_WAIT_SECONDS_AT_END
            return shutdown.is_immediate or shutdown.requested_seconds > seconds
        return not is_trainer and time.monotonic() - began > _EVALUATOR_WAIT_SECONDS

    def _write(self, lease: Lease) -> bool | None:
        """Send records to all trackers until the lease to write is lost or given back.

        Returns:
            The result of `follow`; None: wait for the lease again.
        """
        # Made for each lease: another process may have written, so nothing is known from before.
        trackers = make_trackers(self._run, self._section)
        feeds = [Feed(self._run, *each, lease) for each in trackers.items()]
        with kept(lease):
            for feed in feeds:
                feed.start()
            is_over = self._wait(lease, feeds)
            for feed in feeds:
                feed.end_now()
            # Joining may take half a minute for each feed, and the parent kills a silent process.
            self._shutdown.beat()
            stuck = [feed.name for feed in feeds if not feed.join(_MAX_CLOSE_SECONDS)]
        # The lease is not given back while the thread may write: it is free when this process ends.
        if stuck:
            log(f"{', '.join(stuck)} does not end in {_MAX_CLOSE_SECONDS:g} s. This process ends.")
            return False
        if lease.is_held and self._run.exists():
            with suppress(OSError):
                lease.end("released", **_condition(feeds))
        return True if is_over or self._role == "evaluator" else None

    def _wait(self, lease: Lease, feeds: Sequence[Feed]) -> bool:
        """Wait until the lease to write is lost (returns False) or the work is done (True)."""
        condition: dict[str, Any] = {"troubles": {}, "caught_up": False}
        well_at = time.monotonic()
        while lease.is_held and self._run.exists():
            self._shutdown.wait(_LOOK_SECONDS)
            is_ending, now = self._shutdown.is_requested, time.monotonic()
            if self._has_launch_begun():
                return True
            if is_ending:
                for feed in feeds:
                    feed.finish()
                if _is_done(feeds, self._shutdown):
                    return True
            elif self._role == "evaluator":
                well_at = well_at if any(feed.trouble for feed in feeds) else now
                if now - well_at > _MAX_TROUBLE_SECONDS:
                    return True
            if (found := _condition(feeds)) != condition:
                condition = found
                with suppress(OSError):  # a full disk: the next renewal writes it
                    lease.renew(**condition)
        return False


def _is_done(feeds: Sequence[Feed], shutdown: Shutdown) -> bool:
    if all(feed.is_over for feed in feeds):
        return True
    if shutdown.is_immediate:
        return all(feed.is_settled for feed in feeds)
    if shutdown.requested_seconds <= _MAX_END_SECONDS:
        return False
    late = ", ".join(feed.name for feed in feeds if not feed.is_over)
    log(f"{late}: not everything was sent. The rest is sent when this run is followed again.")
    return True


def _condition(feeds: Sequence[Feed]) -> dict[str, Any]:
    troubles = {feed.name: feed.trouble for feed in feeds if feed.trouble}
    return {"troubles": troubles, "caught_up": all(feed.is_settled for feed in feeds)}


# --- Starting followers -----------------------------------------------------------------------


class Follower(KeptProcess):
    """A run's follower (it writes to the trackers) as a child process, restarted if it fails.

    Args:
        run: the run directory.
        role: the program that starts it: a trainer or an evaluator.
        section: the trackers; None: those of the run's recipe.

    Raises:
        RunError: there is no such run.
        RecipeError: the run's recipe cannot be read.
    """

    def __init__(
        self, run: RunDirectory, role: Role, section: TrackingSection | None = None
    ) -> None:
        section = run.recipe().tracking if section is None else section
        self._run, self._is_wanted = run, bool(wanted_trackers(section))
        options = ["--as", role, "--until-parent", str(os.getpid())]
        options += ["--section", section.model_dump_json()]
        super().__init__(
            "follower",
            program("longtake.tracking.follower", str(run.path.resolve()), *options),
            run.path / "tracking" / "follower.log",
            inside=run.path,
            changes=_QUIET,
            has_pipe=True,
            until_success=True,
            silent_seconds=_SILENT_SECONDS,
        )

    def start(self) -> None:
        """Start the follower, unless it was started or no tracker is wanted; takes milliseconds."""
        if self._is_wanted:
            super().start()
        else:
            self.end()

    def close(self, wait_seconds: float = _CATCH_UP_SECONDS) -> None:
        """Request the follower to end, and wait until trackers have everything or have failed.

        If another process's follower holds the lease, this returns at once: that one sends all.

        Args:
            wait_seconds: limit of the wait; the follower then continues for up to a minute.
        """
        self.end()
        end = time.monotonic() + wait_seconds
        while self.is_running and time.monotonic() < end:
            writer = newest(writer_path(self._run))
            if writer is not None and writer["pid"] == self.pid:
                if writer.get("caught_up"):
                    return
                # None: the holder is on another node, and may be alive.
            elif writer is not None and writer["ended"] is None and is_alive(writer) is not False:
                return
            time.sleep(_POLL_SECONDS)


@contextmanager
def tracking_follower(run: RunDirectory, section: TrackingSection) -> Iterator[Follower]:
    """Yield the process that sends a training's records to its trackers; the caller starts it.

    It can be started once the run exists. The end of the block waits up to 10 s for it; it then
    continues by itself. After an unexpected error there is no wait, as other ranks wait for this
    process to end.
    """
    follower, seconds = Follower(run, "trainer", section), 0.0
    try:
        yield follower
        seconds = _CATCH_UP_SECONDS
    except (errors.LongtakeError, KeyboardInterrupt):
        seconds = _CATCH_UP_SECONDS
        raise
    finally:
        follower.close(seconds)


class Followers:
    """The followers (writers to trackers) of an evaluation server: one per run that needs it.

    A follower is started when a run has new records and its trackers have had no writer for 30 s,
    as a training's own follower has precedence. It ends when nothing new has come for a minute. At
    the server's end the rest is sent at once.
    """

    def __init__(self) -> None:
        self._of_run: dict[RunDirectory, _RunFollower] = {}

    def serve(self, runs: Sequence[RunDirectory]) -> None:
        """Start followers for runs with new records, and end those of runs without any.

        Args:
            runs: all runs; followers of runs that are not among them are ended.
        """
        for run in self._of_run.keys() - set(runs):
            self._of_run.pop(run).end()
        for run in runs:
            self._of_run.setdefault(run, _RunFollower(run)).look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._of_run.values():
            each.start_for_rest()
            each.end()
        for each in self._of_run.values():  # a loop of its own, so that all send at the same time
            each.close()


class _RunFollower:
    """The follower of one run on an evaluation server, started and ended as needed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._follower: Follower | None = None
        self._last: Follower | None = None
        self._sent: object = None  # value of `_state` when the last follower was started
        self._state: object = None
        self._writer: Mapping[str, Any] | None = None
        self._state_since = self._writer_since = time.monotonic()
        self._looked_at = float("-inf")
        self._retry_seconds = _FREE_SECONDS

    def look(self) -> None:
        """Start the run's follower if there are new records, or end it if nothing comes."""
        now = time.monotonic()
        if now - self._looked_at < _SERVER_LOOK_SECONDS:
            return
        self._looked_at = now
        if (state := _state(self._run)) != self._state:
            self._state, self._state_since = state, now
        if (writer := newest(writer_path(self._run))) != self._writer:
            self._writer, self._writer_since = writer, now
        free_seconds = now - self._writer_since  # a living writer renews its lease's record
        if self._is_running():
            if now - self._state_since > _QUIET_SECONDS:
                self.end()
        elif free_seconds > _FREE_SECONDS and state != self._sent:
            self._start(state)
            self._retry_seconds = _FREE_SECONDS
        # Nothing is new, but the last follower could not send all: pauses grow up to 10 minutes.
        elif free_seconds > self._retry_seconds and _has_trouble(writer):
            self._start(state)
            self._retry_seconds = min(2 * self._retry_seconds, _MAX_RETRY_SECONDS)

    def start_for_rest(self) -> None:
        """Start the run's follower for the remaining records, unless one runs."""
        state = _state(self._run)
        is_new = state != self._sent or _has_trouble(newest(writer_path(self._run)))
        if is_new and not self._is_running():
            self._start(state)

    def end(self) -> None:
        if self._follower is not None:
            self._follower.end()
            self._last, self._follower = self._follower, None

    def close(self) -> None:
        if self._last is not None:
            self._last.close()

    def _is_running(self) -> bool:
        return self._follower is not None and not self._follower.is_over

    def _start(self, state: object) -> None:
        """Start the run's follower; after an unreadable recipe, which others report, try later."""
        with suppress(errors.LongtakeError):
            self._follower = Follower(self._run, "evaluator")
            self._follower.start()
            self._sent = state


def _has_trouble(writer: Mapping[str, Any] | None) -> bool:
    return writer is not None and bool(writer.get("troubles"))


def _state(run: RunDirectory) -> dict[Path, object]:
    """Return the versions of the run's files that change with each row, event and result."""
    paths = [run.metrics_path, run.events_path]
    with suppress(OSError):  # there are none yet
        paths += EvaluationDirectory(run).path.iterdir()
    return {path: fsio.file_version(path) for path in paths}


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # sys.exit would wait for threads of a tracker's library
