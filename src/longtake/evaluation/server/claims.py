"""Who works on what: a lease for each task, whose files are the attempts at it; torch-free.

A lease ends as `done`, `failed`, `damaged` (the checkpoint is not as it was saved), `gone` (it was
deleted), `missed` (it was deleted before anybody had begun) or `released`. One that did not end and
has a successor was lost: its holder died over it. What failed or was lost counts as an attempt; who
dies again and again must end some day, too.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from longtake.evaluation.server.publish import aside_path, remove
from longtake.evaluation.server.task import Task, preset_key
from longtake.lease import Lease, Leases, history


class Attempts(NamedTuple):
    """What is known of earlier attempts at a task."""

    number: int
    is_final: bool
    """Nobody shall try again."""


class Claim(NamedTuple):
    """A task that this process works on."""

    task: Task
    lease: Lease
    lost_by: str | None
    """The server that died over it just before."""


_Name = tuple[Path, str]


@dataclass(frozen=True)
class _Ending:
    lease: Lease
    how: str
    facts: Mapping[str, Any]


def attempts_of(records: Sequence[Mapping[str, Any]], preset: str) -> Attempts:
    """Count a lease's records; pure.

    Args:
        records: of all who had the lease, the first one first.
        preset: the `preset_key` of what is to be sampled: attempts at another do not count.
    """
    counted = [
        record
        for number, record in enumerate(records)
        if record.get("preset_key") == preset
        and (record.get("ended") == "failed" or (_is_open(record) and number < len(records) - 1))
    ]
    return Attempts(len(counted), any(record.get("final") for record in counted))


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
        self._own_failures: dict[_Name, int] = {}
        self._rests: dict[_Name, tuple[int, float]] = {}
        self._unwritten: list[_Ending] = []
        self._paused_until = -math.inf

    @property
    def are_paused(self) -> bool:
        """Whether one could not be written a while ago: no other is tried yet."""
        return time.monotonic() < self._paused_until

    def is_like(self, other: "Claims") -> bool:
        """Whether both go by the same numbers."""
        return (self._seconds, self._max) == (other._seconds, other._max)

    def attempts(self, task: Task) -> Attempts:
        """Earlier attempts, those included that could not be written down."""
        found = attempts_of(history(task.claim_path), preset_key(task.preset))
        count = max(found.number, self._own_failures.get(_name(task), 0))
        return Attempts(count, found.is_final or count >= self._max)

    def ending(self, task: Task) -> tuple[str | None, str | None]:
        """How the newest lease of a task has ended, if it has, and whose it is, if there is one."""
        newest = next(iter(history(task.claim_path)[-1:]), {})
        return newest.get("ended"), newest.get("server")

    def rests(self, task: Task) -> bool:
        """Whether a task that has failed is left alone for a while."""
        if not task.attempts:
            return False
        count, since = self._rests.get(_name(task), (0, 0.0))
        if count != task.attempts:
            since = time.monotonic()
            self._rests[_name(task)] = task.attempts, since
        return time.monotonic() - since < self._pause * task.attempts

    def take(self, task: Task) -> Claim | None:
        """Claim a task; None if somebody else has it.

        What a dead server has written of it is removed. Its hold is not, before there is another.

        Raises:
            OSError: it cannot be written.
        """
        try:
            lease = self._of(task).take(task.claim_path)
        except OSError:
            self._paused_until = time.monotonic() + self._pause
            raise
        if lease is None:
            return None
        before = history(task.claim_path)[: lease.number]
        lost = before[-1] if before and _is_open(before[-1]) else None
        if lost is not None:
            remove(aside_path(task, lease.number - 1, lost))  # if it lives, it finds out soon
        return Claim(task, lease, str(lost.get("server")) if lost else None)

    def end(self, claim: Claim, how: str, **facts: Any) -> None:
        """Give a claim back; where that cannot be written, `settle` tries again later."""
        if how == "failed":
            self._own_failures[_name(claim.task)] = claim.task.attempts + 1
        self._unwritten.append(_Ending(claim.lease, how, facts))
        self.settle()

    def settle(self) -> None:
        """Write down how claims have ended, where that was not possible before."""
        for ending in list(self._unwritten):
            with suppress(OSError):
                ending.lease.end(ending.how, **ending.facts)
                self._unwritten.remove(ending)

    def _of(self, task: Task) -> Leases:
        key = preset_key(task.preset)
        owner = {"server": self._server, "preset_key": key}
        return self._leases.setdefault(key, Leases(self._seconds, owner))


def _name(task: Task) -> _Name:
    return task.claim_path, preset_key(task.preset)


def _is_open(record: Mapping[str, Any]) -> bool:
    return record.get("ended") is None
