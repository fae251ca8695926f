"""Holds what waits for its turn while a server works on something else; torch-free.

Sampling takes minutes, in which the training saves and deletes. So this looks at the runs from a
thread of its own, unless the server has just done so.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from longtake.evaluation.server.hold import Holds
from longtake.evaluation.server.mishaps import Mishaps
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.task import Task
from longtake.evaluation.server.view import View
from longtake.process import periodic
from longtake.run_dir import RunDirectory
from longtake.trust import is_mirror

_PAUSE_PER_LOOK = 10.0
"""Pauses are so much longer than looks, which take long where there are many checkpoints."""

_Place = tuple[RunDirectory, int]


class Waiting:
    """The holds of one server on checkpoints that wait.

    All servers hold the same ones, the oldest, so that more servers keep no more on disk. Where
    only the newest checkpoint is wanted, none is held; nor is one of a mirror, from which nothing
    is deleted that waits.

    Args:
        options: of the server.
        holds: its holds.
        mishaps: who is told what nobody has foreseen.
    """

    def __init__(self, options: Options, holds: Holds, mishaps: Mishaps) -> None:
        self._options, self._holds, self._mishaps = options, holds, mishaps
        self._views: list[View] = []
        self._held: set[_Place] = set()

    def serve(self, views: Sequence[View]) -> None:
        """Hold what waits in these runs."""
        self._views = [view for view in views if not is_mirror(view.run.path)]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold what waits until the block ends."""
        if not self._options.backlog.takes_all:
            yield
            return
        seconds = self._options.look_seconds
        try:
            with periodic("waiting", self._look, seconds, rest=_PAUSE_PER_LOOK):
                yield
        finally:
            self._hold(set())

    def _look(self) -> None:
        places: set[_Place] = set()
        for view in self._views:
            places |= self._wanted(view)
        with self._mishaps.kept_to("holds"):
            self._hold(places)

    def _wanted(self, view: View) -> set[_Place]:
        """What it holds of a run; what it has held, where that cannot be seen now."""
        steps = {step for run, step in self._held if run == view.run}
        with self._mishaps.kept_to(view.run.path):
            steps = wanted(view, view.due_lately(self._options.look_seconds), steps)
        return {(view.run, step) for step in steps}

    def _hold(self, places: set[_Place]) -> None:
        for run, step in self._held - places:
            self._holds.give_back(run, step)
        self._held &= places
        for run, step in places - self._held:
            with suppress(OSError):  # a full disk: tried again at the next look
                self._holds.take(run, step)
                self._held.add((run, step))


def wanted(view: View, due: Sequence[Task], held: set[int]) -> set[int]:
    """Steps of a run that a server holds: the oldest that wait.

    And of those that somebody works on, its own, so that a failure leaves no moment in which nobody
    holds what is tried again; and those that it holds already, because whoever has just claimed
    one may not hold it yet.

    Args:
        view: of the run.
        due: what is due of it.
        held: what it holds already.
    """
    tasks = [task for task in due if not view.is_damaged(task)]
    newest = [(task.step, *view.claims.ending(task)) for task in tasks]
    waiting = sorted({step for step, how, server in newest if server is None or how is not None})
    worked_on = {(step, server) for step, how, server in newest if server and how is None}
    kept = {step for step, server in worked_on if server == view.directory.name or step in held}
    return kept | set(waiting[: view.section.hold_waiting])
