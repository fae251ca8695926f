"""The proof: what a run consumed, epoch by epoch, against what it should have.

What it consumed is the ledger's; what it should have follows from the catalogs that it kept and
from its recipe. For an epoch that is over that is simply every clip of its stage, once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.config import Recipe
from longtake.data.catalog import Catalog
from longtake.data.course import Course, Entry, rebuild
from longtake.data.ledger import Consumed, read_ledger, short_identity
from longtake.data.plan import Part, Plan, Stream
from longtake.data.skipped import Span
from longtake.run_dir import RunDirectory

Identities = NDArray[np.uint64]
_Key = tuple[str, int]
"""A stream (`stage/source`) and an epoch."""

_EXAMPLES = 5


@dataclass(frozen=True)
class EpochAudit:
    """One epoch of one stream."""

    epoch: int
    stage: str
    source: str
    seen: int
    """Samples that were trained."""
    repeated: int
    """Of these, how many were not the first of their clip."""
    missing: int
    """Clips that should have been trained by now, and were neither trained nor rejected."""
    rejected: int
    """Clips that could not be decoded."""
    skipped: int
    """Clips of batches that were left out on purpose; nothing is owed of them."""
    unplanned: int
    """Samples that should not have been trained in this epoch."""
    is_over: bool
    """Whether all of the epoch should have been trained by now."""
    examples: tuple[str, ...]
    """Beginnings of the identities of clips that are repeated, missing or unplanned."""

    @property
    def is_exact(self) -> bool:
        return not (self.repeated or self.missing or self.unplanned)


@dataclass(frozen=True)
class Audit:
    """What a run's ledger proves."""

    epochs: tuple[EpochAudit, ...]
    end_step: int
    """Steps that were trained and kept, or skipped: the number of the next batch."""
    num_abandoned: int
    """Samples of steps that were trained, then given up: the run went on from before them."""
    num_skipped: int
    """Steps among these that were left out on purpose."""
    two_writers: tuple[str, ...]
    """Where lines of two launches alternate in metrics.jsonl: both trained the run at a time."""

    @property
    def ok(self) -> bool:
        return all(epoch.is_exact for epoch in self.epochs) and not self.two_writers


@dataclass
class _Expected:
    """What an epoch should have consumed; whole identities."""

    planned: list[pa.Array]
    owed: list[pa.Array]
    """What it must have consumed when it is over, whatever was planned."""
    is_over: bool = True
    skipped: list[pa.Array] = field(default_factory=list)
    """What of it was not to be consumed after all."""


def audit(run: RunDirectory) -> Audit:
    """Compare a run's ledger with its plans.

    Raises:
        DataError: there is no ledger, or a catalog that was trained on is not kept.
        RunError: there is no run.
    """
    recipe = run.recipe()
    consumed = read_ledger(run.ledger_path)
    course = _course(consumed.history, recipe, run)
    expected = _expected(course, consumed.end_step)
    skipped = _skipped_steps(course, consumed.skipped, consumed.end_step)
    _leave_out(expected, course, skipped)
    found = _by_epoch(consumed)
    epochs = [
        _judge(key, expected.get(key), *found.get(key, (_NONE, _NONE)))
        for key in sorted(expected.keys() | found.keys(), key=_in_order(consumed.streams))
    ]
    return Audit(
        tuple(epochs),
        consumed.end_step,
        consumed.num_abandoned,
        len(skipped),
        tuple(_two_writers(run)),
    )


def _two_writers(run: RunDirectory) -> Iterator[str]:
    """Where a launch wrote metrics after a later launch had begun to."""
    rows = [row for row in run.metric_lines() if row.get("launch")]
    seen: set[str] = set()
    for before, row in pairwise(rows):
        seen.add(before["launch"])
        if row["launch"] != before["launch"] and row["launch"] in seen:
            yield (
                f"step {row['step']} of launch {row['launch']} was written after step "
                f"{before['step']} of launch {before['launch']}"
            )


_NONE: Identities = np.empty(0, np.uint64)


def _course(history: Sequence[Entry], recipe: Recipe, run: RunDirectory) -> Course:
    return rebuild(history, {}, recipe.data, recipe.seed, run.catalogs_path)


def _expected(course: Course, end_step: int) -> dict[_Key, _Expected]:
    """For each epoch that has begun, what it should have consumed before a step."""
    ends = [plan.first_step for plan in course.plans[1:]]
    expected: dict[_Key, _Expected] = {}
    for plan, end in zip(course.plans, [*ends, end_step], strict=True):
        for stream, count in _counted(plan, min(end, end_step)):
            for part, epoch, identities, is_over in _consumed_of(stream, count):
                name = f"{stream.stage}/{stream.source}"
                entry = expected.setdefault((name, epoch), _Expected([], []))
                entry.planned.append(identities)
                entry.is_over, entry.owed = is_over, []  # the last plan that knows it says
                if part.owed is not None:
                    entry.owed = [_identities(part.catalog, part.owed.all_rows())]
    return expected


def _skipped_steps(course: Course, spans: Sequence[Span], end_step: int) -> list[int]:
    steps = [step for first, end in spans for step in range(first, min(end, end_step))]
    ends = [course.plan_at(step).end_step for step in steps]
    return [step for step, end in zip(steps, ends, strict=True) if end is None or step < end]


