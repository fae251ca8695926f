"""Makes the plan that replaces a run's data plan in mid-run, because data or recipe changed.

Each stage, stream and open epoch is taken over by the recipe's `data.on_change`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from longtake.config import DataSection, Stage
from longtake.data import plan as planning
from longtake.data.buckets import BucketAssignment, Rows
from longtake.data.catalog import Catalog
from longtake.data.plan import OpenEpoch, Part, Plan, PlanInputs, StagePlan, Stream
from longtake.errors import DataChangedError

Policy = Literal["finish", "merge", "restart"]


def replan(plans: Sequence[Plan], step: int, policy: Policy, inputs: PlanInputs) -> Plan:
    """Make the data plan that replaces a run's newest plan from a global step on.

    `finish` ends open epochs as they were and begins the next ones on the new catalogs. `merge`
    trains in the rest of an open epoch exactly those clips of the new catalog that it has not
    consumed. `restart` begins the next epochs at once. Among finished stages, only the last may be
    made longer.

    Raises:
        DataChangedError: the run's stage is gone, or a catalog's open epoch cannot be continued.
    """
    progress = _progress_by_stage(plans, step)
    context = _ChangedInputs(**vars(inputs), version=len(plans), policy=policy)
    stages: list[StagePlan] = []
    lengths: list[int | None] = []
    ended: dict[str, dict[str, int]] = {}
    for stage in remaining_stages(plans, step, inputs.data):
        taken_over, length, next_epochs = context.take_over(stage, progress.get(stage.name))
        if length is None or length > 0:
            stages.append(taken_over)
            lengths.append(length)
        else:
            ended[stage.name] = next_epochs
    if len(stages) > 1 and lengths[0] is not None:  # a change just before a ramp shortens it
        # Half of a ramp lies before the border, within what is left of the first stage.
        ramp = min(stages[1].section.ramp_steps, 2 * lengths[0])
        stages[1] = replace(stages[1], section=_with_ramp(stages[1].section, ramp))
    plan = planning.assemble_plan(context.version, step, stages, inputs.batch_size, lengths)
    return replace(plan, ended=ended)


# A stream with the number of its trained batches; or, without an open epoch, the next epoch.
_StreamProgress = tuple[Stream, int] | int


@dataclass(frozen=True)
class _StageProgress:
    """Progress of a run in one stage of its curriculum, added up over all its data plans."""

    steps: int
    streams: Mapping[str, _StreamProgress]  # progress by source
    active: frozenset[str]  # sources that the newest plan trains on in this stage


def _progress_by_stage(plans: Sequence[Plan], step: int) -> dict[str, _StageProgress]:
    # Each plan was followed until the next one began, and the newest until `step`.
    ends = [*(plan.first_step for plan in plans[1:]), step]
    found: dict[str, _StageProgress] = {}
    for plan, end in zip(plans, ends, strict=True):
        for stage, counts in zip(plan.stages, plan.taken(end), strict=True):
            before = found.get(stage.name, _StageProgress(0, {}, frozenset()))
            mine = {s.source: (s, n) for s, n in zip(stage.streams, counts, strict=True)}
            # Sources without a trained batch can be dropped from the recipe without harm.
            begun = frozenset(source for source, (_, count) in mine.items() if count)
            streams = {**before.streams, **mine}
            found[stage.name] = _StageProgress(before.steps + sum(counts), streams, begun)
        for name, next_epochs in plan.ended.items():
            before = found.get(name, _StageProgress(0, {}, frozenset()))
            found[name] = _StageProgress(
                before.steps, {**before.streams, **next_epochs}, frozenset()
            )
    return found


def remaining_stages(plans: Sequence[Plan], step: int, data: DataSection) -> tuple[Stage, ...]:
    """Return the recipe's stages from the one on that the run is in (or was last in).

    Raises:
        DataChangedError: that stage is not in the recipe.
    """
    # A plan that replaced one after its last step may have no stages.
    newest = next(plan for plan in reversed(plans) if plan.stages)
    end = newest.end_step if newest.end_step is not None else step
    lengths = zip(newest.stages, newest.taken(min(step, end)), newest.timeline.lengths, strict=True)
    unfinished = [old.name for old, counts, n in lengths if n is None or sum(counts) < n]
    current = next(iter(unfinished), newest.stages[-1].name)
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


@dataclass(frozen=True, kw_only=True)
class _ChangedInputs(PlanInputs):
    """The inputs of a new plan, which takes over the stages of a run's earlier plans."""

    version: int  # number of earlier plans
    policy: Policy

    def take_over(
        self, stage: Stage, done: _StageProgress | None
    ) -> tuple[StagePlan, int | None, dict[str, int]]:
        """Plan the rest of a stage; return it, its number of steps, and catalogs' next epochs."""
        if done is None:
            fresh = self.fresh_stage(stage)
            return fresh, planning.stage_length(fresh), {}
        if done.steps:
            stage = _with_ramp(stage, 0)  # the ramp has begun too, and cannot be planned again
        # A stage with a fixed number of steps gets the rest of them, else the rest of its epochs.
        continued, next_epochs = self._continue_stage(stage, done)
        if stage.steps is not None:
            return continued, stage.steps - done.steps, next_epochs
        return continued, planning.stage_length(continued), next_epochs

    def _continue_stage(
        self, stage: Stage, done: _StageProgress
    ) -> tuple[StagePlan, dict[str, int]]:
        self._refuse_unfinished(stage, done, self.stage_weights(stage))
        streams, weights, dropped, next_epochs = [], [], {}, {}
        for source, (selection, weight) in self.select(stage).items():
            before = done.streams.get(source)
            parts, next_epochs[source] = self._parts(source, stage, selection.members, before)
            if parts:
                streams.append(Stream(stage.name, source, tuple(parts), next_epochs[source]))
                weights.append(weight)
                dropped[source] = selection.dropped
        mixed = planning.mixture(streams, weights)
        return StagePlan(stage, tuple(streams), mixed, dropped), next_epochs

    def _refuse_unfinished(
        self, stage: Stage, done: _StageProgress, sources: Collection[str]
    ) -> None:
        gone = ", ".join(sorted(done.active - set(sources)))
        new = ", ".join(sorted(set(sources) - done.streams.keys()))
        if gone and new and self.policy != "restart":
            raise DataChangedError(
                f"Stage {stage.name} no longer trains on the catalog {gone}, but on {new}, whose "
                "epochs would begin anew: what they have in common would be repeated. If it is the "
                f"same data, keep its name: data.catalogs = {{ {gone} = PATH, … }}. If it is not, "
                "resume with data.on_change=restart."
            )
        if gone and self.policy == "finish":
            raise DataChangedError(
                f"Stage {stage.name} no longer trains on {gone}, so the epoch there cannot be "
                "finished. Keep it with its weight until the epoch is over, or resume with "
                "data.on_change=merge or restart, which leave it as it is."
            )

    def _parts(
        self,
        source: str,
        stage: Stage,
        members: BucketAssignment,
        progress: _StreamProgress | None,
    ) -> tuple[list[Part], int]:
        """Return the runs of epochs (parts) that a catalog has left in a stage.

        They are the rests of unfinished epochs, and then all whole epochs, whose first is returned
        too.
        """
        begun, following = _begun(progress)
        parts = []
        for epoch in begun:
            is_newest = epoch.epoch == following - 1 and not epoch.is_tail
            part = self._rest(source, stage, epoch, members, is_newest=is_newest)
            if part is not None:
                parts.append(part)
        epochs = self.num_epochs(stage, source)
        left = None if epochs is None else epochs - following
        if left is None or left > 0:
            span = self.epoch_span(stage, members, self._name(stage, source), following, left)
            parts.append(Part(span, members, self.catalogs[source]))
        return parts, following

    def _rest(
        self,
        source: str,
        stage: Stage,
        epoch: OpenEpoch,
        members: BucketAssignment,
        *,
        is_newest: bool,
    ) -> Part | None:
        """Return a part with the clips that an unfinished epoch has left to train; None if none."""
        catalog, expected = self.catalogs[source], None
        if self.policy == "restart":
            return None
        if self.policy == "finish":
            catalog, rest, expected = epoch.catalog, epoch.left, epoch.expected
        elif is_newest:
            # Old and new plan together must have consumed each clip of the new catalog.
            rest, expected = _filtered(catalog, members, drop=epoch.consumed), members
        # Older epochs' tails get no new clips: these belong to the newest epoch. Removed clips are
        # left out.
        else:
            left = epoch.catalog.identities.take(pa.array(epoch.left.all_rows()))
            rest = _filtered(catalog, members, keep=left)
        if not len(rest):
            return None
        span = self.epoch_span(stage, rest, self._name(stage, source), epoch.epoch, 1)
        return Part(span, rest, catalog, epoch.consumed, expected)

    def _name(self, stage: Stage, source: str) -> str:
        # The version makes the new order of clips independent of the replaced plan's.
        return f"{stage.name}/{source}/{self.version}"


def _begun(progress: _StreamProgress | None) -> tuple[list[OpenEpoch], int]:
    """Return a catalog's unfinished epochs in a stage, and the first that has not begun."""
    if progress is None or isinstance(progress, int):
        return [], progress or 0
    stream, index = progress
    epochs = stream.open_at(index)
    # Within the rest of an old epoch, later epochs of the stream have not begun.
    if not stream.is_whole_at(index):
        return [each for each in epochs if each.epoch < stream.first_epoch], stream.first_epoch
    newest = max((each.epoch for each in epochs if len(each.consumed)), default=-1)
    begun = [each for each in epochs if each.epoch <= newest]
    if begun:
        return begun, newest + 1
    return [], epochs[0].epoch if epochs else stream.epoch_at(index)


def _filtered(
    catalog: Catalog, members: BucketAssignment, *, keep: pa.Array = None, drop: pa.Array = None
) -> BucketAssignment:
    def is_kept(rows: Rows) -> NDArray[np.bool_]:
        identities = catalog.identities.take(pa.array(rows))
        named = pc.is_in(identities, value_set=keep if drop is None else drop)
        is_named: NDArray[np.bool_] = named.to_numpy(False)
        return is_named if drop is None else ~is_named

    return members.filtered(is_kept)
