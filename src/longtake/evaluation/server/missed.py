"""Checkpoints that were deleted before their turn came; torch-free.

An evaluation that is slower than the training saves loses those that retention deletes. That must
be seen: nobody misses a video of which nothing says that it should be there.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress

from longtake.evaluation.server.backlog import Backlog
from longtake.evaluation.server.task import Task

ADVICE = (
    "Training saves faster than this evaluates. Raise checkpoint.keep or evaluation.hold_waiting, "
    "start more servers, or take --backlog newest."
)


class Missed:
    """Remembers what was due, until it is done or gone.

    Args:
        backlog: what is wanted; of the newest alone, nothing is missed.
    """

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._due: dict[tuple[str, int], Task] = {}

    def remember(self, tasks: Iterable[Task], there: Collection[int]) -> None:
        """Take in what is due.

        Args:
            tasks: all that is.
            there: steps of which there are checkpoints. Whatever is later than all of them was
                deleted because the run went back: nobody wants it any more.
        """
        every, newest = self._backlog.every, max(there, default=0)
        wanted = (task for task in tasks if every and task.step % every == 0)
        self._due |= {(task.preset.name, task.step): task for task in wanted}
        self._due = {name: task for name, task in self._due.items() if task.step <= newest}

    def gone(self, there: Collection[int]) -> list[Task]:
        """What was due, and is not there now; some of it may have been done before."""
        return [
            task
            for task in self._due.values()
            if task.step not in there and not _is_under_way(task)
        ]

    def forget(self, task: Task) -> None:
        """It is done, or given up, or told of."""
        self._due.pop((task.preset.name, task.step), None)


def sentence(tasks: list[Task]) -> str:
    """One line for people on what was missed of a run."""
    steps: dict[str, list[str]] = {}
    for task in tasks:
        steps.setdefault(task.preset.name, []).append(str(task.step))
    which = "; ".join(f"{name} of step {', '.join(each)}" for name, each in steps.items())
    return f"{tasks[0].run.path}: deleted before it was evaluated: {which}. {ADVICE}"


def _is_under_way(task: Task) -> bool:
    """Whether a deletion has begun and may end otherwise; see `checkpoint.deletion`."""
    path = task.checkpoint
    with suppress(OSError):
        return path.with_name(f".{path.name}.deleted").exists() or path.exists()
    return True