def _leave_out(expected: dict[_Key, _Expected], course: Course, steps: Sequence[int]) -> None:
    """Take the clips of some steps out of what their epochs should have consumed."""
    for step in steps:
        batch = course.batch(step)
        identities, epochs = _identities(batch.catalog, batch.rows), np.asarray(batch.epochs)
        for epoch in np.unique(epochs).tolist():
            key = (f"{batch.stage}/{batch.source}", epoch)
            expected[key].skipped.append(identities.filter(pa.array(epochs == epoch)))


def _counted(plan: Plan, end: int) -> Iterator[tuple[Stream, int]]:
    if end > plan.first_step:
        for stage, counts in zip(plan.stages, plan.taken(end), strict=True):
            yield from zip(stage.streams, counts, strict=True)


def _consumed_of(stream: Stream, count: int) -> Iterator[tuple[Part, int, pa.Array, bool]]:
    """(part, epoch, identities, whether it is over) for the first `count` batches of a stream."""
    for start, part in zip(stream.starts, stream.parts, strict=True):
        if count <= start:
            return
        length = part.leg.num_batches
        mine = count - start if length is None else min(count - start, length)
        for epoch, identities, is_over in _consumed_of_part(part, mine):
            yield part, epoch, identities, is_over


def _consumed_of_part(part: Part, count: int) -> Iterator[tuple[int, pa.Array, bool]]:
    left = part.leg.left_at(count)
    everything = _identities(part.catalog, part.members.all_rows())
    for epoch in range(part.leg.first_epoch, part.leg.epoch_of(count) + 1):
        if epoch in left:
            rows = [
                np.delete(mine, positions)
                for mine, positions in zip(part.members.rows, left[epoch], strict=True)
            ]
            gone = _identities(part.catalog, np.concatenate(rows))
            if len(gone):
                yield epoch, gone, False
        elif part.leg.num_epochs is None or epoch < part.leg.first_epoch + part.leg.num_epochs:
            yield epoch, everything, True


def _identities(catalog: Catalog, rows: NDArray[np.integer[Any]]) -> pa.Array:
    return catalog.identities.take(pa.array(rows))


def _short(identities: Sequence[pa.Array], without: Sequence[pa.Array] = ()) -> Identities:
    """[N] the beginnings of all identities, each identity once.

    Two identities that begin alike are there twice: so often may that beginning be trained.
    """
    if not identities:
        return _NONE
    unique = pc.unique(pa.concat_arrays(identities))
    if without:
        unique = unique.filter(pc.invert(pc.is_in(unique, value_set=pa.concat_arrays(without))))
    if not len(unique):
        return _NONE
    octets = np.frombuffer(
        unique.buffers()[1], np.uint8, count=len(unique) * unique.type.byte_width
    )
    return short_identity(octets.reshape(len(unique), -1))


def _by_epoch(consumed: Consumed) -> dict[_Key, tuple[Identities, Identities]]:
    """For each epoch the identities that were trained, and those that were rejected."""
    order = np.lexsort((consumed.epoch, consumed.stream))
    stream, epoch = consumed.stream[order], consumed.epoch[order]
    borders = np.flatnonzero((np.diff(stream) != 0) | (np.diff(epoch) != 0)) + 1
    found: dict[_Key, tuple[Identities, Identities]] = {}
    for mine in np.split(order, borders):
        identities, is_rejected = consumed.identity[mine], consumed.is_rejected[mine]
        if len(mine):
            key = (consumed.streams[consumed.stream[mine[0]]], int(consumed.epoch[mine[0]]))
            found[key] = (identities[~is_rejected], identities[is_rejected])
    return found


def _judge(
    key: _Key, expected: _Expected | None, trained: Identities, rejected: Identities
) -> EpochAudit:
    stage, _, source = key[0].rpartition("/")
    planned = _short(expected.planned, expected.skipped) if expected else _NONE
    owed = _short(expected.owed, expected.skipped) if expected and expected.is_over else _NONE
    unique, times = np.unique(trained, return_counts=True)
    allowed = _times(unique, *np.unique(planned, return_counts=True))
    repeated = np.repeat(unique, np.maximum(times - np.maximum(allowed, 1), 0))
    unplanned = unique[allowed == 0]
    wanted = np.concatenate([planned, owed])
    missing = np.setdiff1d(wanted, np.concatenate([unique, rejected]))
    examples = np.concatenate([repeated, missing, unplanned])[:_EXAMPLES]
    return EpochAudit(
        epoch=key[1],
        stage=stage,
        source=source,
        seen=len(trained),
        repeated=len(repeated),
        missing=len(missing),
        rejected=len(np.unique(rejected)),
        skipped=len(_short(expected.skipped)) if expected else 0,
        unplanned=len(unplanned),
        is_over=expected is not None and expected.is_over,
        examples=tuple(int(each).to_bytes(8, "little").hex()[:14] for each in examples),
    )


def _times(keys: Identities, unique: Identities, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    found: dict[int, int] = defaultdict(int, zip(unique.tolist(), counts.tolist(), strict=True))
    return np.array([found[key] for key in keys.tolist()], np.int64)


def _in_order(streams: Sequence[str]) -> Any:
    order = {name: index for index, name in enumerate(streams)}
    return lambda key: (order.get(key[0], len(order)), key[1])
