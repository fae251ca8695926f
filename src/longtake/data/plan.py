"""The data plan: maps a global step to the clips of its batch, over stages, catalogs and epochs.

    Plan      the curriculum from one step on, until the data or the recipe changes
    └─ Stage  a span of the timeline; its batches come from one or several catalogs, by weights
       └─ Stream  one catalog's batches in one stage: parts, one after another
          └─ Part  whole epochs (`EpochSpan`) with the clips that they run over

A plan is a pure function of catalogs, recipe and seed, and of what the plan before it had left to
train. `Plan.batch` depends on the step alone.
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
    """The clips of one optimizer step, over all ranks."""

    step: int
    stage: str
    source: str  # name of the catalog in the recipe
    stream: int  # number of the (stage, source) pair in the plan
    epoch: int  # epoch of the stream in which this step is counted
    number: int  # number of earlier batches of the epoch; after a change, of this plan
    begins_epoch: bool
    bucket: Bucket
    catalog: Catalog
    rows: Rows  # [B] rows of the catalog; fewer than `batch_size` in the last batch of a bucket
    epochs: Sequence[int]  # [B] epoch of each sample: a batch may hold samples of two epochs
    batch_size: int


@dataclass(frozen=True)
class Part:
    """Consecutive epochs over one set of clips, from one catalog in one stage."""

    epoch_span: order.EpochSpan
    members: BucketAssignment
    catalog: Catalog
    before: pa.Array | None = None  # identities that earlier plans consumed of its only epoch
    # Clips that all plans together must have consumed when the epoch ends (the audit checks it).
    # None: the clips that were planned.
    expected: BucketAssignment | None = None

    def rows_at(self, bucket: int, positions: order.Indices, epochs: order.Indices) -> Rows:
        """Return the catalog rows [N] of clips, by their positions in a bucket and their epochs."""
        key = self.epoch_span.seed, self.epoch_span.name
        return self.members.rows_at(bucket, positions, epochs, *key)

    def rows_in(self, epoch: int, bucket: int) -> Rows:
        """Return the catalog rows of all clips that a bucket (clip shape) has in one epoch."""
        if not self.members.shared:
            return self.members.rows[bucket]
        positions = np.arange(self.members.sizes[bucket])
        return self.rows_at(bucket, positions, np.full(len(positions), epoch))


@dataclass(frozen=True)
class OpenEpoch:
    """An epoch of a stage that has begun and is not over, with the clips that it has left."""

    epoch: int
    catalog: Catalog
    left: BucketAssignment  # clips that are not consumed yet
    consumed: pa.Array  # identities of consumed clips
    is_tail: bool  # only last, partial batches are left: the next epoch has begun to count
    expected: BucketAssignment | None  # clips that must be consumed at its end, as in Part


@dataclass(frozen=True)
class Stream:
    """The batches of one catalog in one stage, as parts (runs of epochs) that follow each other."""

    stage: str
    source: str
    # The rests of epochs that earlier plans began, then whole epochs if any are left.
    parts: tuple[Part, ...]
    first_epoch: int = 0  # number of the first whole epoch

    @cached_property
    def starts(self) -> list[int]:
        """Number of the first batch of each part, counted from the catalog's first in the stage."""
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
        """Return the part (run of epochs) that holds a batch of this stream, and its clips."""
        place = bisect_right(self.starts, index) - 1
        part = self.parts[place]
        return part, part.epoch_span.batch(index - self.starts[place])

    def is_whole_at(self, index: int) -> bool:
        return self.parts[bisect_right(self.starts, index) - 1].before is None

    def epoch_at(self, index: int) -> int:
        place = bisect_right(self.starts, index) - 1
        return self.parts[place].epoch_span.epoch_of(index - self.starts[place])

    def open_at(self, index: int) -> list[OpenEpoch]:
        """Return this stream's epochs that are not over before batch `index`."""
        place = bisect_right(self.starts, index) - 1
        found = [_opened(self.parts[place], index - self.starts[place])]
        for part in self.parts[place + 1 :]:
            if part.before is not None:  # the rest of an epoch that an earlier plan began
                found.append(_opened(part, 0))
        epochs = [epoch for part in found for epoch in part]
        return sorted(epochs, key=lambda each: each.epoch)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a data plan: the batches of each catalog, and the weights that mix them."""

    section: Stage  # the stage in the recipe
    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    dropped: Mapping[str, Counter[str]]  # number of dropped clips by source and reason

    @property
    def name(self) -> str:
        return self.section.name

    def place(self, index: int) -> tuple[int, int]:
        """Return which catalog's stream gives a batch of this stage, and its number there."""
        return mixed(index, self.weights) if len(self.streams) > 1 else (0, index)

    def epoch_steps(self, repeats: Mapping[str, int]) -> float:
        """Return the mean number of steps in which each catalog has an epoch, with its repeats."""
        streams = zip(self.streams, self.weights, strict=True)
        return max(
            float(stream.parts[-1].epoch_span.batches_per_epoch)
            * repeats.get(stream.source, 1)
            * sum(self.weights)
            / weight
            for stream, weight in streams
        )

    def taken(self, index: int) -> list[int]:
        """Return how many of the stage's batches before `index` come from each catalog's stream."""
        return order.shares(index, self.weights) if len(self.streams) > 1 else [index]


