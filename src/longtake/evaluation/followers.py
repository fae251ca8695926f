"""Starts tracking followers of runs that no training follows; torch-free.

A follower is a process. It ends when its run is over and all is told: over weeks, a server serves
many runs. Another is started when there is something new.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from longtake.errors import LongtakeError
from longtake.evaluation.pending import RunEnding, Signature, signature
from longtake.evaluation_dir import EvaluationDirectory, writer_path
from longtake.lease import history
from longtake.run_dir import RunDirectory
from longtake.tracking.process import Follower

_LOOK_SECONDS = 5.0
_QUIET_SECONDS = 10.0


class Followers:
    """The followers of the runs that a server serves; at its end they tell what is left."""

    def __init__(self) -> None:
        self._of_run: dict[RunDirectory, _RunFollower] = {}

    def serve(self, runs: Sequence[RunDirectory]) -> None:
        """Have a follower for each run of which there may be something to tell, and no other.

        Args:
            runs: all runs; those that are missing were deleted.
        """
        for run in self._of_run.keys() - set(runs):
            self._of_run.pop(run).end()
        for run in runs:
            self._of_run.setdefault(run, _RunFollower(run)).look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._of_run.values():
            each.tell_news()
            each.end()
        for each in self._of_run.values():  # they tell what is left at the same time
            each.close()


class _RunFollower:
    """The follower of one run, while there is one."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._ending = run, RunEnding(run)
        self._follower: Follower | None = None
        self._last: Follower | None = None
        self._news: object = None
        self._changed_at = self._looked_at = float("-inf")

    def look(self) -> None:
        """Start a follower if something is new, and end it when nothing will come."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self.tell_news()
        if self._follower is not None and self._has_told_all():
            self.end()

    def tell_news(self) -> None:
        """Start a follower if there is none, and something is new or a tracker was in trouble."""
        if self._follower is not None and self._follower.is_over:  # its run was not there
            self._follower = self._news = None
        news = _news(self._run)
        if news != self._news:
            self._news, self._changed_at = news, time.monotonic()
            self._start()
        elif self._follower is None and _has_trouble(self._run):
            self._start()

    def end(self) -> None:
        """Let the follower tell what is left, and end; returns at once."""
        if self._follower is not None:
            self._follower.end()
            self._last, self._follower = self._follower, None

    def close(self) -> None:
        """Wait for the follower's end, for a while."""
        if self._last is not None:
            self._last.close()

    def _start(self) -> None:
        """Later if the recipe cannot be read now, which is reported where presets are read."""
        if self._follower is None and self._run.exists():
            try:
                self._follower = Follower(self._run, "evaluator")
                self._follower.start()
            except LongtakeError:
                self._news = None

    def _has_told_all(self) -> bool:
        """Whether the run is over, nothing has come for a while, and no tracker is in trouble."""
        is_quiet = time.monotonic() - self._changed_at > _QUIET_SECONDS
        with suppress(OSError):
            return is_quiet and self._ending.is_over() and not _has_trouble(self._run)
        return False


def _news(run: RunDirectory) -> tuple[Signature | None, dict[str, Signature | None]]:
    """Changes with each result, and when the run begins or ends."""
    folders: dict[str, Signature | None] = {}
    with suppress(OSError):  # there are none yet
        folders = {path.name: signature(path) for path in EvaluationDirectory(run).path.iterdir()}
    return signature(run.events_path), folders


def _has_trouble(run: RunDirectory) -> bool:
    """Whether the last follower could not reach a tracker."""
    return bool((history(writer_path(run)) or [{}])[-1].get("troubles"))
