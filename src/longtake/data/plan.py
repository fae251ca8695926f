"""The plan: from a global step to the clips of its batch, over stages, catalogs and epochs.

    Plan      the curriculum from one step on, until the data or the recipe changes
    └─ Stage  a span of the timeline; its batches come from one or several catalogs, by weights
       └─ Stream  one catalog's batches in one stage: parts, one after another
          └─ Part  whole epochs (`EpochSpan`) with the clips that it runs over

A plan is a pure function of catalogs, recipe and seed, and of what was still to come when it took
over from the plan before it. `Plan.batch` asks nothing else than the step.
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.config import Bucket, DataSection, Stage
from longtake.data import order
from longtake.data.buckets import BucketAssignment, Rows
from longtake.data.catalog import Catalog
from longtake.data.stages import Selection, StageTimeline, mixed, select
from longtake.errors import DataError


@dataclass(frozen=True)
class PlannedBatch:
    """Which clips one optimizer step trains on, over all ranks."""

    step: int
    stage: str
    source: str  # the name of the catalog in the recipe
    stream: int  # number of the (stage, source) pair in the plan
    epoch: int  # the epoch of its stream that this step is counted in
    number: int  # batches of that epoch before it; after a change, those since then
    begins_epoch: bool
    bucket: Bucket
    catalog: Catalog
    rows: Rows  # [B] rows of the catalog; fewer than the batch size in the last batch of a bucket
    epochs: Sequence[int]  # [B] each sample's own epoch: a batch may hold samples of two
    batch_size: int


@dataclass(frozen=True)
class Part:
    """Epochs of a stream over one set of clips."""

    epoch_span: order.EpochSpan
    members: BucketAssignment
    catalog: Catalog
    before: pa.Array | None = None  # identities that earlier plans consumed of its only epoch
    # All that the epoch must have consumed at its end, by all plans (the audit checks it); None:
    # what was planned
    expected: BucketAssignment | None = None

    def rows_at(self, bucket: int, positions: order.Indices, epochs: order.Indices) -> Rows:
        """[N] the clips at positions of a bucket, each in an epoch; rows of the catalog."""
        key = self.epoch_span.seed, self.epoch_span.name
        return self.members.rows_at(bucket, positions, epochs, *key)

    def rows_in(self, epoch: int, bucket: int) -> Rows:
        """All clips of a bucket in one epoch."""
        if not self.members.shared:
            return self.members.rows[bucket]
        positions = np.arange(self.members.sizes[bucket])
        return self.rows_at(bucket, positions, np.full(len(positions), epoch))


@dataclass(frozen=True)
class OpenEpoch:
    """An epoch of a stream that has begun and is not over."""

    epoch: int
    catalog: Catalog
    left: BucketAssignment  # not consumed yet
    consumed: pa.Array  # identities
    is_tail: bool  # only its tails are left: the next epoch is being counted already
    expected: BucketAssignment | None  # as in Part


@dataclass(frozen=True)
class Stream:
    """One catalog's batches in one stage."""

    stage: str
    source: str
    # The rests of epochs that began before the plan, then whole epochs, unless none are left
    parts: tuple[Part, ...]
    first_epoch: int = 0  # the first of the whole epochs

    @cached_property
    def starts(self) -> list[int]:
        """The number of each part's first batch."""
        starts = [0]
        for part in self.parts[:-1]:
            assert part.epoch_span.num_batches is not None
            starts.append(starts[-1] + part.epoch_span.num_batches)
        return starts

    @property
    def num_batches(self) -> int | None:
        last = self.parts[-1].epoch_span.num_batches
        return None if last is None else self.starts[-1] + last

    def batch(self, index: int) -> tuple[Part, order.BatchIndex]:
        place = bisect_right(self.starts, index) - 1
        part = self.parts[place]
        return part, part.epoch_span.batch(index - self.starts[place])

    def is_whole_at(self, index: int) -> bool:
        return self.parts[bisect_right(self.starts, index) - 1].before is None

    def epoch_at(self, index: int) -> int:
        place = bisect_right(self.starts, index) - 1
        return self.parts[place].epoch_span.epoch_of(index - self.starts[place])

    def open_at(self, index: int) -> list[OpenEpoch]:
        """The epochs that begin before or with batch `index` and are not over then."""
        place = bisect_right(self.starts, index) - 1
        found = [_opened(self.parts[place], index - self.starts[place])]
        for part in self.parts[place + 1 :]:
            if part.before is not None:  # the rest of an epoch that began before this plan
                found.append(_opened(part, 0))
        epochs = [epoch for part in found for epoch in part]
        return sorted(epochs, key=lambda each: each.epoch)


