"""The plan: from a global step to the clips of its batch, over stages, catalogs and epochs.

    Plan      the curriculum from one step on, until the data or the recipe changes
    └─ Stage  a span of the timeline; its batches come from one or several catalogs, by weights
       └─ Stream  one catalog's batches in one stage: legs, one after another
          └─ Part  a leg (longtake.data.order) with the clips that it runs over

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
from longtake.data.buckets import Members, Rows
from longtake.data.catalog import Catalog
from longtake.data.order import Leg, Slots
from longtake.data.stages import Timeline, mixed, select, shares
from longtake.errors import DataError


@dataclass(frozen=True)
class PlannedBatch:
    """Which clips one optimizer step trains on, over all ranks."""

    step: int
    stage: str
    source: str
    """The name of the catalog in the recipe."""
    stream: int
    """Number of the (stage, source) pair in the plan."""
    epoch: int
    """The epoch of its stream that this step is counted in."""
    number: int
    """How many batches of that epoch come before it; after a change, how many since then."""
    begins_epoch: bool
    bucket: Bucket
    catalog: Catalog
    rows: Rows
    """[B] rows of the catalog; fewer than the batch size in the last batch of a bucket."""
    epochs: Sequence[int]
    """[B] each sample's own epoch: at an epoch's edge one batch holds samples of two."""
    batch_size: int


@dataclass(frozen=True)
class Part:
    """Epochs of a stream over one set of clips."""

    leg: Leg
    members: Members
    catalog: Catalog
    before: pa.Array | None = None
    """Identities that plans before this one have consumed of the leg's (only) epoch."""
    owed: Members | None = None
    """All that the epoch must have consumed when it is over, by whichever plan; None: what was
    planned. An audit holds the plans to it."""


@dataclass(frozen=True)
class OpenEpoch:
    """An epoch of a stream that has begun and is not over."""

    epoch: int
    catalog: Catalog
    left: Members
    """What it has not consumed yet."""
    consumed: pa.Array
    """Identities that it has."""
    is_tail: bool
    """Whether only its tails are left: the next epoch is being counted already."""
    owed: Members | None
    """As in Part."""


@dataclass(frozen=True)
class Stream:
    """One catalog's batches in one stage."""

    stage: str
    source: str
    parts: tuple[Part, ...]
    """The rests of epochs that began before the plan, then whole epochs, unless none are left."""
    first_epoch: int = 0
    """The first of the whole epochs."""

    @cached_property
    def starts(self) -> list[int]:
        """The number of each part's first batch."""
        starts = [0]
        for part in self.parts[:-1]:
            assert part.leg.num_batches is not None
            starts.append(starts[-1] + part.leg.num_batches)
        return starts

    @property
    def num_batches(self) -> int | None:
        """Batches in all; None: endless."""
        last = self.parts[-1].leg.num_batches
        return None if last is None else self.starts[-1] + last

    def batch(self, index: int) -> tuple[Part, Slots]:
        place = bisect_right(self.starts, index) - 1
        part = self.parts[place]
        return part, part.leg.batch(index - self.starts[place])

    def is_whole_at(self, index: int) -> bool:
        """Whether batch `index` is one of the whole epochs, and not of a rest."""
        return self.parts[bisect_right(self.starts, index) - 1].before is None

    def epoch_at(self, index: int) -> int:
        """The epoch that batch `index` is counted in; after the last batch, the one after it."""
        place = bisect_right(self.starts, index) - 1
        return self.parts[place].leg.epoch_of(index - self.starts[place])

    def open_at(self, index: int) -> list[OpenEpoch]:
        """What the epochs that have begun before batch `index`, or begin with it, still hold."""
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

    stage: Stage
    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    dropped: Mapping[str, Counter[str]]
    """By source: how many clips are left out, by reason."""

    def place(self, index: int) -> tuple[int, int]:
        return mixed(index, self.weights) if len(self.streams) > 1 else (0, index)

    def taken(self, index: int) -> list[int]:
        """How many batches each stream has given when the stage has given `index`."""
        return shares(index, self.weights) if len(self.streams) > 1 else [index]


