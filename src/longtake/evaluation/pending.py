"""The pending evaluations of a run: checkpoints that a preset has not sampled yet; torch-free.

pending = committed checkpoints x presets - results of the same weights - given up. It is computed
from the run directory at each look, so that servers can be killed and started at any time.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from longtake import errors, fsio
from longtake.config import EvaluationSection
from longtake.evaluation.options import ServerOptions, ServerReport
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory, ServerEventKind
from longtake.run_dir import BEGINNINGS, RunDirectory
from longtake.sampling.claims import Claims, CommittedWeights, EvaluationTask, find_damage
from longtake.sampling.presets import Preset, find_preset, keep_preset, preset_names
from longtake.trust import TrustError, is_mirror

_T = TypeVar("_T")

_COMMITTED = "COMMITTED"
_ARRIVING_SECONDS = 15.0
"""Seconds without a change after which a checkpoint's files are not being copied any more."""
_SECONDS_UNTIL_READ_AGAIN = 15.0
_MISSED_ADVICE = (
    "Training saves faster than this evaluates. Raise checkpoint.keep or evaluation.hold_waiting, "
    "start more servers, or take --backlog newest."
)


def target_version(path: Path) -> fsio.FileVersion | None:
    """Return the version of a file, or of a link's target; None if the file does not exist."""
    with suppress(OSError):
        return fsio.version_of(path.stat())
    return None


class StatCache:
    """Cache of values read from files, each kept until its file changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[fsio.FileVersion | None, Any]] = {}

    def get(self, path: Path, read: Callable[[Path], _T]) -> _T:
        """Return `read(path)`, cached until the file at `path` changes, which need not exist."""
        # The version is taken before the content is read: a file that changes in between is then
        # read again at the next look, and not missed.
        now, known = target_version(path), self._known.get(path)
        if known is None or known[0] != now:
            known = self._known[path] = now, read(path)
        return cast("_T", known[1])

    def forget(self, path: Path) -> None:
        self._known.pop(path, None)

    def keep_only(self, folders: Collection[str]) -> None:
        """Forget the values of all files except those in folders with these names."""
        known = self._known.items()
        self._known = {path: x for path, x in known if not set(folders).isdisjoint(path.parts)}


class RunEnd:
    """Tells whether a run has ended and was not resumed; no event is read twice."""

    def __init__(self, run: RunDirectory) -> None:
        self._events: fsio.Tail[dict[str, Any]] = fsio.Tail(run.events_path, dict[str, Any])
        self._newest: str | None = None

    def is_reached(self) -> bool:
        """Return whether the run's newest event of beginning or ending is an end."""
        events = self._events.read()
        # The file was replaced: what was read of the old one does not count.
        if self._events.has_restarted:
            self._newest = None
        for event in events:
            if event.get("event") in (*BEGINNINGS, "finished", "diverged"):
                self._newest = event["event"]
        return self._newest in ("finished", "diverged")


