"""What a server knows of one run: what is wanted of it, and what of that is due; torch-free."""

import math
from contextlib import suppress
from typing import Any

from longtake.config import EvaluationSection
from longtake.evaluation.presets.preset import Preset
from longtake.evaluation.server.checkpoints import state_of_files
from longtake.evaluation.server.claims import Claims
from longtake.evaluation.server.due import Due
from longtake.evaluation.server.missed import Missed, sentence
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.task import Task
from longtake.evaluation.server.wanted import Wanted
from longtake.evaluation_dir import ServerDirectory, ServerEventKind
from longtake.run_dir import RunDirectory


class View:
    """One run, as a server sees it; one thread at a time may ask.

    Args:
        run: the run directory.
        server: the name of the server.
        options: of the server.
        report: who is told what is wrong with presets and checkpoints.

    Attributes:
        run: the run directory.
        directory: where the server says what it does.
        claims: what of the run this server works on.
    """

    def __init__(self, run: RunDirectory, server: str, options: Options, report: Report) -> None:
        self.run, self._server, self._options, self._report = run, server, options, report
        self.directory = ServerDirectory(run, server)
        self._wanted = Wanted(run, options, report)
        self._due = Due(run, options, report)
        self._missed = Missed(options.backlog)
        self.claims = self._claims_for(self.section)
        self._index: RunDirectory | None = None
        self._damaged: dict[tuple[int, str], object] = {}

    @property
    def section(self) -> EvaluationSection:
        """What the recipe says of evaluations."""
        return self._wanted.section

    def due(self, index: RunDirectory | None = None) -> list[Task]:
        """What is to be done, in the order in which it should be.

        Args:
            index: another folder whose checkpoints count, of which it need only hold COMMITTED:
                those of the place that the run is mirrored from.
        """
        self._read_recipe()
        presets = self._wanted.presets()
        if index is None:
            tasks = self._due.tasks(presets, self.claims)
        else:
            tasks = self._due.tasks_of(index, presets, self.claims)
        self._index = index or self._index
        self._missed.remember(tasks, self._there())
        return sorted(tasks, key=lambda task: task.step)  # stable: presets in their order

    def note(self, event: ServerEventKind, /, **facts: Any) -> None:
        """Write down what the server does; on a full disk nothing: the results are what counts."""
        with suppress(OSError):
            self.directory.append_event(event, **facts)

    def tell_missed(self, **facts: Any) -> None:
        """Tell of what was missed since this was last asked; `facts` are written down with it."""
        if missed := self.missed():
            for task in missed:
                self.note("evaluation_missed", **task.facts, **facts)
            self._report.remark(sentence(missed))

    def missed(self) -> list[Task]:
        """What was due, and was deleted before anybody evaluated it; each once, by one server."""
        return [task for task in self._missed.gone(self._there()) if self._is_missed(task)]

    def rests(self, task: Task) -> bool:
        """Whether a task is left alone for now."""
        waits = self.claims.rests(task) or self.claims.are_paused
        return (self._options.follows and waits) or self.is_damaged(task)

    def is_damaged(self, task: Task) -> bool:
        """Whether its checkpoint is not as it was saved, as this server has found."""
        known = self._damaged.get((task.step, task.preset.weights))
        return known is not None and known == _state(task)

    def note_damage(self, task: Task) -> None:
        """Try a checkpoint again only when its files have changed."""
        self._damaged[task.step, task.preset.weights] = _state(task)

    def refuse(self, preset: Preset, seconds: float = math.inf) -> None:
        """Do not try a preset for so long, or until the recipe changes."""
        self._wanted.refuse(preset, seconds)

    def _read_recipe(self) -> None:
        self._wanted.read()
        claims = self._claims_for(self.section)
        if not claims.is_like(self.claims):
            self.claims = claims

    def _claims_for(self, section: EvaluationSection) -> Claims:
        seconds, attempts = section.lease_seconds, section.max_attempts
        return Claims(self._server, seconds, attempts, self._options.pause_seconds)

    def _there(self) -> set[int]:
        """Steps of which there is a checkpoint, here or where the run is mirrored from."""
        index = self._index
        return {*self._due.steps, *(index.checkpoint_steps() if index else ())}

    def _is_missed(self, task: Task) -> bool:
        """Whether this server is to tell of it: nobody else has done it, or is at it, or told."""
        is_asked_for = any(each.name == task.preset.name for each in self._wanted.presets())
        if not is_asked_for or self._is_done(task) or self.claims.attempts(task).is_final:
            self._missed.forget(task)
            return False
        how, server = self.claims.ending(task)
        if how in ("gone", "missed"):
            self._missed.forget(task)
            return (how, server, self._index) == ("gone", self._server, None)
        try:
            claim = self.claims.take(task)
        except OSError:  # a full disk: told of later
            return False
        if claim is None:  # somebody is at it
            return False
        self._missed.forget(task)
        is_missed = not self._is_done(task)  # once more: from here on nobody else publishes it
        self.claims.end(claim, "missed" if is_missed else "released")
        return is_missed

    def _is_done(self, task: Task) -> bool:
        return self._due.results.has(task)


def _state(task: Task) -> object:
    return state_of_files(task.checkpoint, task.preset.weights)
