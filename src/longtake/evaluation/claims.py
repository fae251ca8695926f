"""Claims on tasks, attempts at them, and how a result is published; torch-free.

A claim is a lease for each task, whose files are the attempts at it. It ends as `done`, `failed`,
`damaged` (the checkpoint is not as it was saved), `gone` (it was deleted), `missed` (deleted before
anybody had begun) or `released`. A lease that did not end and has a successor was lost: its holder
died. Failed and lost ones count as attempts.
"""

import errno
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from longtake.errors import (
    CheckpointError,
    DataError,
    LongtakeError,
    ModelError,
    PlanError,
    RecipeError,
)
from longtake.evaluation.pending import (
    EvaluationTask,
    Progress,
    checkpoint_key,
    find_damage,
    preset_key,
)
from longtake.evaluation.presets import keep_preset
from longtake.evaluation_dir import Scores, all_servers
from longtake.fsio import write_json
from longtake.lease import Lease, Leases, history, kept
from longtake.process import Stopped, StopSignal
from longtake.run_dir import RunDirectory

AttemptEnding = Literal["done", "failed", "damaged", "gone", "released", "late"]

_SECONDS_BETWEEN_LOOKS = 1.0
_PAUSE_SECONDS = 600.0
"""How long a preset that does not fit the memory is left alone; others may use the memory now."""

_TaskName = tuple[Path, str]


class NotHereError(PlanError):
    """This machine lacks what a preset needs; other servers may have it."""


class Attempts(NamedTuple):
    """Earlier attempts at a task."""

    number: int
    is_final: bool
    """No server shall try again."""


class Claim(NamedTuple):
    """A task that this process works on."""

    task: EvaluationTask
    lease: Lease
    lost_by: str | None
    """The server that died over the task just before."""


@dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended.

    Attributes:
        how: `late`: another server has published the result, or has taken the task over.
        scores: of the result, if `done`.
        reason: why it failed, for people.
        is_final: no server shall try again.
        is_hopeless_here: this server shall not try other checkpoints with this preset.
        pause_seconds: not for so long; then it may be otherwise.
        facts: more for the record.
    """

    how: AttemptEnding
    scores: Scores | None = None
    reason: str = ""
    is_final: bool = False
    is_hopeless_here: bool = False
    pause_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Evaluate(Protocol):
    """Samples and measures a checkpoint that is whole and needed."""

    def __call__(self, task: EvaluationTask, folder: Path, progress: Progress) -> Scores:
        """Write a result's files, all but scores.json, to a folder.

        `progress` raises `Stopped` when the work is to be left; nothing may catch that.
        """


@dataclass(frozen=True)
class _Ending:
    lease: Lease
    how: str
    facts: Mapping[str, Any]


class Claims:
    """The claims of one server on the tasks of one run.

    Args:
        server: its name.
        lease_seconds: after so much silence, others take its work over.
        max_attempts: how often a task is tried.
        pause_seconds: how long a task rests after a failure, by this server's clock; after n
            failures, n times as long.
    """

    def __init__(
        self, server: str, lease_seconds: float, max_attempts: int, pause_seconds: float
    ) -> None:
        self._server, self._max, self._pause = server, max_attempts, pause_seconds
        self._seconds = lease_seconds
        self._leases: dict[str, Leases] = {}
        self._own_failures: dict[_TaskName, int] = {}
        self._rests: dict[_TaskName, tuple[int, float]] = {}
        self._unwritten: list[_Ending] = []
        self._paused_until = -math.inf

    @property
    def are_paused(self) -> bool:
        """Whether a claim could not be written a moment ago: no other is tried yet."""
        return time.monotonic() < self._paused_until

    def is_like(self, other: "Claims") -> bool:
        """Whether both have the same limits."""
        return (self._seconds, self._max) == (other._seconds, other._max)

    def attempts(self, task: EvaluationTask) -> Attempts:
        """Earlier attempts, including those that could not be written down."""
        found = count_attempts(history(task.claim_path), preset_key(task.preset))
        number = max(found.number, self._own_failures.get(_name(task), 0))
        return Attempts(number, found.is_final or number >= self._max)

    def ending(self, task: EvaluationTask) -> tuple[str | None, str | None]:
        """How the newest lease of a task ended, if it did, and whose it is, if there is one."""
        newest = next(iter(history(task.claim_path)[-1:]), {})
        return newest.get("ended"), newest.get("server")

    def rests(self, task: EvaluationTask) -> bool:
        """Whether a task that has failed is left alone for a while."""
        if not task.attempts:
            return False
        number, since = self._rests.get(_name(task), (0, 0.0))
        if number != task.attempts:
            since = time.monotonic()
            self._rests[_name(task)] = task.attempts, since
        return time.monotonic() - since < self._pause * task.attempts

    def take(self, task: EvaluationTask) -> Claim | None:
        """Claim a task; None if another server has it.

        What a dead server has written of the result is removed; its heartbeat is not, before this
        server needs the checkpoint.

        Raises:
            OSError: the claim cannot be written.
        """
        key = preset_key(task.preset)
        owner = {"server": self._server, "preset_key": key}
        leases = self._leases.setdefault(key, Leases(self._seconds, owner))
        try:
            lease = leases.take(task.claim_path)
        except OSError:
            self._paused_until = time.monotonic() + self._pause
            raise
        if lease is None:
            return None
        before = history(task.claim_path)[: lease.number]
        lost = before[-1] if before and before[-1].get("ended") is None else None
        if lost is not None:  # if its holder lives, it finds out soon
            folder = _partial_result_path(task, lease.number - 1, lost)
            shutil.rmtree(folder, ignore_errors=True)
        return Claim(task, lease, str(lost.get("server")) if lost else None)

    def end(self, claim: Claim, how: str, **facts: Any) -> None:
        """Give a claim back; if that cannot be written, `settle` tries again later."""
        if how == "failed":
            self._own_failures[_name(claim.task)] = claim.task.attempts + 1
        self._unwritten.append(_Ending(claim.lease, how, facts))
        self.settle()

    def settle(self) -> None:
        """Write down how claims ended, where that was not possible before."""
        for ending in list(self._unwritten):
            with suppress(OSError):
                ending.lease.end(ending.how, **ending.facts)
                self._unwritten.remove(ending)


def count_attempts(records: Sequence[Mapping[str, Any]], preset: str) -> Attempts:
    """Count the attempts among a lease's records, the first one first; pure.

    `preset`: the `preset_key` of what is to be sampled; attempts at another do not count.
    """
    counted = [
        record
        for number, record in enumerate(records)
        if record.get("preset_key") == preset
        and (
            record.get("ended") == "failed"
            or (record.get("ended") is None and number < len(records) - 1)
        )
    ]
    return Attempts(len(counted), any(record.get("final") for record in counted))


class TaskProgress:
    """Keeps the lease while work advances, and ends the work when it is to be left.

    Args:
        lease: of the task.
        stop: whether the server shall end.
        shown: what else receives progress.
    """

    def __init__(self, lease: Lease, stop: StopSignal, shown: Progress) -> None:
        self._lease, self._stop, self._shown = lease, stop, shown
        self._looked = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """See `Progress`.

        Raises:
            Stopped: the server shall end, or another server has taken the task over.
        """
        self._stop.check()
        self._lease.moved()
        self._shown(what, done, total)
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            if not self._lease.is_held:
                raise Stopped


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
        claim: the claim, which the caller gives back.
        needing: keeps the checkpoint from being deleted while it is entered; see `Keeper.needing`.
        evaluate: samples and measures.
        progress: what `evaluate` reports to.
        server: name of this server.
        stuck_seconds: work that makes no progress for so long loses its lease.
    """
    task, lease = claim.task, claim.lease
    try:
        with kept(lease, stuck_seconds), needing:
            forget_server(task.run, claim.lost_by, server)
            if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
                return AttemptOutcome("gone")
            found = find_damage(task.checkpoint, task.preset.weights, checksums=False)
            if found:
                return AttemptOutcome("damaged", reason=_damaged(task, found))
            if _is_published(task):
                return AttemptOutcome("late")
            with partial_result(task, lease) as folder:
                scores = evaluate(task, folder, progress)
                keep_preset(task.directory, task.preset)
                is_first = publish(task, lease, folder, scores)
        return AttemptOutcome("done", scores) if is_first else AttemptOutcome("late")
    except Stopped:
        return AttemptOutcome("released" if lease.is_held else "late")
    except Exception as error:  # whatever it is, the next checkpoint has a chance
        return _failed(task, lease, error)


