"""Compares the trained samples in a run's ledger with its data plans, epoch by epoch.

The plans are rebuilt from the catalogs that the run kept and from its recipe. A finished epoch must
have consumed every clip of its stage once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.data import ledger
from longtake.data.catalog import Catalog
from longtake.data.plan import Part, Stream
from longtake.data.plan_history import PlanHistory, Span, rebuild
from longtake.run_dir import RunDirectory

Identities = NDArray[np.uint64]
_Key = tuple[str, int]  # a stream (`stage/source`) and an epoch

_EXAMPLES = 5


@dataclass(frozen=True)
class EpochAudit:
    """Numbers of trained, repeated and missing samples of one epoch of a catalog in one stage."""

    epoch: int
    stage: str
    source: str
    seen: int  # number of trained samples
    repeated: int  # number of samples whose clip had been trained before in this epoch
    # Number of clips that should have been trained by now, and were neither trained nor rejected.
    missing: int
    rejected: int  # number of clips that could not be decoded
    skipped: int  # number of clips in batches that were skipped on purpose
    unplanned: int  # number of samples that should not have been trained in this epoch
    is_over: bool  # True if the whole epoch should have been trained by now
    examples: tuple[str, ...]  # short identities of repeated, missing or unplanned clips

    @property
    def is_exact(self) -> bool:
        return not (self.repeated or self.missing or self.unplanned)


@dataclass(frozen=True)
class Audit:
    """Result of comparing a run's ledger of trained samples with its data plans."""

    epochs: tuple[EpochAudit, ...]
    end_step: int  # number of the next batch: after trained, kept or skipped steps
    num_abandoned: int  # samples of steps that were given up by resuming before them
    num_skipped: int  # number of steps that were skipped on purpose
    two_writers: tuple[str, ...]  # places in metrics.jsonl where lines of two launches alternate

    @property
    def ok(self) -> bool:
        return all(epoch.is_exact for epoch in self.epochs) and not self.two_writers


@dataclass
class _Expected:
    """Identities of the clips that an epoch should have trained by now."""

    planned: list[pa.Array] = field(default_factory=list)
    # Identities that all plans together must have consumed when the epoch ends.
    at_end: list[pa.Array] = field(default_factory=list)
    is_over: bool = True
    skipped: list[pa.Array] = field(default_factory=list)


def audit(run: RunDirectory, *, with_metrics: bool = True) -> Audit:
    """Compare a run's ledger of trained samples with its data plans.

    With `with_metrics`, metrics.jsonl is read completely and searched for two writers.

    Raises:
        DataError: there is no ledger, or a catalog that was trained on is not kept.
        RunError: there is no run.
    """
    recipe = run.recipe()
    consumed = ledger.read_ledger(run.ledger_path)
    plan_history = rebuild(consumed.history, {}, recipe.data, recipe.seed, run.catalogs_path)
    expected = _expected_by_epoch(plan_history, consumed.end_step)
    num_skipped = _exclude_skipped(expected, plan_history, consumed.skipped, consumed.end_step)
    found = _by_epoch(consumed)
    order = {name: index for index, name in enumerate(consumed.streams)}
    epochs = [
        _audit_epoch(key, expected.get(key), *found.get(key, (_NONE, _NONE)))
        for key in sorted(
            expected.keys() | found.keys(), key=lambda key: (order.get(key[0], len(order)), key[1])
        )
    ]
    return Audit(
        tuple(epochs),
        consumed.end_step,
        consumed.num_abandoned,
        num_skipped,
        tuple(_two_writers(run)) if with_metrics else (),
    )


def _two_writers(run: RunDirectory) -> Iterator[str]:
    """Yield the places where a launch wrote metrics after a later launch had begun."""
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


def _expected_by_epoch(plan_history: PlanHistory, end_step: int) -> dict[_Key, _Expected]:
    """Return by epoch the clips that a run should have trained before step `end_step`."""
    ends = [plan.first_step for plan in plan_history.plans[1:]]
    expected: dict[_Key, _Expected] = {}
    # A plan counts only for the steps before the next one took over.
    for plan, end in zip(plan_history.plans, [*ends, end_step], strict=True):
        end = min(end, end_step)
        counts = plan.taken(end) if end > plan.first_step else []
        # A plan that was replaced before its first step has no counts.
        for stage, taken in zip(plan.stages, counts, strict=False):
            for stream, count in zip(stage.streams, taken, strict=True):
                for part, epoch, identities, is_over in _consumed_of(stream, count):
                    name = f"{stream.stage}/{stream.source}"
                    entry = expected.setdefault((name, epoch), _Expected())
                    entry.planned.append(identities)
                    entry.is_over, entry.at_end = is_over, []  # the last plan decides
                    if part.expected is not None:
                        entry.at_end = [_identities(part.catalog, part.expected.all_rows())]
    return expected