class WantedPresets:
    """The presets (sets of prompts) of a run that its recipe and the server's options ask for."""

    def __init__(self, run: RunDirectory, options: ServerOptions, report: ServerReport) -> None:
        self._run, self._options, self._report = run, options, report
        self.section = EvaluationSection()
        self._found: list[Preset] = []
        self._refused: dict[str, float] = {}
        self._read_from: tuple[fsio.FileVersion | None, ...] | None = None
        self._read_again_at = math.inf

    def now(self) -> list[Preset]:
        now = time.monotonic()
        return [each for each in self._found if self._refused.get(each.name, 0.0) <= now]

    def refuse(self, preset: Preset, seconds: float = math.inf) -> None:
        self._refused[preset.name] = time.monotonic() + seconds

    def read(self) -> None:
        """Read the wanted presets again if the recipe or a file of presets has changed.

        After an error they are read again now and then, as a missing file may have appeared.
        """
        own = self._options.own_presets
        files = (self._run.recipe_path, *filter(None, (own, self._options.recipe)))
        now = tuple(map(target_version, files))
        if now == self._read_from and time.monotonic() < self._read_again_at:
            return
        # A changed recipe may be without the reason for which a preset was refused.
        if now != self._read_from:
            self._refused.clear()
        self._read_from, self._read_again_at, self._found = now, math.inf, []
        try:
            self._options.refuse_foreign_code(self._run)
            recipe, directory = self._options.recipe_of(self._run), EvaluationDirectory(self._run)
            self.section = recipe.evaluation
            for name in preset_names(recipe, self._options.presets, self._run.path, own):
                try:
                    preset = find_preset(recipe, name, self._run.path, own)
                    if directory.preset_path(preset.name).exists():
                        keep_preset(directory, preset)  # refuses one that differs from the results'
                    self._found.append(preset)
                except errors.LongtakeError as error:
                    self._report_wrong(error)
        except TrustError as error:
            self._report.untrusted = error
            self._report_wrong(error)
        except errors.LongtakeError as error:
            self._report_wrong(error)
        except Exception:
            self._read_again_at = time.monotonic() + _SECONDS_UNTIL_READ_AGAIN
            raise

    def _report_wrong(self, error: errors.LongtakeError) -> None:
        self._report.wrong(f"{self._run.path}: {error}")
        self._read_again_at = time.monotonic() + _SECONDS_UNTIL_READ_AGAIN