@dataclass(frozen=True)
class StagePlan:
    """A stage's streams, and how their batches are mixed."""

    section: Stage  # of the recipe
    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    dropped: Mapping[str, Counter[str]]  # by source: how many clips are left out, by reason

    @property
    def name(self) -> str:
        return self.section.name

    def place(self, index: int) -> tuple[int, int]:
        return mixed(index, self.weights) if len(self.streams) > 1 else (0, index)

    def taken(self, index: int) -> list[int]:
        return order.shares(index, self.weights) if len(self.streams) > 1 else [index]


@dataclass(frozen=True)
class Plan:
    """All batches from one global step on."""

    version: int  # how many plans came before it in the run
    first_step: int  # the global step that it begins at
    stages: tuple[StagePlan, ...]  # what is left of the curriculum then, in order
    timeline: StageTimeline  # of these stages, counted from `first_step`
    batch_size: int  # samples per step over all ranks, of stages that set none
    # Finished stages: by source, the epoch that would be next if they were made longer
    ended: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def end_step(self) -> int | None:
        total = self.timeline.total
        return None if total is None else self.first_step + total

    def batch(self, step: int) -> PlannedBatch:
        """The batch that a global step trains on."""
        number, index = self.timeline.at(step - self.first_step)
        stage = self.stages[number]
        which, index = stage.place(index)
        stream = stage.streams[which]
        part, slots = stream.batch(index)
        return PlannedBatch(
            step=step,
            stage=stream.stage,
            source=stream.source,
            stream=sum(len(each.streams) for each in self.stages[:number]) + which,
            epoch=slots.epoch,
            number=slots.number,
            begins_epoch=slots.number == 0 and part.before is None,
            bucket=part.members.shapes[slots.bucket],
            catalog=part.catalog,
            rows=part.rows_at(slots.bucket, slots.positions, slots.epochs),
            epochs=slots.epochs.tolist(),
            batch_size=part.epoch_span.batch_size_of(slots.bucket),
        )

    def stage_at(self, step: int) -> tuple[str, int]:
        """The stage that a step is in, at the middle of a ramp the later one, and its first step.

        The first stage of a plan begins with it, though it may have begun in the plan before.
        """
        borders = self.timeline.borders
        number = bisect_right(borders, step - self.first_step) - 1
        return self.stages[number].name, self.first_step + borders[number]

    def streams(self) -> list[Stream]:
        return [stream for stage in self.stages for stream in stage.streams]

    def taken(self, step: int) -> list[list[int]]:
        taken = self.timeline.taken(step - self.first_step)
        return [stage.taken(index) for stage, index in zip(self.stages, taken, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Names the plan: which clips, in which buckets, for how long; 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        for stage in self.stages:
            digest.update(repr((stage.name, stage.weights)).encode())
            for part in (part for stream in stage.streams for part in stream.parts):
                span = part.epoch_span
                facts = (part.catalog.fingerprint, part.members.shapes, span.sizes, span.num_epochs)
                digest.update(repr(facts).encode())
                for rows in part.members.rows:
                    digest.update(np.ascontiguousarray(rows).data)
                for each in part.members.shared:
                    digest.update(repr(each.weights).encode())
                    digest.update(np.ascontiguousarray(each.rows).data)
        lengths, ramps = self.timeline.lengths, self.timeline.ramps
        timeline = f"Timeline({lengths=}, {ramps=})"
        digest.update(f"({timeline}, {self.batch_size})".encode())
        sizes = [each.section.global_batch_size for each in self.stages]
        if any(sizes):  # else as it was before stages could have one
            digest.update(repr(sizes).encode())
        of_buckets = [part.epoch_span.batch_sizes for s in self.streams() for part in s.parts]
        if any(of_buckets):  # as above
            digest.update(repr(of_buckets).encode())
        return digest.hexdigest()


def begin(catalogs: Mapping[str, Catalog], data: DataSection, batch_size: int, seed: int) -> Plan:
    stages = [fresh_stage(stage, catalogs, data, batch_size, seed) for stage in data.curriculum()]
    for stage in stages:
        length, warmup = stage_length(stage), stage.section.warmup_steps
        if length is not None and warmup is not None and warmup > length:
            raise DataError(
                f"Stage {stage.name} has {length} steps and warmup_steps = {warmup}: its "
                "learning rate would never be reached. Shorten the warm-up, or make the stage "
                "longer."
            )
    return assemble_plan(0, 0, stages, batch_size)


def fresh_stage(
    stage: Stage,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
) -> StagePlan:
    weights = stage_weights(stage, catalogs, data)
    selections = {source: select(catalogs[source], stage, data) for source in weights}
    weights = repeated_weights(weights, selections, stage, data)
    streams, dropped = [], {}
    for source, selection in selections.items():
        dropped[source] = selection.dropped
        span = order.EpochSpan(
            sizes=selection.members.sizes,
            batch_size=stage.global_batch_size or batch_size,
            batch_sizes=own_batch_sizes(selection.members.shapes, stage, batch_size),
            seed=seed,
            name=f"{stage.name}/{source}",
            num_epochs=num_epochs(stage, source, data),
        )
        part = Part(span, selection.members, catalogs[source])
        streams.append(Stream(stage.name, source, (part,)))
    return StagePlan(stage, tuple(streams), tuple(weights.values()), dropped)


def own_batch_sizes(shapes: Sequence[Bucket], stage: Stage, batch_size: int) -> tuple[int, ...]:
    """Clips per update of each bucket; empty if none has its own."""
    size = stage.global_batch_size or batch_size
    has_own = any(shape.batch_size for shape in shapes)
    return tuple(shape.batch_size or size for shape in shapes) if has_own else ()


def stage_weights(
    stage: Stage, catalogs: Mapping[str, Catalog], data: DataSection
) -> dict[str, float]:
    """The share of each catalog in a stage, without those of share 0."""
    given = data.weights if stage.weights is None else stage.weights
    weights = {source: given.get(source, 1.0) for source in catalogs}
    weights = {source: weight for source, weight in weights.items() if weight > 0}
    if not weights:
        raise DataError(
            f"Stage {stage.name}: every catalog has weight 0; give one of them a share."
        )
    if len(weights) > 1 and stage.epochs is not None:
        raise DataError(
            f"Stage {stage.name} mixes the catalogs {', '.join(weights)} by weights, and each has "
            f"its own epochs: epochs = {stage.epochs} has no meaning there. Give the stage steps."
        )
    return weights


def repeated_weights(
    weights: dict[str, float], selections: Mapping[str, Selection], stage: Stage, data: DataSection
) -> dict[str, float]:
    """With `data.repeats` each catalog's share is that of its clips, each counted so often."""
    if not data.repeats or stage.weights is not None:
        return weights
    return {
        source: float(len(selections[source].members) * data.repeats.get(source, 1))
        for source in weights
    }


def num_epochs(stage: Stage, source: str, data: DataSection) -> int | None:
    """How many epochs of a catalog a stage has: `data.repeats` for each of its own."""
    return None if stage.epochs is None else stage.epochs * data.repeats.get(source, 1)


def assemble_plan(
    version: int,
    first_step: int,
    stages: Sequence[StagePlan],
    batch_size: int,
    lengths: Sequence[int | None] | None = None,
) -> Plan:
    """Put stages on a timeline; `lengths` replace the stages' own numbers of steps."""
    if lengths is None:
        lengths = [stage_length(each) for each in stages]
    ramps = [each.section.ramp_steps // 2 * 2 for each in stages]
    ramps[:1] = [0] * len(ramps[:1])  # there is no stage before the first
    for stage, length, ramp, following in zip(stages, lengths, ramps, [*ramps, 0][1:], strict=True):
        if length is not None and length < (ramp + following) // 2:
            raise DataError(
                f"Stage {stage.name} has {length} steps, too few for its ramps: half of "
                f"{ramp} at its beginning and half of {following} at its end. Lower ramp_steps, or "
                "make the stage longer."
            )
    return Plan(
        version, first_step, tuple(stages), StageTimeline(tuple(lengths), tuple(ramps)), batch_size
    )


def stage_length(stage: StagePlan) -> int | None:
    if stage.section.steps is not None:
        return stage.section.steps
    return stage.streams[0].num_batches if len(stage.streams) == 1 else None


def _opened(part: Part, index: int) -> list[OpenEpoch]:
    opened, counted = [], part.epoch_span.epoch_of(index)
    for epoch, positions in part.epoch_span.left_at(index).items():
        rows = tuple(
            part.rows_at(bucket, where, np.full(len(where), epoch))
            for bucket, where in enumerate(positions)
        )
        left = BucketAssignment(part.members.shapes, rows)
        identities = part.catalog.identities
        mine, still = (identities.take(pa.array(each.all_rows())) for each in (part.members, left))
        consumed = mine.filter(pc.invert(pc.is_in(mine, value_set=still)))
        if part.before is not None:
            consumed = pa.concat_arrays([part.before, consumed])
        is_tail = epoch < counted
        opened.append(OpenEpoch(epoch, part.catalog, left, consumed, is_tail, part.expected))
    return opened