def _exclude_skipped(
    expected: dict[_Key, _Expected],
    plan_history: PlanHistory,
    spans: Sequence[Span],
    end_step: int,
) -> int:
    """Add the clips of batches that the run skipped on purpose to their epochs.

    Returns the number of these batches.
    """
    num_skipped = 0
    for step in (step for first, end in spans for step in range(first, min(end, end_step))):
        plan_end = plan_history.plan_at(step).end_step
        # A range may end after the curriculum does; no batch is planned there.
        if plan_end is not None and step >= plan_end:
            continue
        num_skipped += 1
        batch = plan_history.batch(step)
        identities, epochs = _identities(batch.catalog, batch.rows), np.asarray(batch.epochs)
        for epoch in np.unique(epochs).tolist():
            key = (f"{batch.stage}/{batch.source}", epoch)
            expected[key].skipped.append(identities.filter(pa.array(epochs == epoch)))
    return num_skipped


def _consumed_of(stream: Stream, count: int) -> Iterator[tuple[Part, int, pa.Array, bool]]:
    """Yield the clips that a catalog's first `count` batches in a stage consume, by epoch.

    Yields (part of the plan, epoch, identities of the clips, whether the epoch is over).
    """
    for start, part in zip(stream.starts, stream.parts, strict=True):
        if count <= start:
            return
        length = part.epoch_span.num_batches
        mine = count - start if length is None else min(count - start, length)
        for epoch, identities, is_over in _consumed_of_part(part, mine):
            yield part, epoch, identities, is_over


def _consumed_of_part(part: Part, count: int) -> Iterator[tuple[int, pa.Array, bool]]:
    span = part.epoch_span
    left = span.left_at(count)
    everything = _identities(part.catalog, part.members.all_rows())
    for epoch in range(span.first_epoch, span.epoch_of(count) + 1):
        if epoch in left:
            # What is consumed is the epoch's clips without the positions that are left.
            rows = [
                np.delete(part.rows_in(epoch, bucket), positions)
                for bucket, positions in enumerate(left[epoch])
            ]
            gone = _identities(part.catalog, np.concatenate(rows))
            if len(gone):
                yield epoch, gone, False
        elif span.num_epochs is None or epoch < span.first_epoch + span.num_epochs:
            yield epoch, everything, True


def _identities(catalog: Catalog, rows: NDArray[np.integer[Any]]) -> pa.Array:
    return catalog.identities.take(pa.array(rows))


def _short(identities: Sequence[pa.Array], without: Sequence[pa.Array] = ()) -> Identities:
    """Return distinct identities of clips [N], shortened to the bytes that a ledger records.

    If two identities share a short form, it occurs twice, because it may be trained twice.
    """
    if not identities:
        return _NONE
    unique = pc.unique(pa.concat_arrays(identities))
    if without:
        unique = unique.filter(pc.invert(pc.is_in(unique, value_set=pa.concat_arrays(without))))
    if not len(unique):
        return _NONE
    num_bytes = len(unique) * unique.type.byte_width
    # `unique` and `filter` return new arrays, whose buffers begin with their first value.
    octets = np.frombuffer(unique.buffers()[1], np.uint8, count=num_bytes)
    return ledger.short_identity(octets.reshape(len(unique), -1))


def _by_epoch(consumed: ledger.Consumed) -> dict[_Key, tuple[Identities, Identities]]:
    """Return by epoch the clips in a ledger that were trained, and those that were rejected."""
    # Sorted once and split at the borders: a mask for each epoch would read all records each time.
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


def _audit_epoch(
    key: _Key, expected: _Expected | None, trained: Identities, rejected: Identities
) -> EpochAudit:
    stage, _, source = key[0].rpartition("/")
    planned = _short(expected.planned, expected.skipped) if expected else _NONE
    at_end = _short(expected.at_end, expected.skipped) if expected and expected.is_over else _NONE
    unique, times = np.unique(trained, return_counts=True)
    counts = Counter(planned.tolist())
    allowed = np.array([counts[each] for each in unique.tolist()], np.int64)
    # A short form may be trained as often as clips share it; each further time is a repetition.
    repeated = np.repeat(unique, np.maximum(times - np.maximum(allowed, 1), 0))
    unplanned = unique[allowed == 0]
    wanted = np.concatenate([planned, at_end])
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
