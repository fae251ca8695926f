"""Evaluation tasks, claims on them, attempts at them, and publishing of results; without torch.

A claim says that one process samples and measures a task; it is a lease, whose files record the
attempts. It ends as `done`, `failed`, `damaged`, `gone` (the checkpoint was deleted), `missed`
(before any attempt) or `released`. A lease that has a successor but no end was lost, since its
holder died; that counts as an attempt.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from longtake import errors, fsio, process
from longtake.checkpoint import files
from longtake.evaluation_dir import EvaluationDirectory, Scores, all_servers
from longtake.lease import Lease, Leases, history, kept
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Preset, keep_preset

Progress = Callable[[str, int, int], None]
"""A function that is told the progress of an evaluation: the name of the present work, the amount
of it that is done, and the total."""
AttemptEnding = Literal["done", "failed", "damaged", "gone", "released", "late"]

_LEASE_CHECK_SECONDS = 1.0
_OUT_OF_MEMORY_PAUSE_SECONDS = 600.0
"""Seconds for which a preset is not tried again here after it did not fit the memory, which another
process may have used."""
_MAX_TRACEBACK_LETTERS = 4000


def own_name() -> str:
    """Return this process's name as an evaluator: an evaluation server, or rank 0 of a training."""
    return f"{socket.gethostname()}-{os.getpid()}"


START = "start"
"""Key of the weights with which a run began."""
_START_FOLDER = "step_00000000"


@dataclass(frozen=True)
class EvaluationTask:
    """An evaluation to do: a checkpoint to sample and measure with a preset (prompts, settings)."""

    run: RunDirectory
    preset: Preset
    step: int
    key: str  # of the weights: see `checkpoint_key`
    attempts: int = 0  # failed attempts
    waited_seconds: float = 0.0  # since this server first saw the task

    @property
    def checkpoint(self) -> Path:
        return self.run.checkpoint_path(self.step)

    @property
    def directory(self) -> EvaluationDirectory:
        return EvaluationDirectory(self.run)

    @property
    def claim_path(self) -> Path:
        return self.directory.claim_path(self.preset.name, self.step, self.key)

    @property
    def facts(self) -> dict[str, str | int]:
        return {"preset": self.preset.name, "step": self.step, "key": self.key}

    def __str__(self) -> str:
        return f"{self.run.path}: {self.preset.name} of step {self.step}"


