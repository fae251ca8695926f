"""What changed in the data, and how a run goes on without repeating or missing a clip."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
    plans: Sequence[Plan],
    step: int,
    policy: Policy,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    batch_size: int,
    seed: int,
) -> Plan:
    """The plan that takes over from the newest of a run's plans at a global step.

    `finish` ends the epochs that are open as they were and begins the next ones on the new
    catalogs; `merge` trains in the rest of an open epoch exactly those clips of the new catalog
    that it has not consumed; `restart` leaves open epochs as they are and begins the next. A stage
    that is over does not come again, unless it is longer now.

    Raises:
        DataChangedError: the stage that the run is in is no longer part of the recipe, or a
            catalog that it has begun is.
        DataError: a stage selects no clips, or is not as long as its ramps.
    """
    standings = _standings(plans, step)
    following = _stages_to_come(plans, step, data)
    context = _Context(len(plans), policy, catalogs, data, batch_size, seed)
    stages: list[StagePlan] = []
    lengths: list[int | None] = []
    ended: dict[str, dict[str, int]] = {}
    for stage in following:
        taken_over, length, next_epochs = context.take_over(stage, standings.get(stage.name))
        if length is None or length > 0:
            stages.append(taken_over)
            lengths.append(length)
        else:
            ended[stage.name] = next_epochs
    if len(stages) > 1 and lengths[0] is not None:  # a change shortly before a ramp shortens it
        ramp = min(stages[1].stage.ramp_steps, 2 * lengths[0])
        stages[1] = replace(stages[1], stage=_with_ramp(stages[1].stage, ramp))
    return replace(assemble_plan(context.version, step, stages, batch_size, lengths), ended=ended)


_Progress = tuple[Stream, int] | int
"""A stream and how many batches it has given; or, where nothing of it is open, the next epoch."""


@dataclass(frozen=True)
class _Standing:
    """How far a run has got in a stage."""

    steps: int
    """That it has trained of it, over all plans."""
    streams: Mapping[str, _Progress]
    """By source."""
    gone_on: frozenset[str]
    """Sources that the newest plan still trains on in this stage."""


def _standings(plans: Sequence[Plan], step: int) -> dict[str, _Standing]:
    """Where each stage stands that any plan had, when the newest has come to a step."""
    ends = [*(plan.first_step for plan in plans[1:]), step]
    found: dict[str, _Standing] = {}
    for plan, end in zip(plans, ends, strict=True):
        for stage, counts in zip(plan.stages, plan.taken(end), strict=True):
            before = found.get(stage.stage.name, _Standing(0, {}, frozenset()))
            mine = {s.source: (s, n) for s, n in zip(stage.streams, counts, strict=True)}
            begun = frozenset(source for source, (_, count) in mine.items() if count)
            streams = {**before.streams, **mine}
            found[stage.stage.name] = _Standing(before.steps + sum(counts), streams, begun)
        for name, next_epochs in plan.ended.items():
            before = found.get(name, _Standing(0, {}, frozenset()))
            found[name] = _Standing(before.steps, {**before.streams, **next_epochs}, frozenset())
    return found


def _stages_to_come(plans: Sequence[Plan], step: int, data: DataSection) -> tuple[Stage, ...]:
    """The recipe's stages from the one on that the run is in, or was in last."""
    newest = next(plan for plan in reversed(plans) if plan.stages)
    end = newest.end_step if newest.end_step is not None else step
    lengths = zip(newest.stages, newest.taken(min(step, end)), newest.timeline.lengths, strict=True)
    unfinished = [old.stage.name for old, counts, n in lengths if n is None or sum(counts) < n]
    current = next(iter(unfinished), newest.stages[-1].stage.name)
    names = [stage.name for stage in data.curriculum()]
    if current not in names:
        raise DataChangedError(
            f"The run is in stage {current}, which is no longer among data.stages: "
            f"{', '.join(names)}. Keep a stage of that name, or start a new run with "
            "--set out=FOLDER."
        )
    return data.curriculum()[names.index(current) :]


