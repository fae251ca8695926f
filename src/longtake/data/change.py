"""What changed in the data, and how a run goes on without repeating or missing a clip."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.config import DataSection, Stage
from longtake.data.buckets import Members
from longtake.data.catalog import Catalog
from longtake.data.order import Leg
from longtake.data.plan import (
    OpenEpoch,
    Part,
    Plan,
    StagePlan,
    Stream,
    assemble_plan,
    fresh_stage,
    stage_length,
    stage_weights,
)
from longtake.data.stages import select
from longtake.errors import DataChangedError

Policy = Literal["finish", "merge", "restart"]

_EXAMPLES = 3


@dataclass(frozen=True)
class Difference:
    """How two catalogs differ, by identity."""

    added: int
    removed: int
    recaptioned: int
    """Clips in both, with another caption."""
    reshaped: int
    """Clips in both, with another frame count, size, stream or rotation."""
    replaced: int
    """Paths in both, with another content: counted among the added and the removed, too."""
    examples: tuple[str, ...]

    def __str__(self) -> str:
        counts = (
            f"{self.added} clips added, {self.removed} removed, {self.recaptioned} with another "
            f"caption, {self.reshaped} of another shape"
        )
        replaced = f"; {self.replaced} files have another content" if self.replaced else ""
        return counts + replaced + "".join(f"\n    {example}" for example in self.examples)


def compare(old: Catalog, new: Catalog) -> Difference:
    """How a catalog differs from an older one."""
    added, removed = _without(new, old), _without(old, new)
    both_old = np.flatnonzero(pc.is_in(old.identities, value_set=new.identities).to_numpy(False))
    both_new = np.flatnonzero(pc.is_in(new.identities, value_set=old.identities).to_numpy(False))
    texts = [
        catalog.table["caption"].take(pa.array(rows))
        for catalog, rows in ((old, both_old), (new, both_new))
    ]
    recaptioned = np.flatnonzero(pc.not_equal(*texts).to_numpy())
    reshaped = np.zeros(len(both_old), bool)
    for name in ("num_frames", "width", "height", "stream_index", "rotation"):
        reshaped |= old.column(name)[both_old] != new.column(name)[both_new]
    paths = [
        {catalog.clip(int(row)).path for row in rows} if len(rows) <= 10**5 else set()
        for catalog, rows in ((new, added), (old, removed))
    ]
    examples = [
        *_examples("added", new, added),
        *_examples("removed", old, removed),
        *_examples("changed", new, both_new[recaptioned]),
        *_examples("changed", new, both_new[reshaped]),
    ]
    return Difference(
        added=len(added),
        removed=len(removed),
        recaptioned=len(recaptioned),
        reshaped=int(reshaped.sum()),
        replaced=len(paths[0] & paths[1]),
        examples=tuple(examples),
    )


def go_on(
    plan: Plan,
    step: int,
    policy: Policy,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
) -> Plan:
    """The plan that takes over from another at a global step.

    `finish` ends the epochs that are open as they were and begins the next ones on the new
    catalogs; `merge` trains in the rest of an open epoch exactly those clips of the new catalog
    that it has not consumed; `restart` leaves open epochs as they are and begins the next.

    Raises:
        DataChangedError: the stage that the run is in is no longer part of the recipe.
        DataError: a stage selects no clips, or is not as long as its ramps.
    """
    if not plan.stages:  # it had come to its end
        return assemble_plan(plan.version + 1, step, (), batch_size)
    names = [stage.name for stage in data.curriculum()]
    taken = plan.taken(step)
    unfinished = {
        old.stage.name: (old, counts, length)
        for old, counts, length in zip(plan.stages, taken, plan.timeline.lengths, strict=True)
        if length is None or sum(counts) < length
    }
    current = next(iter(unfinished), plan.stages[-1].stage.name)
    if current not in names:
        raise DataChangedError(
            f"The run is in stage {current}, which is no longer among data.stages: "
            f"{', '.join(names)}. Keep a stage of that name, or start a new run with "
            "--set out=FOLDER."
        )
    context = _Context(plan.version + 1, policy, catalogs, data, batch_size, seed)
    following = data.curriculum()[names.index(current) + (not unfinished) :]
    laid_out = [context.take_over(stage, unfinished.get(stage.name)) for stage in following]
    laid_out = [(stage, length) for stage, length in laid_out if length is None or length > 0]
    stages, lengths = [stage for stage, _ in laid_out], [length for _, length in laid_out]
    return assemble_plan(context.version, step, stages, batch_size, lengths)


@dataclass(frozen=True)
class _Context:
    """What a plan that takes over is made from."""

    version: int
    policy: Policy
    catalogs: Mapping[str, Catalog]
    data: DataSection
    batch_size: int
    seed: int

    def take_over(
        self, stage: Stage, begun: tuple[StagePlan, Sequence[int], int | None] | None
    ) -> tuple[StagePlan, int | None]:
        """A stage and its steps, given how far the plan before got in it (None: not planned)."""
        if begun is None:
            fresh = fresh_stage(stage, self.catalogs, self.data, self.batch_size, self.seed)
            return fresh, stage_length(fresh)
        old, taken, length = begun
        if any(taken):
            stage = stage.model_copy(update={"ramp_steps": 0})  # it has begun, too
        continued = self._continue_stage(old, taken, stage)
        return continued, _steps_left(old.stage, stage, length, sum(taken), continued)

    def _continue_stage(self, old: StagePlan, taken: Sequence[int], stage: Stage) -> StagePlan:
        """The streams of a stage with what is left of their epochs."""
        weights = stage_weights(stage, self.catalogs, self.data)
        self._refuse_unfinished(old, weights)
        open_epochs = {
            stream.source: stream.open_at(index)
            for stream, index in zip(old.streams, taken, strict=True)
        }
        streams, shares, dropped = [], [], {}
        for source, weight in weights.items():
            selection = select(self.catalogs[source], stage, self.data)
            parts = self._parts(source, stage, selection.members, open_epochs.get(source, []))
            if parts:
                streams.append(Stream(stage.name, source, tuple(parts)))
                shares.append(weight)
                dropped[source] = selection.dropped
        return StagePlan(stage, tuple(streams), tuple(shares), dropped)

    def _refuse_unfinished(self, old: StagePlan, sources: Collection[str]) -> None:
        """To finish is to end what is open; a catalog that is gone cannot be ended."""
        gone = [stream.source for stream in old.streams if stream.source not in sources]
        if gone and self.policy == "finish":
            raise DataChangedError(
                f"Stage {old.stage.name} no longer trains on {', '.join(gone)}, so the epoch there "
                "cannot be finished. Keep it with its weight until the epoch is over, or go on "
                "with data.on_change=merge or restart, which leave it as it is."
            )

    def _parts(
        self, source: str, stage: Stage, members: Members, epochs: Sequence[OpenEpoch]
    ) -> list[Part]:
        """The rests of open epochs, and the whole epochs after them."""
        newest = max((each.epoch for each in epochs if len(each.consumed)), default=-1)
        begun = [each for each in epochs if each.epoch <= newest]
        following = newest + 1 if begun or not epochs else epochs[0].epoch
        parts = []
        for epoch in begun:
            is_newest = epoch.epoch == newest and not epoch.is_tail
            part = self._rest(source, stage, epoch, members, is_newest=is_newest)
            if part is not None:
                parts.append(part)
        left = None if stage.epochs is None else stage.epochs - following
        if left is None or left > 0:
            leg = self._leg(f"{stage.name}/{source}", members, following, left)
            parts.append(Part(leg, members, self.catalogs[source]))
        return parts

    def _rest(
        self, source: str, stage: Stage, epoch: OpenEpoch, members: Members, *, is_newest: bool
    ) -> Part | None:
        """What an open epoch is still to consume; None: nothing."""
        catalog, owed = self.catalogs[source], None
        if self.policy == "restart":
            return None
        if self.policy == "finish":
            catalog, rest, owed = epoch.catalog, epoch.left, epoch.owed
        elif is_newest:
            rest, owed = _filtered(catalog, members, drop=epoch.consumed), members
        else:
            left = epoch.catalog.identities.take(pa.array(epoch.left.all_rows()))
            rest = _filtered(catalog, members, keep=left)
        if not len(rest):
            return None
        leg = self._leg(f"{stage.name}/{source}", rest, epoch.epoch, 1)
        return Part(leg, rest, catalog, epoch.consumed, owed)

    def _leg(self, name: str, members: Members, epoch: int, num_epochs: int | None) -> Leg:
        name = f"{name}/{self.version}"
        return Leg(members.sizes, self.batch_size, self.seed, name, epoch, num_epochs)


def _filtered(
    catalog: Catalog, members: Members, *, keep: pa.Array = None, drop: pa.Array = None
) -> Members:
    """Members that are among `keep`, or that are not among `drop`."""
    rows = []
    for mine in members.rows:
        identities = catalog.identities.take(pa.array(mine))
        is_named = pc.is_in(identities, value_set=keep if drop is None else drop).to_numpy(False)
        rows.append(mine[is_named if drop is None else ~is_named])
    return Members(members.shapes, tuple(rows))


def _steps_left(
    before: Stage, now: Stage, length: int | None, taken: int, continued: StagePlan
) -> int | None:
    """How long a stage that has begun goes on."""
    if now.steps is None:
        return stage_length(continued) if continued.streams else 0
    if before.steps is None or length is None:
        return now.steps
    return length - taken + now.steps - before.steps


def _without(one: Catalog, other: Catalog) -> NDArray[np.integer[Any]]:
    """Rows of a catalog whose identities another does not have."""
    return np.flatnonzero(~pc.is_in(one.identities, value_set=other.identities).to_numpy(False))


def _examples(what: str, catalog: Catalog, rows: NDArray[np.integer[Any]]) -> list[str]:
    clips = [catalog.clip(int(row)) for row in rows[:_EXAMPLES]]
    return [f"{what}: {clip.identity[:12]} {clip.path}" for clip in clips]