@dataclass(frozen=True)
class Plan:
    """All batches from one global step on.

    Attributes:
        version: how many plans came before it in the run.
        first_step: the global step that it begins at.
        stages: what is left of the curriculum then, in order.
        timeline: of these stages, counted from `first_step`.
        batch_size: samples per step over all ranks.
        ended: stages that had begun and of which this plan has nothing left: by source, the epoch
            that would be next, were they made longer.
    """

    version: int
    first_step: int
    stages: tuple[StagePlan, ...]
    timeline: Timeline
    batch_size: int
    ended: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def end_step(self) -> int | None:
        """The global step after its last; None: endless."""
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
            rows=part.members.rows[slots.bucket][slots.positions],
            epochs=slots.epochs.tolist(),
            batch_size=self.batch_size,
        )

    def streams(self) -> list[Stream]:
        """The streams of all stages, as `PlannedBatch.stream` counts them."""
        return [stream for stage in self.stages for stream in stage.streams]

    def taken(self, step: int) -> list[list[int]]:
        taken = self.timeline.taken(step - self.first_step)
        return [stage.taken(index) for stage, index in zip(self.stages, taken, strict=True)]

    @cached_property
    def fingerprint(self) -> str:
        """Names the plan: which clips, in which buckets, for how long; 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        for stage in self.stages:
            digest.update(repr((stage.stage.name, stage.weights)).encode())
            for part in (part for stream in stage.streams for part in stream.parts):
                leg = part.leg
                facts = (part.catalog.fingerprint, part.members.shapes, leg.sizes, leg.num_epochs)
                digest.update(repr(facts).encode())
                for rows in part.members.rows:
                    digest.update(np.ascontiguousarray(rows).data)
        digest.update(repr((self.timeline, self.batch_size)).encode())
        return digest.hexdigest()


def begin(catalogs: Mapping[str, Catalog], data: DataSection, batch_size: int, seed: int) -> Plan:
    """The plan of a new run.

    Raises:
        DataError: a stage selects no clips, or is not as long as its ramps.
    """
    stages = [fresh_stage(stage, catalogs, data, batch_size, seed) for stage in data.curriculum()]
    return assemble_plan(0, 0, stages, batch_size)


def fresh_stage(
    stage: Stage,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
) -> StagePlan:
    """A stage from its first epoch on."""
    weights = stage_weights(stage, catalogs, data)
    streams, dropped = [], {}
    for source in weights:
        selection = select(catalogs[source], stage, data)
        dropped[source] = selection.dropped
        leg = Leg(
            sizes=selection.members.sizes,
            batch_size=batch_size,
            seed=seed,
            name=f"{stage.name}/{source}",
            num_epochs=stage.epochs,
        )
        part = Part(leg, selection.members, catalogs[source])
        streams.append(Stream(stage.name, source, (part,)))
    return StagePlan(stage, tuple(streams), tuple(weights.values()), dropped)


def stage_weights(
    stage: Stage, catalogs: Mapping[str, Catalog], data: DataSection
) -> dict[str, float]:
    """The share of each catalog in a stage; those without a share are not there.

    Raises:
        DataError: none has a share, or several that have are to be counted in epochs.
    """
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
            f"epochs of its own: epochs = {stage.epochs} says nothing there. Give the stage steps."
        )
    return weights


def assemble_plan(
    version: int,
    first_step: int,
    stages: Sequence[StagePlan],
    batch_size: int,
    lengths: Sequence[int | None] | None = None,
) -> Plan:
    """Lay stages out on a timeline; `lengths` are their steps, where they are not the stages' own.

    Raises:
        DataError: a stage is shorter than the ramps at its two ends.
    """
    if lengths is None:
        lengths = [stage_length(each) for each in stages]
    ramps = [each.stage.ramp_steps // 2 * 2 for each in stages]
    ramps[:1] = [0] * len(ramps[:1])  # there is nothing before the first, or no longer
    for stage, length, ramp, following in zip(stages, lengths, ramps, [*ramps, 0][1:], strict=True):
        if length is not None and length < (ramp + following) // 2:
            raise DataError(
                f"Stage {stage.stage.name} has {length} steps, too few for its ramps: half of "
                f"{ramp} at its beginning and half of {following} at its end. Lower ramp_steps, or "
                "make the stage longer."
            )
    return Plan(
        version, first_step, tuple(stages), Timeline(tuple(lengths), tuple(ramps)), batch_size
    )


def stage_length(stage: StagePlan) -> int | None:
    if stage.stage.steps is not None:
        return stage.stage.steps
    return stage.streams[0].num_batches if len(stage.streams) == 1 else None


def _opened(part: Part, index: int) -> list[OpenEpoch]:
    """The epochs that a part has open at one of its batches."""
    opened, counted = [], part.leg.epoch_of(index)
    for epoch, positions in part.leg.left_at(index).items():
        rows = tuple(mine[where] for mine, where in zip(part.members.rows, positions, strict=True))
        left = Members(part.members.shapes, rows)
        consumed = _consumed(part, left)
        is_tail = epoch < counted
        opened.append(OpenEpoch(epoch, part.catalog, left, consumed, is_tail, part.owed))
    return opened


def _consumed(part: Part, left: Members) -> pa.Array:
    """Identities of a part's clips that are not left, and of those consumed before the plan."""
    identities = part.catalog.identities
    mine, still = (identities.take(pa.array(each.all_rows())) for each in (part.members, left))
    gone = mine.filter(pc.invert(pc.is_in(mine, value_set=still)))
    return gone if part.before is None else pa.concat_arrays([part.before, gone])