def _with_ramp(stage: Stage, ramp_steps: int) -> Stage:
    return stage.model_copy(update={"ramp_steps": ramp_steps})


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
        self, stage: Stage, standing: _Standing | None
    ) -> tuple[StagePlan, int | None, dict[str, int]]:
        """A stage, how many steps of it are left, and the next epoch of each of its sources."""
        if standing is None:
            fresh = fresh_stage(stage, self.catalogs, self.data, self.batch_size, self.seed)
            return fresh, stage_length(fresh), {}
        if standing.steps:
            stage = _with_ramp(stage, 0)  # it has begun, too
        continued, next_epochs = self._continue_stage(stage, standing)
        if stage.steps is not None:
            return continued, stage.steps - standing.steps, next_epochs
        return continued, stage_length(continued) if continued.streams else 0, next_epochs

    def _continue_stage(
        self, stage: Stage, standing: _Standing
    ) -> tuple[StagePlan, dict[str, int]]:
        """The streams of a stage with what is left of their epochs, and their next ones."""
        weights = stage_weights(stage, self.catalogs, self.data)
        self._refuse_unfinished(stage, standing, weights)
        streams, shares, dropped, next_epochs = [], [], {}, {}
        for source, weight in weights.items():
            selection = select(self.catalogs[source], stage, self.data)
            before = standing.streams.get(source)
            parts, next_epochs[source] = self._parts(source, stage, selection.members, before)
            if parts:
                streams.append(Stream(stage.name, source, tuple(parts), next_epochs[source]))
                shares.append(weight)
                dropped[source] = selection.dropped
        return StagePlan(stage, tuple(streams), tuple(shares), dropped), next_epochs

    def _refuse_unfinished(
        self, stage: Stage, standing: _Standing, sources: Collection[str]
    ) -> None:
        """An epoch of a catalog that is gone cannot be gone on with, under whatever new name."""
        gone = ", ".join(sorted(standing.gone_on - set(sources)))
        new = ", ".join(sorted(set(sources) - standing.streams.keys()))
        if gone and new and self.policy != "restart":
            raise DataChangedError(
                f"Stage {stage.name} no longer trains on the catalog {gone}, but on {new}, whose "
                "epochs would begin anew: what they have in common would be repeated. If it is the "
                f"same data, keep its name: data.catalogs = {{ {gone} = PATH, … }}. If it is not, "
                "go on with data.on_change=restart."
            )
        if gone and self.policy == "finish":
            raise DataChangedError(
                f"Stage {stage.name} no longer trains on {gone}, so the epoch there cannot be "
                "finished. Keep it with its weight until the epoch is over, or go on with "
                "data.on_change=merge or restart, which leave it as it is."
            )

    def _parts(
        self,
        source: str,
        stage: Stage,
        members: Members,
        progress: _Progress | None,
    ) -> tuple[list[Part], int]:
        """The rests of open epochs and the whole epochs after them, and which is the first."""
        begun, following = _begun(progress)
        parts = []
        for epoch in begun:
            is_newest = epoch.epoch == following - 1 and not epoch.is_tail
            part = self._rest(source, stage, epoch, members, is_newest=is_newest)
            if part is not None:
                parts.append(part)
        left = None if stage.epochs is None else stage.epochs - following
        if left is None or left > 0:
            leg = self._leg(f"{stage.name}/{source}", members, following, left)
            parts.append(Part(leg, members, self.catalogs[source]))
        return parts, following

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


def _begun(progress: _Progress | None) -> tuple[list[OpenEpoch], int]:
    """The epochs that a stream has begun and not ended, and the first that it has not begun."""
    if progress is None or isinstance(progress, int):
        return [], progress or 0
    stream, index = progress
    epochs = stream.open_at(index)
    if not stream.is_whole_at(index):
        return [each for each in epochs if each.epoch < stream.first_epoch], stream.first_epoch
    newest = max((each.epoch for each in epochs if len(each.consumed)), default=-1)
    begun = [each for each in epochs if each.epoch <= newest]
    if begun:
        return begun, newest + 1
    return [], epochs[0].epoch if epochs else stream.epoch_at(index)


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


def _without(one: Catalog, other: Catalog) -> NDArray[np.integer[Any]]:
    return np.flatnonzero(~pc.is_in(one.identities, value_set=other.identities).to_numpy(False))


def _examples(what: str, catalog: Catalog, rows: NDArray[np.integer[Any]]) -> list[str]:
    clips = [catalog.clip(int(row)) for row in rows[:_EXAMPLES]]
    return [f"{what}: {clip.identity[:12]} {clip.path}" for clip in clips]
