"""One attempt at one checkpoint: need it, look again, sample and measure, publish; torch-free."""

import errno
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from longtake.errors import (
    CheckpointError,
    DataError,
    LongtakeError,
    ModelError,
    PlanError,
    RecipeError,
)
from longtake.evaluation.presets.preset import keep_preset
from longtake.evaluation.server.checkpoints import checkpoint_key, damage
from longtake.evaluation.server.claims import Claim
from longtake.evaluation.server.keeper import Keeper
from longtake.evaluation.server.publish import publish, result_aside
from longtake.evaluation.server.stop import Stop, Stopped
from longtake.evaluation.server.task import Task, Tick
from longtake.evaluation_dir import Scores, all_servers
from longtake.lease import Lease, kept
from longtake.run_dir import RunDirectory

How = Literal["done", "failed", "damaged", "gone", "released", "late"]
_SECONDS_BETWEEN_LOOKS = 1.0
_PAUSE_SECONDS = 600.0
"""For so long a preset rests that does not fit the memory, which others may use just now."""


class Work(Protocol):
    """What is done with a checkpoint that is whole and needed."""

    def __call__(self, task: Task, folder: Path, tick: Tick) -> Scores:
        """Write a result's files (all but scores.json) to a folder, and judge them.

        `tick` raises `Stopped` when the work is to be left; nothing may catch that.
        """


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        how: `late`: somebody else has published the same, or has taken it over.
        scores: where it is done.
        reason: why it failed, for people.
        is_final: nobody need try again.
        is_hopeless_here: this server need not try other checkpoints with this preset.
        pause_seconds: for so long it need not; then it may be otherwise.
        facts: more for the record.
    """

    how: How
    scores: Scores | None = None
    reason: str = ""
    is_final: bool = False
    is_hopeless_here: bool = False
    pause_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class NotHereError(PlanError):
    """This machine lacks what a preset needs: nobody need wait for that, but others may have it."""


class Pace:
    """Tells everyone that the work goes on, and the work when it is to be left.

    Args:
        lease: of the work.
        stop: whether the server shall end.
        shown: what else is told of progress.
    """

    def __init__(self, lease: Lease, stop: Stop, shown: Tick) -> None:
        self._lease, self._stop, self._shown = lease, stop, shown
        self._looked = time.monotonic()

    def __call__(self, what: str, done: int, of: int) -> None:
        """See `Tick`."""
        if self._stop.wanted:
            raise Stopped
        self._lease.moved()
        self._shown(what, done, of)
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            if not self._lease.is_held:
                raise Stopped


def attempt(
    claim: Claim, keeper: Keeper, work: Work, stop: Stop, shown: Tick, stuck_seconds: float
) -> Outcome:
    """Evaluate a checkpoint that this process has claimed; never raises.

    Args:
        claim: the claim, which the caller gives back.
        keeper: of this server.
        work: what is done with the checkpoint.
        stop: whether the server shall end.
        shown: what is told of progress.
        stuck_seconds: a work that does not go on for so long is lost.
    """
    task, lease = claim.task, claim.lease
    try:
        with kept(lease, stuck_seconds), keeper.needing(task):
            forget_server(task.run, claim.lost_by, keeper.server)
            missing = _missing(task)
            return missing or _evaluate(task, lease, work, Pace(lease, stop, shown))
    except Stopped:
        return Outcome("released" if lease.is_held else "late")
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


def _missing(task: Task) -> Outcome | None:
    """What happened to the checkpoint before it was needed."""
    if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return Outcome("gone")
    found = damage(task.checkpoint, task.preset.weights, checksums=False)
    return Outcome("damaged", reason=_damaged(task, found)) if found else None


def _evaluate(task: Task, lease: Lease, work: Work, tick: Pace) -> Outcome:
    if _is_done(task):
        return Outcome("late")
    with result_aside(task, lease) as folder:
        scores = work(task, folder, tick)
        keep_preset(task.directory, task.preset)
        is_first = publish(task, lease, folder, scores)
    return Outcome("done", scores) if is_first else Outcome("late")


def _is_done(task: Task) -> bool:
    """Whether somebody has published it between the look at what is due and the claim."""
    scores = task.directory.scores(task.preset.name, task.step)
    return scores is not None and scores["key"] == task.key


def _failed(task: Task, lease: Lease, error: Exception) -> Outcome:
    if not lease.is_held:  # whoever has taken it over has removed what this one wrote
        return Outcome("late")
    if not isinstance(error, LongtakeError | OSError):
        facts = {"traceback": "".join(traceback.format_exception(error))[-4000:]}
        return Outcome("failed", reason=f"{type(error).__name__}: {error}", facts=facts)
    if checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return Outcome("gone")
    if isinstance(error, CheckpointError):
        found = damage(task.checkpoint, task.preset.weights, checksums=True)
        if found:
            return Outcome("damaged", reason=_damaged(task, found))
    of_the_disk = any(isinstance(each, OSError) for each in _causes(error))
    is_hopeless = isinstance(error, RecipeError | ModelError | DataError) and not of_the_disk
    is_passing = isinstance(error, PlanError) and not isinstance(error, NotHereError)
    return Outcome(
        "failed",
        reason=said(error),
        is_final=is_hopeless,
        is_hopeless_here=is_hopeless or isinstance(error, NotHereError),
        pause_seconds=_PAUSE_SECONDS if is_passing else 0.0,
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def said(error: Exception) -> str:
    """What people read of an error: an OSError's path and reason, and what helps if anything."""
    if not isinstance(error, OSError):
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = " Make room: it is tried again." if full else ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}.{advice}"


def _damaged(task: Task, found: str) -> str:
    return (
        f"{task.checkpoint} is not as it was saved: {found}. It is evaluated when its files change "
        "and are right."
    )