def forget_server(run: RunDirectory, name: str | None, own_name: str) -> None:
    """Remove the heartbeat of a server that died over a task, and with it what that needs.

    If it lives, it writes its heartbeat again within a second.

    Args:
        run: of the task.
        name: what the lease says, which may be anything; None: no server died.
        own_name: of this server.
    """
    for server in all_servers(run):
        if server.name == name != own_name:
            server.remove_heartbeat()


def _is_published(task: EvaluationTask) -> bool:
    """Whether another server has published the result since this one looked."""
    scores = task.directory.scores(task.preset.name, task.step)
    return scores is not None and scores["key"] == task.key


def _failed(task: EvaluationTask, lease: Lease, error: Exception) -> AttemptOutcome:
    if not lease.is_held:  # another server has taken it over, and removed what this one wrote
        return AttemptOutcome("late")
    if not isinstance(error, LongtakeError | OSError):
        facts = {"traceback": "".join(traceback.format_exception(error))[-4000:]}
        reason = f"{type(error).__name__}: {error}"
        return AttemptOutcome("failed", reason=reason, facts=facts)
    if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return AttemptOutcome("gone")
    if isinstance(error, CheckpointError):
        found = find_damage(task.checkpoint, task.preset.weights, checksums=True)
        if found:
            return AttemptOutcome("damaged", reason=_damaged(task, found))
    is_of_the_disk = any(isinstance(each, OSError) for each in _causes(error))
    is_hopeless = isinstance(error, RecipeError | ModelError | DataError) and not is_of_the_disk
    may_pass = isinstance(error, PlanError) and not isinstance(error, NotHereError)
    return AttemptOutcome(
        "failed",
        reason=format_error(error),
        is_final=is_hopeless,
        is_hopeless_here=is_hopeless or isinstance(error, NotHereError),
        pause_seconds=_PAUSE_SECONDS if may_pass else 0.0,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def format_error(error: Exception) -> str:
    """The text of an error; of an OSError its path and reason, and what to do on a full disk."""
    if not isinstance(error, OSError):
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = " Make room: it is tried again." if full else ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}.{advice}"


def _damaged(task: EvaluationTask, found: str) -> str:
    return (
        f"{task.checkpoint} is not as it was saved: {found}. It is evaluated when its files change "
        "and are right."
    )


@contextmanager
def partial_result(task: EvaluationTask, lease: Lease) -> Iterator[Path]:
    """A folder beside the result's to write it to; removed at the end, unless it was published.

    Raises:
        OSError: it cannot be made.
    """
    folder = _partial_result_path(task, lease.number, lease.record)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(task: EvaluationTask, lease: Lease, folder: Path, scores: Scores) -> bool:
    """Write scores.json and rename a result into place.

    A result of other weights of that step is set aside, if the checkpoint still has these weights.

    Returns:
        False if another server was first, or has taken the task over.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / "scores.json", scores)
    _sync_files(folder)
    if not lease.is_held or not _make_way(task):
        return False
    try:  # onto a folder with files in it, it fails
        folder.rename(task.directory.result_path(task.preset.name, task.step))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _make_way(task: EvaluationTask) -> bool:
    """Set a result of other weights aside; whether there is no result in the way any more."""
    whole = task.directory.result_path(task.preset.name, task.step)
    if not whole.exists():
        return True
    scores = task.directory.scores(task.preset.name, task.step)
    known = scores["key"] if scores else "unknown"
    if known == task.key or checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return False
    aside = task.directory.superseded_path(task.preset.name, task.step, known)
    aside.parent.mkdir(parents=True, exist_ok=True)
    others = (aside.with_name(f"{aside.name}-{number}") for number in count(2))
    try:
        whole.rename(next(each for each in chain([aside], others) if not each.exists()))
    except FileNotFoundError:  # another server did it
        return not whole.exists()
    return True


def _partial_result_path(task: EvaluationTask, number: int, record: Mapping[str, Any]) -> Path:
    """Where the holder of a lease writes the result; no other process does."""
    whole = task.directory.result_path(task.preset.name, task.step)
    server = re.sub(r"[^\w.-]", "-", str(record.get("server")))[:100]  # others may have written it
    return whole.with_name(f".{whole.name}.{server}-{task.key}-{number}.partial")


def _sync_files(folder: Path) -> None:
    """Flush files to disk: a machine that loses its power leaves no result with empty files."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _name(task: EvaluationTask) -> _TaskName:
    return task.claim_path, preset_key(task.preset)