class PendingTasks:
    """The pending tasks of a run (checkpoints to sample), read from its directory; for any thread.

    A file is read again only if it has changed. Only what no file tells is kept in memory: damage
    that a task has found, for how long something waits, and tasks whose checkpoints may be deleted.
    """

    def __init__(
        self, run: RunDirectory, server: str, options: ServerOptions, report: ServerReport
    ) -> None:
        self.run, self._options, self._report = run, options, report
        self.directory, self.end = ServerDirectory(run, server), RunEnd(run)
        self.presets = WantedPresets(run, options, report)
        self.is_mirror = is_mirror(run.path)  # a mirror's note is written before its recipe
        seconds, attempts = options.lease_seconds, options.max_attempts
        self.claims = Claims(server, seconds, attempts, options.pause_seconds)
        self._lock = threading.RLock()
        self._cache = StatCache()
        self._first_seen: dict[tuple[object, ...], float] = {}  # when looks began to see a thing
        self._seen: dict[tuple[object, ...], float] = {}  # the same, of the present look alone
        self._here: set[int] = set()  # steps of checkpoints at the last look
        self._at_source: set[int] | None = None  # steps at the source; None without one
        self._damaged: dict[tuple[int, str], object] = {}
        self._awaited: dict[tuple[str, int], EvaluationTask] = {}

    def look(self, source: RunDirectory | None = None) -> list[EvaluationTask]:
        """Return the pending tasks (checkpoint and preset) in the order of their evaluation.

        With `source`, an index: tasks of the source's checkpoints, which may not be here yet.
        """
        with self._lock:
            self.presets.read()
            committed = self._committed(self.run)
            self._here = set(committed)
            if source is not None:
                committed = self._committed(source)
                self._at_source = set(committed)
            is_sparse = self._options.backlog.every not in (None, 1)
            # The newest checkpoint is wanted even between multiples, once no later one can come.
            with_last = is_sparse and (not self._options.follows or self.end.is_reached())
            tasks = [
                task
                for preset in self.presets.now()
                for task in self._pending(preset, committed, source, with_last=with_last)
            ]
            # Tasks are remembered until they are done or their checkpoints are gone. Those later
            # than all checkpoints are forgotten: the run went back and deleted these.
            every, newest = self._options.backlog.every, max(self._there(), default=0)
            wanted = [task for task in tasks if every and task.step % every == 0]
            self._awaited |= {(task.preset.name, task.step): task for task in wanted}
            self._awaited = {name: t for name, t in self._awaited.items() if t.step <= newest}
            self._first_seen, self._seen = self._seen, {}
            # A server runs for weeks: what it knows of deleted checkpoints has to go.
            steps = {*self.run.checkpoint_folders(), *self._there()}
            self._cache.keep_only({self.run.checkpoint_path(step).name for step in steps})
        return sorted(tasks, key=lambda task: task.step)  # stable: presets in their order

    def log(self, event: ServerEventKind, /, **facts: Any) -> None:
        with suppress(OSError):
            self.directory.append_event(event, **facts)

    def report_missed(self, **facts: Any) -> None:
        """Report tasks whose checkpoints were deleted before any server evaluated them.

        Each is reported once, by one server; none is if only the newest checkpoints are wanted.
        """
        with self._lock:
            there = self._there()
            gone = [task for task in self._awaited.values() if task.step not in there]
            missed = [t for t in gone if not _is_being_deleted(t.checkpoint) and self._is_missed(t)]
        for task in missed:
            self.log("evaluation_missed", **task.facts, **facts)
        steps: dict[str, list[str]] = defaultdict(list)
        for task in missed:
            steps[task.preset.name].append(str(task.step))
        if missed:
            which = "; ".join(f"{name} of step {', '.join(each)}" for name, each in steps.items())
            self._report.remark(
                f"{self.run.path}: deleted before it was evaluated: {which}. {_MISSED_ADVICE}"
            )

    def rests(self, task: EvaluationTask) -> bool:
        waits = self.claims.rests(task) or self.claims.are_paused
        return (self._options.follows and waits) or self.is_damaged(task)

    def is_damaged(self, task: EvaluationTask) -> bool:
        known = self._damaged.get((task.step, task.preset.weights))
        return known is not None and known == _signatures(task)

    def note_damage(self, task: EvaluationTask) -> None:
        self._damaged[task.step, task.preset.weights] = _signatures(task)

    def is_done(self, task: EvaluationTask) -> bool:
        """Return whether the preset has a result of the weights of the task."""

        def read_key(path: Path) -> str | None:
            scores = task.directory.scores(task.preset.name, task.step) if path.exists() else None
            return None if scores is None else scores["key"]

        folder = task.directory.result_path(task.preset.name, task.step)
        return self._cache.get(folder / "scores.json", read_key) == task.key

    def _committed(self, run: RunDirectory) -> dict[int, CommittedWeights]:
        """Return the weights that a run's committed checkpoints have, by step.

        A checkpoint whose file COMMITTED cannot be read has no keys of weights.
        """
        committed = {}
        for step in sorted(run.checkpoint_folders()):
            path = run.checkpoint_path(step) / _COMMITTED
            weights = self._cache.get(path, CommittedWeights.read)
            if weights.unreadable:
                # Errors of a network disk pass without a change of the file.
                self._cache.forget(path)
                if run == self.run and self._lasts(step, _COMMITTED, weights.unreadable):
                    self._report.wrong(
                        f"{path} cannot be read: {weights.unreadable}. Evaluated is what has one."
                    )
            if weights.is_there:
                committed[step] = weights
        return committed

    def _pending(
        self,
        preset: Preset,
        committed: Mapping[int, CommittedWeights],
        source: RunDirectory | None,
        *,
        with_last: bool,
    ) -> Iterator[EvaluationTask]:
        """Yield tasks of one preset (a checkpoint each) that are neither done nor given up."""
        tasks = {
            step: EvaluationTask(self.run, preset, step, key)
            for step, weights in committed.items()
            if (key := weights.keys.get(preset.weights)) is not None
        }
        if source is None:
            tasks = {step: task for step, task in tasks.items() if self._is_whole(task)}
        for step in self._options.backlog.choose(list(tasks), with_last=with_last):
            task = tasks[step]
            if self.is_done(task):
                continue
            attempts = self.claims.attempts(task)
            if not attempts.is_final:
                waited = self._seconds_seen(preset.name, step, task.key)
                yield replace(task, attempts=attempts.number, waited_seconds=waited)

    def _is_whole(self, task: EvaluationTask) -> bool:
        """Return whether a task's checkpoint has all its files; it may still be being copied."""
        weights = task.preset.weights
        folder = task.checkpoint / weights

        def find(_: Path) -> str | None:
            return find_damage(task.checkpoint, weights, checksums=False)

        if (damage := self._cache.get(folder, find)) is None:
            return True
        # A file that is still being copied grows without a change of the folder's own version.
        self._cache.forget(folder)
        if self._lasts(task.step, weights, damage):
            self._report.wrong(
                f"{task.checkpoint} is not whole: {damage}. It is evaluated when it is."
            )
        return False

    def _lasts(self, step: int, part: str, problem: str) -> bool:
        """Return whether a checkpoint's problem lasts, so that it is damaged and not being copied.

        A problem lasts if no file changes any more, or if the server does not wait.
        """
        seconds = self._seconds_seen(step, part, problem)
        return not self._options.follows or seconds > _ARRIVING_SECONDS

    def _seconds_seen(self, *thing: object) -> float:
        """Return the seconds for which all looks at the run, up to now, have seen a thing."""
        now = time.monotonic()
        return now - self._seen.setdefault(thing, self._first_seen.get(thing, now))

    def _there(self) -> set[int]:
        return self._here | (self._at_source or set())

    def _is_missed(self, task: EvaluationTask) -> bool:
        """Return whether to report a task whose checkpoint is lost: no server did or claimed it."""
        name = task.preset.name, task.step
        is_wanted = any(each.name == task.preset.name for each in self.presets.now())
        if not is_wanted or self.is_done(task) or self.claims.attempts(task).is_final:
            del self._awaited[name]
            return False
        how, server = self.claims.ending(task)
        # `missed`: another server has reported it. `gone`: a server came too late, and that one
        # reports it.
        if how in ("gone", "missed"):
            del self._awaited[name]
            return (how, server, self._at_source) == ("gone", self.directory.name, None)
        try:
            # Claimed first: only one server then reports it, and none that still works on it
            # is disturbed.
            claim = self.claims.take(task)
        except OSError:  # a full disk: reported later
            return False
        if claim is None:  # another server works on it
            return False
        del self._awaited[name]
        is_missed = not self.is_done(task)  # again: now that it is claimed, no other can publish it
        self.claims.end(claim, "missed" if is_missed else "released")
        return is_missed


