"""Which run is served next: they take turns, so that none waits until the others end; pure."""

from collections.abc import Iterable
from itertools import chain

from longtake.evaluation.server.task import Task
from longtake.run_dir import RunDirectory

CHECKPOINTS_PER_TURN = 3
"""More than one, because a change of the run builds another model."""


class Turns:
    """Remembers when each run was last served, and how far its turn is."""

    def __init__(self) -> None:
        self._now: RunDirectory | None = None
        self._steps: set[int] = set()
        self._served: dict[RunDirectory, int] = {}
        self._count = 0

    def served(self, task: Task) -> None:
        """Note that a task is being worked on."""
        if not self._is_of_this_turn(task):
            self._now, self._steps = task.run, set()
        self._steps.add(task.step)
        self._count += 1
        self._served[task.run] = self._count

    def in_order(self, by_run: Iterable[list[Task]]) -> list[Task]:
        """Tasks of several runs in the order in which they are tried.

        What has failed comes last. The run whose turn it is comes first, with all presets of its
        few checkpoints; then the one that was served the longest time ago, or never.

        Args:
            by_run: of each run, in the order in which they are tried where it is alone.
        """
        tasks = chain.from_iterable(by_run)
        return sorted(tasks, key=lambda task: (task.attempts, self._rank(task)))  # stable

    def _rank(self, task: Task) -> int:
        return -1 if self._is_of_this_turn(task) else self._served.get(task.run, 0)

    def _is_of_this_turn(self, task: Task) -> bool:
        has_room = len(self._steps) < CHECKPOINTS_PER_TURN
        return task.run == self._now and (has_room or task.step in self._steps)
