"""Which results a run has, and of which weights; torch-free."""

from collections.abc import Collection

from longtake.evaluation.server.checkpoints import Signature, signature
from longtake.evaluation.server.task import Task
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory


class Results:
    """Remembers the key of each result until its scores.json changes, and nothing else of it.

    Args:
        run: the run directory.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._directory = EvaluationDirectory(run)
        self._keys: dict[tuple[str, int], tuple[Signature | None, str | None]] = {}

    def has(self, task: Task) -> bool:
        """Whether a task's result is there, and is of these weights."""
        name = task.preset.name, task.step
        now = signature(self._directory.result_path(*name) / "scores.json")
        known = self._keys.get(name)
        if known is None or known[0] != now:
            scores = self._directory.scores(*name) if now is not None else None
            known = self._keys[name] = now, scores["key"] if scores is not None else None
        return known[1] == task.key

    def forget_all_but(self, steps: Collection[int]) -> None:
        """Forget those of checkpoints that are gone."""
        self._keys = {name: known for name, known in self._keys.items() if name[1] in steps}