def waiting_steps(
    pending: PendingTasks, tasks: Sequence[EvaluationTask], needed: Collection[int]
) -> set[int]:
    """Return a run's oldest steps that wait to be sampled, up to the recipe's limit.

    Steps that are being sampled are added: this server's, as it needs them again after a failure;
    and another server's, if this one needed them before, because a server that has just claimed a
    checkpoint may not need it yet.
    """
    limit = pending.presets.section.hold_waiting
    waiting: set[int] = set()
    sampled: set[int] = set()
    for task in tasks:
        is_full = len(waiting) >= limit and task.step not in waiting
        if (is_full and task.step not in needed) or pending.is_damaged(task):
            continue
        how, server = pending.claims.ending(task)
        if server is not None and how is None:
            is_own = server == pending.directory.name
            sampled |= {task.step} if is_own or task.step in needed else set()
        elif not is_full:
            waiting.add(task.step)
    return waiting | sampled


def _signatures(task: EvaluationTask) -> object:
    folder = task.checkpoint
    files = sorted((folder / task.preset.weights).rglob("*"))
    return tuple(map(target_version, (folder / _COMMITTED, folder / "trainer.json", *files)))


def _is_being_deleted(checkpoint: Path) -> bool:
    """Return whether the deletion of a checkpoint has begun and may yet be undone.

    See `checkpoint.files`.
    """
    with suppress(OSError):
        hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
        return hidden.exists() or checkpoint.exists()
    return True
