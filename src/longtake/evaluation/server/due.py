"""What is due of a run: checkpoints that are whole, and have no result of their weights.

A run of weeks has thousands of results, and nearly all of them are settled for good. So a look
reads anew only what may have changed: all of it when something came into the folders of checkpoints
or results, or went, and now and then in any case; else those steps alone that were not settled.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from longtake.evaluation.presets.preset import Preset
from longtake.evaluation.server.checkpoints import Checkpoints, signature
from longtake.evaluation.server.claims import Claims
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.results import Results
from longtake.evaluation.server.runs import is_over
from longtake.evaluation.server.task import Task
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

_ARRIVING_SECONDS = 15.0
"""A checkpoint whose files do not change for so long is not on its way."""
_RESCAN_SECONDS = 30.0
_UNSETTLED_SECONDS = 1.0
"""For so long after a change all is looked at: a folder's time is too coarse to tell two apart."""

_COMMITTED = "COMMITTED"

_Name = tuple[str, int, str]
"""Of what is settled or not: a preset, a step and a key."""


class Due:
    """Looks at a run again and again for one server.

    Args:
        run: the run directory.
        options: of the server.
        report: who is told what is wrong with checkpoints.

    Attributes:
        results: of the run.
    """

    def __init__(self, run: RunDirectory, options: Options, report: Report) -> None:
        self._run, self._options, self._report = run, options, report
        self.results = Results(run)
        self._checkpoints = Checkpoints(run)
        self._signs: object = None
        self._changed = self._scanned = float("-inf")
        self._settled: set[_Name] = set()
        self._open: set[int] = set()
        self._seen: dict[_Name, float] = {}
        self._arriving: dict[tuple[int, str], tuple[str, float]] = {}

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that were there at the last look, ascending."""
        return self._checkpoints.steps

    def tasks(self, presets: Sequence[Preset], claims: Claims) -> list[Task]:
        """What is due of the checkpoints that are here, by preset and step."""
        with_last = self._with_last()
        if self._may_differ(presets, (claims, with_last)):
            self._look_at_all()
        elif again := self._open | self._checkpoints.unfinished:
            self._checkpoints.look_again(again)
        else:
            return []
        tasks: list[Task] = []
        for preset in presets:
            keys = self._checkpoints.keys(preset.weights)
            keys = {step: key for step, key in keys.items() if self._is_whole(step, preset, key)}
            tasks += self._of(preset, claims, keys, with_last=with_last)
        self._tell_unreadable()
        self._open = {task.step for task in tasks} | {step for step, _ in self._arriving}
        return tasks

    def tasks_of(
        self, index: RunDirectory, presets: Sequence[Preset], claims: Claims
    ) -> list[Task]:
        """The same of another folder's checkpoints, of which it need only hold COMMITTED."""
        with_last, there = self._with_last(), Checkpoints(index)
        there.look()
        self._settled.clear()
        self._checkpoints.look()
        tasks: list[Task] = []
        for preset in presets:
            tasks += self._of(preset, claims, there.keys(preset.weights), with_last=with_last)
        return tasks

    def _may_differ(self, presets: Sequence[Preset], others: object) -> bool:
        """Whether something may have changed that was settled."""
        results = (EvaluationDirectory(self._run).path / preset.name for preset in presets)
        folders = map(signature, (self._run.checkpoints_path, *results))
        signs, now = (list(presets), others, list(folders)), time.monotonic()
        if signs != self._signs:
            self._signs, self._changed = signs, now
        is_new = now <= self._changed + _UNSETTLED_SECONDS
        is_late = now > self._scanned + _RESCAN_SECONDS
        if is_new or is_late:
            self._scanned = now
        return is_new or is_late

    def _look_at_all(self) -> None:
        self._settled.clear()
        self._checkpoints.look()
        steps = {*self._checkpoints.steps}
        self.results.forget_all_but(steps)
        self._arriving = {name: each for name, each in self._arriving.items() if name[0] in steps}
        self._seen = {name: since for name, since in self._seen.items() if name[1] in steps}

    def _of(
        self, preset: Preset, claims: Claims, keys: dict[int, str], *, with_last: bool
    ) -> Iterator[Task]:
        for step in self._options.backlog.choose(list(keys), with_last=with_last):
            name = preset.name, step, keys[step]
            if name not in self._settled:
                task = Task(self._run, preset, step, keys[step])
                attempts = claims.attempts(task) if not self.results.has(task) else None
                if attempts is not None and not attempts.is_final:
                    waited = self._waited(name)
                    yield replace(task, attempts=attempts.number, waited_seconds=waited)
                else:
                    self._settled.add(name)
                    self._seen.pop(name, None)

    def _with_last(self) -> bool:
        if self._options.backlog.every in (None, 1):
            return False
        return not self._options.follows or is_over(self._run)

    def _is_whole(self, step: int, preset: Preset, key: str) -> bool:
        """Whether no file is missing or short; such may be on their way."""
        found = self._checkpoints.damage(step, preset.weights, key)
        if found is None:
            self._arriving.pop((step, preset.weights), None)
        elif self._lasts(step, preset.weights, found):
            path = self._run.checkpoint_path(step)
            self._report.wrong(f"{path} is not whole: {found}. It is evaluated when it is.")
        return found is None

    def _tell_unreadable(self) -> None:
        for step, what in list(self._arriving):
            if what == _COMMITTED and step not in self._checkpoints.unreadable:
                del self._arriving[step, what]
        for step, why in self._checkpoints.unreadable.items():
            if self._lasts(step, _COMMITTED, why):
                path = self._run.checkpoint_path(step) / _COMMITTED
                self._report.wrong(f"{path} cannot be read: {why}. Evaluated is what has one.")

    def _lasts(self, step: int, what: str, found: str) -> bool:
        """Whether nothing of a checkpoint has arrived for a while, or nobody waits for it."""
        before, now = self._arriving.get((step, what)), time.monotonic()
        if before is None or before[0] != found:
            before = self._arriving[step, what] = found, now
        return not self._options.follows or now - before[1] > _ARRIVING_SECONDS

    def _waited(self, name: _Name) -> float:
        now = time.monotonic()
        return now - self._seen.setdefault(name, now)
