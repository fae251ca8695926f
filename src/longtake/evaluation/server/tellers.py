"""Tells the trackers of results where no training does: a follower of each run; torch-free.

A follower is a process. One whose run is over, and that has been told all there is, ends: over
weeks, a server serves many runs. There is another when there is news.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from longtake.errors import LongtakeError
from longtake.evaluation.server.checkpoints import Signature, signature
from longtake.evaluation.server.runs import is_over
from longtake.evaluation_dir import EvaluationDirectory, writer_path
from longtake.lease import history
from longtake.run_dir import RunDirectory
from longtake.tracking.process import Follower

_LOOK_SECONDS = 5.0
_QUIET_SECONDS = 10.0


class Tellers:
    """The followers of the runs that a server serves; ended with it, when they have told all."""

    def __init__(self) -> None:
        self._tellers: dict[RunDirectory, _Teller] = {}

    def serve(self, runs: Sequence[RunDirectory]) -> None:
        """Have a follower for each run of which there may be something to tell, and no other.

        Args:
            runs: all of them; what is not among them any more was deleted.
        """
        for run in self._tellers.keys() - set(runs):
            self._tellers.pop(run).end()
        for run in runs:
            self._tellers.setdefault(run, _Teller(run)).look()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for teller in self._tellers.values():
            teller.tell_news()
            teller.end()
        for teller in self._tellers.values():  # they tell what is left at the same time
            teller.close()


class _Teller:
    """The follower of one run, while there is one."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._follower: Follower | None = None
        self._last: Follower | None = None
        self._news: object = None
        self._changed = self._looked = float("-inf")

    def look(self) -> None:
        """Start a follower when there is news, and end it when there will be none."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self.tell_news()
        if self._follower is not None and self._is_told():
            self.end()

    def tell_news(self) -> None:
        """Start a follower if there is none, and there is something that none was told of."""
        if self._follower is not None and self._follower.is_over:  # its run was not there
            self._follower = self._news = None
        news = _news(self._run)
        if news != self._news:
            self._news, self._changed = news, time.monotonic()
            self._start()
        elif self._follower is None and _troubles(self._run):
            self._start()

    def end(self) -> None:
        """Let the follower tell what is left, and end; returns at once."""
        if self._follower is not None:
            self._follower.end()
            self._last, self._follower = self._follower, None

    def close(self) -> None:
        """Wait for it, for a while."""
        if self._last is not None:
            self._last.close()

    def _start(self) -> None:
        """Later where the recipe cannot be read now: who looks for its presets tells of that."""
        if self._follower is None and self._run.exists():
            try:
                self._follower = Follower(self._run, "evaluator")
                self._follower.start()
            except LongtakeError:
                self._news = None

    def _is_told(self) -> bool:
        """Whether its run is over, nothing has come for a while, and no tracker is in trouble."""
        is_quiet = time.monotonic() - self._changed > _QUIET_SECONDS
        with suppress(OSError):
            return is_quiet and is_over(self._run) and not _troubles(self._run)
        return False


def _news(run: RunDirectory) -> tuple[Signature | None, dict[str, Signature | None]]:
    """Changes with each result, and when the run begins or ends."""
    folders: dict[str, Signature | None] = {}
    with suppress(OSError):  # there are none yet
        folders = {path.name: signature(path) for path in EvaluationDirectory(run).path.iterdir()}
    return signature(run.events_path), folders


def _troubles(run: RunDirectory) -> bool:
    """Whether some tracker could not be told, as whoever tells them last said."""
    return bool((history(writer_path(run)) or [{}])[-1].get("troubles"))