def preset_key(preset: Preset) -> str:
    return _digest(json.dumps(preset.as_record(), sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class CommittedWeights:
    """Keys of the weights that a checkpoint has, as its file COMMITTED lists them."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """`checkpoint_key` of each part of the weights (`model`, or `ema/` and the name of a
    profile)."""
    is_there: bool = True  # true if COMMITTED exists
    unreadable: str | None = None  # reason for which COMMITTED cannot be read

    @classmethod
    def read(cls, path: Path) -> "CommittedWeights":
        """Read a checkpoint's COMMITTED, even if no other file of the checkpoint exists."""
        try:
            listed = files.read_committed(path.parent)
        except FileNotFoundError:
            return cls(is_there=False)
        except errors.RecordError as error:
            return cls(unreadable=error.reason)
        except OSError as error:
            return cls(unreadable=f"{error.strerror or error}")
        # From the checksums and not from the step: after a rollback a step is saved again with
        # other weights, which are evaluated again.
        sums: dict[str, list[str]] = defaultdict(list)
        for name, entry in sorted(listed.items()):
            part, _, rest = name.partition("/")
            weights = f"ema/{rest.partition('/')[0]}" if part == "ema" else part
            sums[weights].append(entry["xxh3_64"])
        return cls({weights: _digest("\n".join(each)) for weights, each in sums.items()})


def checkpoint_key(checkpoint: Path, weights: str) -> str | None:
    """Return a key of a checkpoint's weights: 8 hex digits over their files' checksums.

    None if COMMITTED cannot be read, or lists no such weights. A run's start, of which there is no
    checkpoint, has one key: it never changes.
    """
    if _is_start(checkpoint):
        return START
    return CommittedWeights.read(checkpoint / "COMMITTED").keys.get(weights)


def find_damage(checkpoint: Path, weights: str, *, checksums: bool) -> str | None:
    if _is_start(checkpoint):
        return None
    parts = (f"{weights}/", "trainer.json")
    damages = (files.find_damage(checkpoint, checksums=checksums, within=part) for part in parts)
    return next((each for each in damages if each), None)


def _is_start(checkpoint: Path) -> bool:
    return checkpoint.name == _START_FOLDER and not checkpoint.exists()


class NotHereError(errors.PlanError):
    """Raised if a preset needs what this machine lacks; another evaluation server may have it."""


class Attempts(NamedTuple):
    """Number of failed attempts at an evaluation, and whether anyone may try again."""

    number: int
    is_final: bool  # true if no server may try again


class Claim(NamedTuple):
    """An evaluation task that this process has reserved for itself by a lease."""

    task: EvaluationTask
    lease: Lease
    lost_by: str | None  # name of the server that died as the last holder; None: none did


@dataclass(frozen=True)
class AttemptOutcome:
    """The result of an attempt at an evaluation task."""

    how: AttemptEnding
    """How the attempt ended; `late`: another server has published the result, or taken the task
    over."""
    scores: Scores | None = None  # of the result, if `done`
    reason: str = ""  # of a failure, as text
    is_final: bool = False  # true if no server may try again
    is_hopeless_here: bool = False  # true if it must not try the preset here again
    pause_seconds: float = 0.0  # for which this server must not try the preset
    facts: dict[str, Any] = field(default_factory=dict)  # further fields for the record


class Evaluate(Protocol):
    """Function that samples and measures a checkpoint; nothing deletes the checkpoint meanwhile."""

    def __call__(self, task: EvaluationTask, folder: Path, progress: Progress) -> Scores:
        """Write an evaluation's files except scores.json to a folder, and return the scores.

        `progress` raises `Stopped` to abandon the work; the error must not be caught.
        """


class Claims:
    """Reserves the evaluation tasks of one run for one server or training process.

    Args:
        server: name of the server.
        lease_seconds: time without a sign of life after which others take its tasks over.
        max_attempts: number of attempts at each task.
        pause_seconds: pause between two attempts at a task, times the number of failures.
    """

    def __init__(
        self, server: str, lease_seconds: float, max_attempts: int, pause_seconds: float
    ) -> None:
        self._server, self._seconds = server, lease_seconds
        self._max, self._pause = max_attempts, pause_seconds
        self._leases: dict[str, Leases] = {}
        self._own_failures: dict[tuple[Path, str], int] = {}
        self._rests: dict[tuple[Path, str], tuple[int, float]] = {}
        self._unwritten: list[Callable[[], None]] = []
        self._paused_until = -math.inf

    @property
    def are_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def attempts(self, task: EvaluationTask) -> Attempts:
        """Count the failed or lost attempts at an evaluation task, from its lease's records."""
        # A server that died wrote no count of attempts: the files of the lease are the record.
        records = history(task.claim_path)
        # The newest record without an end is of an attempt that goes on.
        lost = [record for record in records[:-1] if record.get("ended") is None]
        failed = [record for record in records if record.get("ended") == "failed"]
        key = preset_key(task.preset)
        counted = [record for record in (*lost, *failed) if record.get("preset_key") == key]
        # Endings that could not be written yet count, too.
        number = max(len(counted), self._own_failures.get(_name(task), 0))
        is_final = any(record.get("final") for record in counted)
        return Attempts(number, is_final or number >= self._max)

    def ending(self, task: EvaluationTask) -> tuple[str | None, str | None]:
        record = next(iter(history(task.claim_path)[-1:]), {})
        return record.get("ended"), record.get("server")

    def rests(self, task: EvaluationTask) -> bool:
        """Return true during the pause in which a failed evaluation must not be tried again."""
        if not task.attempts:
            return False
        number, since = self._rests.get(_name(task), (0, 0.0))
        # Each further failure starts a longer pause.
        if number != task.attempts:
            since = time.monotonic()
            self._rests[_name(task)] = task.attempts, since
        return time.monotonic() - since < self._pause * task.attempts

    def take(self, task: EvaluationTask) -> Claim | None:
        """Reserve an evaluation task for this process; None if another server holds it.

        The unfinished result of a dead server is removed; its heartbeat stays until this server
        needs the checkpoint (see `forget_server`).

        Raises:
            OSError: the claim cannot be written.
        """
        key = preset_key(task.preset)
        owner = {"server": self._server, "preset_key": key}
        leases = self._leases.setdefault(key, Leases(self._seconds, owner))
        try:
            lease = leases.take(task.claim_path)
        except OSError:
            # A disk that takes no claim would otherwise be tried in a loop.
            self._paused_until = time.monotonic() + self._pause
            raise
        if lease is None:
            return None
        before = history(task.claim_path)[: lease.number]
        lost = before[-1] if before and before[-1].get("ended") is None else None
        if lost is not None:  # a holder that is alive will soon notice the loss
            folder = _partial_result_path(task, lease.number - 1, lost)
            shutil.rmtree(folder, ignore_errors=True)
        return Claim(task, lease, str(lost.get("server")) if lost else None)

    def end(self, claim: Claim, how: str, **facts: Any) -> None:
        """Record how work on a claimed task ended; if that fails, a later `settle` does it."""
        # Counted here too: a full disk must not turn a failure into endless attempts.
        if how == "failed":
            self._own_failures[_name(claim.task)] = claim.task.attempts + 1
        self._unwritten.append(partial(claim.lease.end, how, **facts))
        self.settle()

    def settle(self) -> None:
        """Record the endings of claimed tasks that could not be written before."""
        for write_ending in list(self._unwritten):
            with suppress(OSError):
                write_ending()
                self._unwritten.remove(write_ending)


class TaskProgress:
    """Progress callback of an evaluation: renews its lease, and stops the work on request."""

    def __init__(self, lease: Lease, stop: process.StopSignal, shown: Progress) -> None:
        self._lease, self._stop, self._shown = lease, stop, shown
        self._checked_at = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report the progress of an evaluation, as `Progress` does.

        Raises:
            Stopped: the server must end, or another server has taken the task over.
        """
        self._stop.check()
        self._lease.moved()
        self._shown(what, done, total)
        if time.monotonic() - self._checked_at > _LEASE_CHECK_SECONDS:
            self._checked_at = time.monotonic()
            if not self._lease.is_held:
                raise process.Stopped


def attempt(
    claim: Claim,
    needing: AbstractContextManager[None],
    evaluate: Evaluate,
    progress: TaskProgress,
    server: str,
    stuck_seconds: float,
) -> AttemptOutcome:
    """Evaluate a checkpoint that this process has claimed; never raises.

    Args:
        claim: claim on the task; the caller ends it.
        needing: context in which the checkpoint is not deleted.
        evaluate: samples and measures.
        progress: passed to `evaluate`.
        server: name of this server.
        stuck_seconds: time without progress after which the lease is lost.
    """
    task, lease = claim.task, claim.lease
    try:
        with kept(lease, stuck_seconds), needing:
            forget_server(task.run, claim.lost_by, server)
            if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
                return AttemptOutcome("gone")
            damage = find_damage(task.checkpoint, task.preset.weights, checksums=False)
            if damage:
                return AttemptOutcome("damaged", reason=_damaged(task, damage))
            # Another server may have published while this one waited for the claim.
            known = task.directory.scores(task.preset.name, task.step)
            if known is not None and known["key"] == task.key:
                return AttemptOutcome("late")
            with partial_result(task, lease) as folder:
                scores = evaluate(task, folder, progress)
                keep_preset(task.directory, task.preset)
                is_first = publish(task, lease, folder, scores)
        return AttemptOutcome("done", scores) if is_first else AttemptOutcome("late")
    except process.Stopped:
        return AttemptOutcome("released" if lease.is_held else "late")
    except Exception as error:  # a defect must not prevent other evaluations
        return _failed(task, lease, error)


def forget_server(run: RunDirectory, name: str | None, own: str) -> None:
    """Remove the heartbeat of a dead evaluation server, so that its checkpoints may be deleted.

    A server that is alive writes its heartbeat again within a second. `name` comes from a lease,
    which may contain any text; None: no server died.
    """
    # Compared with known servers, and never used as a path.
    for server in all_servers(run):
        if server.name == name != own:
            server.remove_heartbeat()


def _failed(task: EvaluationTask, lease: Lease, error: Exception) -> AttemptOutcome:
    if not lease.is_held:  # another server took it over, and removed this one's files
        return AttemptOutcome("late")
    if not isinstance(error, errors.LongtakeError | OSError):
        facts = {"traceback": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK_LETTERS:]}
        reason = f"{type(error).__name__}: {error}"
        return AttemptOutcome("failed", reason=reason, facts=facts)
    if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return AttemptOutcome("gone")
    if isinstance(error, errors.CheckpointError):
        # Loading has verified all bytes. Damage is looked for again, in case the disk has misread
        # once; after another error, such as other weights, only missing files are looked for.
        reads = isinstance(error, files.DamagedCheckpointError)
        damage = find_damage(task.checkpoint, task.preset.weights, checksums=reads)
        if damage:
            return AttemptOutcome("damaged", reason=_damaged(task, damage))
    is_hopeless = isinstance(error, errors.RecipeError | errors.ModelError | errors.DataError)
    # A disk error behind another error may pass, so that error is not final.
    cause: BaseException | None = error
    while cause is not None:
        is_hopeless &= not isinstance(cause, OSError)
        cause = cause.__cause__
    may_pass = isinstance(error, errors.PlanError) and not isinstance(error, NotHereError)
    return AttemptOutcome(
        "failed",
        reason=format_error(error),
        is_final=is_hopeless,
        is_hopeless_here=is_hopeless or isinstance(error, NotHereError),
        pause_seconds=_OUT_OF_MEMORY_PAUSE_SECONDS if may_pass else 0.0,
    )


def format_error(error: Exception) -> str:
    """Return an error's text; for an OSError its path, its reason, and advice for a full disk."""
    if not isinstance(error, OSError):
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = " Make room: it is tried again." if full else ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}.{advice}"


def _damaged(task: EvaluationTask, damage: str) -> str:
    return (
        f"{task.checkpoint} is not as it was saved: {damage}. It is evaluated when its files "
        "change and are right."
    )


@contextmanager
def partial_result(task: EvaluationTask, lease: Lease) -> Iterator[Path]:
    """Create a folder for an evaluation's result; it is removed again unless it is published."""
    folder = _partial_result_path(task, lease.number, lease.record)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(task: EvaluationTask, lease: Lease, folder: Path, scores: Scores) -> bool:
    """Write scores.json, and rename an evaluation's folder to its final name; false if too late.

    A result of other weights of that step is moved to superseded/, provided that the checkpoint
    still has the task's weights.
    """
    fsio.write_json(folder / "scores.json", scores)
    for path in folder.iterdir():  # else a power loss could leave published files empty
        with path.open("rb") as file:
            os.fsync(file)
    # The lease may have been lost during a long evaluation.
    if not lease.is_held or not _make_way(task):
        return False
    try:  # fails if the target has files in it
        folder.rename(task.directory.result_path(task.preset.name, task.step))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _make_way(task: EvaluationTask) -> bool:
    """Move a result of other weights out of the way; return true if this result's path is free."""
    whole = task.directory.result_path(task.preset.name, task.step)
    if not whole.exists():
        return True
    scores = task.directory.scores(task.preset.name, task.step)
    known = scores["key"] if scores else "unknown"
    if known == task.key or checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return False
    # A run that rolled back saves the step again: the older result stays beside the new one.
    aside = task.directory.superseded_path(task.preset.name, task.step, known)
    aside.parent.mkdir(parents=True, exist_ok=True)
    others = (aside.with_name(f"{aside.name}-{number}") for number in count(2))
    try:
        whole.rename(next(each for each in chain([aside], others) if not each.exists()))
    except FileNotFoundError:  # another server moved it
        return not whole.exists()
    return True


def _partial_result_path(task: EvaluationTask, number: int, record: Mapping[str, Any]) -> Path:
    whole = task.directory.result_path(task.preset.name, task.step)
    # Server and number of the lease are in the name: a holder that has lost its lease without
    # noticing (a stopped process, a hanging disk) never writes into its successor's folder.
    server = re.sub(r"[^\w.-]", "-", str(record.get("server")))[:100]  # others may have written it
    return whole.with_name(f".{whole.name}.{server}-{task.key}-{number}.partial")


def _name(task: EvaluationTask) -> tuple[Path, str]:
    return task.claim_path, preset_key(task.preset)