@dataclass(frozen=True)
class Plan:
    """All batches of a run from one global step on, until the data or the recipe changes."""

    version: int  # number of earlier plans of the run
    first_step: int  # global step at which it begins
    stages: tuple[StagePlan, ...]  # remaining stages of the curriculum, in order
    timeline: StageTimeline  # timeline of these stages, counted from `first_step`
    batch_size: int  # samples per step over all ranks, for stages that set none
    # For finished stages, by source: the epoch that would come next if they were made longer.
    ended: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def end_step(self) -> int | None:
        """Global step after the plan's last batch; None if it is endless."""
        total = self.timeline.total
        return None if total is None else self.first_step + total

    def batch(self, step: int) -> PlannedBatch:
        """Return the clips of the batch of a global step."""
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
        """Return the name and first step of the stage that a step belongs to.

        From the middle of a ramp on, it is the later stage. The first stage counts from the plan's
        begin, though an earlier plan may have begun it.
        """
        borders = self.timeline.borders
        number = bisect_right(borders, step - self.first_step) - 1
        return self.stages[number].name, self.first_step + borders[number]

    def streams(self) -> list[Stream]:
        return [stream for stage in self.stages for stream in stage.streams]

    def taken(self, step: int) -> list[list[int]]:
        """Return how many batches of each stage and each of its catalogs come before a step."""
        taken = self.timeline.taken(step - self.first_step)
        return [stage.taken(index) for stage, index in zip(self.stages, taken, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the data plan's clips, buckets and lengths as 32 hex digits."""
        # Resuming compares it with the record of a run: a change to these bytes refuses old runs.
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
        # Written out, as `repr` would change with the fields of the class.
        lengths, ramps = self.timeline.lengths, self.timeline.ramps
        timeline = f"Timeline({lengths=}, {ramps=})"
        digest.update(f"({timeline}, {self.batch_size})".encode())
        sizes = [each.section.global_batch_size for each in self.stages]
        if any(sizes):  # left out at the default, as plans of older versions have no such sizes
            digest.update(repr(sizes).encode())
        of_buckets = [part.epoch_span.batch_sizes for s in self.streams() for part in s.parts]
        if any(of_buckets):  # left out for the same reason
            digest.update(repr(of_buckets).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class PlanInputs:
    """Everything that plans are made from: catalogs, recipe, batch size and seed."""

    catalogs: Mapping[str, Catalog]
    data: DataSection
    batch_size: int  # samples per step over all ranks, for stages that set none
    seed: int

    def fresh_stage(self, stage: Stage) -> StagePlan:
        """Make the plan of a stage of the curriculum of which no batch was trained."""
        streams, weights, dropped = [], [], {}
        for source, (selection, weight) in self.select(stage).items():
            epochs = self.num_epochs(stage, source)
            span = self.epoch_span(stage, selection.members, f"{stage.name}/{source}", 0, epochs)
            part = Part(span, selection.members, self.catalogs[source])
            streams.append(Stream(stage.name, source, (part,)))
            weights.append(weight)
            dropped[source] = selection.dropped
        return StagePlan(stage, tuple(streams), mixture(streams, weights), dropped)

    def select(self, stage: Stage) -> dict[str, tuple[Selection, float]]:
        """Return the clips and the weight of each catalog of a stage.

        With `data.repeats`, and unless the stage has weights of its own, weights are in proportion
        to the clips of each catalog, times its repeats.
        """
        selected, repeats = {}, self.data.repeats
        for source, weight in self.stage_weights(stage).items():
            selection = select(self.catalogs[source], stage, self.data)
            if repeats and stage.weights is None:
                weight = float(len(selection.members) * repeats.get(source, 1))
            selected[source] = selection, weight
        return selected

    def stage_weights(self, stage: Stage) -> dict[str, float]:
        """Return the weights by which a stage mixes its catalogs, without those of weight 0.

        Raises:
            DataError: every weight is 0, or both weights and epochs are set for several catalogs.
        """
        given = self.data.weights if stage.weights is None else stage.weights
        weights = {source: given.get(source, 1.0) for source in self.catalogs}
        weights = {source: weight for source, weight in weights.items() if weight > 0}
        if not weights:
            raise DataError(
                f"Stage {stage.name}: every catalog has weight 0; give one of them a share."
            )
        if len(weights) > 1 and given and stage.epochs is not None:
            raise DataError(
                f"Stage {stage.name} mixes the catalogs {', '.join(weights)} by weights, by which "
                f"their epochs end at different steps: epochs = {stage.epochs} has no meaning "
                "there. Give it steps (without stages: training.steps), or data.repeats in place "
                "of the weights."
            )
        return weights

    def num_epochs(self, stage: Stage, source: str) -> int | None:
        """Return the number of a catalog's epochs in a stage: `epochs` times `data.repeats`."""
        return None if stage.epochs is None else stage.epochs * self.data.repeats.get(source, 1)

    def epoch_span(
        self,
        stage: Stage,
        members: BucketAssignment,
        name: str,
        first_epoch: int,
        num_epochs: int | None,
    ) -> order.EpochSpan:
        """Return epochs over the clips of a stage; `name` decides their order."""
        size = stage.global_batch_size or self.batch_size
        has_own = any(shape.batch_size for shape in members.shapes)
        of_buckets = tuple(shape.batch_size or size for shape in members.shapes) if has_own else ()
        return order.EpochSpan(
            members.sizes, size, self.seed, name, first_epoch, num_epochs, of_buckets
        )


def begin(catalogs: Mapping[str, Catalog], data: DataSection, batch_size: int, seed: int) -> Plan:
    """Make the data plan of a new run, from step 0.

    Raises:
        DataError: a stage selects no clip, or the stages do not fit together.
    """
    inputs = PlanInputs(catalogs, data, batch_size, seed)
    stages = [inputs.fresh_stage(stage) for stage in data.curriculum()]
    for stage in stages:
        length, warmup = stage_length(stage), stage.section.warmup_steps
        if length is not None and warmup is not None and warmup > length:
            raise DataError(
                f"Stage {stage.name} has {length} steps and warmup_steps = {warmup}: its "
                "learning rate would never be reached. Shorten the warm-up, or make the stage "
                "longer."
            )
    return assemble_plan(0, 0, stages, batch_size)


def assemble_plan(
    version: int,
    first_step: int,
    stages: Sequence[StagePlan],
    batch_size: int,
    lengths: Sequence[int | None] | None = None,
) -> Plan:
    """Make a plan of stages that follow each other; `lengths` replace their numbers of steps.

    Raises:
        DataError: a stage is shorter than its share of the ramps.
    """
    if lengths is None:
        lengths = [stage_length(each) for each in stages]
    # Even, as half of a ramp lies on each side of the border.
    ramps = [each.section.ramp_steps // 2 * 2 for each in stages]
    ramps[:1] = [0] * len(ramps[:1])  # no stage comes before the first
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


def mixture(streams: Sequence[Stream], weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of a stage's catalogs: if all end, by which they end at the same step."""
    counts = [stream.num_batches for stream in streams]
    if len(counts) == 1 or None in counts:
        return tuple(weights)
    return tuple(count for count in counts if count is not None)  # whole numbers: exact in `shares`


def stage_length(stage: StagePlan) -> int | None:
    """Return the number of training steps of a stage; None if it is endless."""
    if stage.section.steps is not None:
        return stage.section.steps
    counts = [stream.num_batches for stream in stage.streams]
    return None if None in counts else sum(count for count in counts if count is not None)


def _opened(part: Part, index: int) -> list[OpenEpoch]:
    opened, counted = [], part.epoch_span.epoch_of(index)
    for epoch, positions in part.epoch_span.left_at(index).items():
        rows = tuple(
            part.rows_at(bucket, where, np.full(len(where), epoch))
            for bucket, where in enumerate(positions)
        )
        left = BucketAssignment(part.members.shapes, rows)
        identities = part.catalog.identities
        # Consumed clips are those of the epoch that are not left, together with earlier plans'.
        mine, still = (identities.take(pa.array(each.all_rows())) for each in (part.members, left))
        consumed = mine.filter(pc.invert(pc.is_in(mine, value_set=still)))
        if part.before is not None:
            consumed = pa.concat_arrays([part.before, consumed])
        is_tail = epoch < counted
        opened.append(OpenEpoch(epoch, part.catalog, left, consumed, is_tail, part.expected))
    return opened
