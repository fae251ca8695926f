"""The guard of a run: judges each step before its update, so that a divergence does no harm.

The verdict is the same on every rank, because it depends only on statistics that are reduced over
all ranks. A report of it lists the samples of the last steps and the origin of NaN and inf.
"""

import math
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longtake import fsio
from longtake.data.batch import Batch
from longtake.guard.detectors import OK, GuardVerdict, judge
from longtake.guard.history import GuardSettings, History, JudgedStep, StepStatistics
from longtake.parallel import collectives, mesh
from longtake.parallel.fsdp import local_shard
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.statistics import NormStats

_REPORTED_SAMPLE_STEPS = 16
_NAMED_CLIPS = 3
_REPORTED_STEPS = 128
_MAX_NAMED_GRADIENTS = 3
_GRADIENT_STEPS = 10
"""Number of judged steps within which each trained parameter must have had a gradient other
than 0."""
_MAX_NAMED_PARAMETERS = 6


@dataclass(frozen=True)
class Decision:
    """The guard's verdict on a training step, and what it allows; ranks differ in messages only."""

    statistics: StepStatistics
    verdict: GuardVerdict
    is_allowed: bool  # see `GuardRunner.allows`

    @property
    def has_samples(self) -> bool:
        """False if no clip of the batch could be decoded, so that there is nothing to learn."""
        return bool(self.statistics.num_samples)

    @property
    def applies_update(self) -> bool:
        return self.is_allowed and self.has_samples

    @property
    def ends_loop(self) -> bool:
        return self.verdict.kind in ("roll_back", "stop") and not self.is_allowed


class GuardRunner:
    """Judges each step of a run; every rank has a guard, and all of them decide the same.

    Args:
        session: this launch of the run.
        constants: values of `GuardSettings` in place of the recipe's, such as in fault drills.
    """

    def __init__(self, session: Session, **constants: int) -> None:
        if session.recipe.optimizer.fused_backward:  # the update is made: it cannot be skipped
            constants = {**constants, "max_skips": 0}
        self.settings = GuardSettings(**{**session.recipe.guard.model_dump(), **constants})
        self.history = History(self.settings.window)
        self._run, self._world = session.run, session.world
        self._data = session.recipe.data
        self._gradient_steps = _GRADIENT_STEPS  # steps that `judge_gradients` still counts
        # A module that is added to a random frozen model has no gradient while the model returns 0:
        # for such a run, parameters without gradient are only reported.
        is_trained = session.recipe.model.pretrained is not None or session.parent is not None
        learns = is_trained or session.recipe.trainable.base() == "full"
        self._ends_without_gradient = self.settings.mode == "act" and learns
        # This rank's trained samples of each of the last steps, as a report lists them.
        self._samples: deque[list[dict[str, Any]]] = deque(maxlen=_REPORTED_SAMPLE_STEPS)

    def judge(
        self, statistics: StepStatistics, losses: SampleLosses, batch: Batch, unlike: str = ""
    ) -> GuardVerdict:
        """Judge a training step before its update, and append the verdict to the history.

        Args:
            statistics: the step's statistics, reduced over all ranks.
            losses: losses of this rank's samples.
            batch: this rank's share of the batch.
            unlike: sentence on differences between replicas of the weights; empty if equal.
        """
        self._samples.append(_trained_samples(statistics, losses, batch, self._world))
        if unlike:  # weights are compared before each save, so checkpoints are good
            verdict = GuardVerdict("roll_back", "replicas", unlike, statistics.step)
        else:
            verdict = judge(self.history, statistics, self.settings)
        mode = self.settings.mode
        if mode != "act" and verdict.reason in ("non_finite", "replicas"):  # it cannot recover
            verdict = replace(verdict, kind="stop")
        elif mode == "off":
            verdict = OK
        # The history records what was done: a step whose verdict was only reported is trained.
        done = "ok" if self.allows(verdict) else verdict.kind
        self.history = self.history.append(JudgedStep(statistics, done))
        return verdict

    def judge_gradients(
        self, norms: NormStats, batch: Batch, statistics: StepStatistics
    ) -> GuardVerdict:
        """Return `stop` if some trained weights had no gradient in the run's first steps.

        Only steps that reach every parameter count: those with a caption, and with videos if the
        recipe trains any. Several steps are needed because LoRA and zero-initialised layers pass on
        a gradient only after a step or two.
        """
        is_image = all(shape.num_frames == 1 for shape in self._data.shapes())
        is_whole = is_image or batch.bucket.num_frames > 1
        if not self._gradient_steps or not is_whole or not statistics.population("captioned")[1]:
            return OK
        self._gradient_steps -= 1
        # Only after the last of these steps, since all ranks have to gather for it.
        names = [] if self._gradient_steps else norms.without_gradient(self._world)
        if not names or self.settings.mode == "off":
            return OK
        shown = ", ".join(names[:_MAX_NAMED_PARAMETERS])
        more = len(names) - _MAX_NAMED_PARAMETERS
        message = (
            f"Of {norms.num_parameters} trained parameters {len(names)} had a gradient of exactly "
            f"0 in each of the first {_GRADIENT_STEPS} steps: {shown}"
            f"{f' and {more} more' if more > 0 else ''}. They do not train. A layer that begins at "
            "0 behind another one that does, a product with 0, or a ReLU that is never positive "
            "makes it so. Let one of the two begin with small numbers, or do not train these; "
            "with --set guard.mode=report the run continues."
        )
        return GuardVerdict("stop", "no_gradient", message, statistics.step)

    def allows(self, verdict: GuardVerdict) -> bool:
        """Return whether the step is trained: its verdict is `ok`, or is only reported.

        Only reported are weights without gradient in a run that may have none at first, and in
        mode `report` all verdicts but those on NaN, inf and unlike replicas, for which `judge`
        returns `stop`. Mode `off` has no other verdicts than these.
        """
        if verdict.reason == "no_gradient" and not self._ends_without_gradient:
            return True
        return verdict.kind == "ok" or (self.settings.mode != "act" and verdict.kind != "stop")

    def load(self, data: Any) -> None:
        self.history = History.from_json(data, self.settings.window)
        # Steps after the checkpoint are trained again, and recorded then.
        self._samples.clear()
        # After this many steps the check of gradients has ended, or nearly so.
        if len(self.history) >= _GRADIENT_STEPS:
            self._gradient_steps = 0

    def report(
        self,
        verdict: GuardVerdict,
        statistics: StepStatistics,
        losses: SampleLosses,
        state: TrainingState,
    ) -> tuple[GuardVerdict, str | None]:
        """Write a report on the guard's verdict on the newest step; all ranks must call it.

        Returns the verdict, with the origin of NaN and inf in its message, and on rank 0 the
        report's path in the run directory.
        """
        if verdict.reason == "non_finite":
            parts, found = state.components, [verdict.message]
            if ranks := _non_finite_ranks(losses, parts.model, self._world):
                found.append(f"It came from {ranks}.")
            if not math.isfinite(statistics.grad_norm):
                blocks = parts.family.blocks(parts.model)
                found.append(describe_non_finite_gradients(parts.model, blocks, self._world))
            if not math.isfinite(statistics.loss):
                found.append("The loss is NaN or inf: it was already lost in the forward pass.")
            verdict = replace(verdict, message=" ".join(found))
        host = {"host": socket.gethostname()}
        mine = [host | each for step in self._samples for each in step]
        everyone = collectives.gather_objects(mine, self._world)
        if not self._world.is_first:
            return verdict, None
        samples = [each for some in everyone for each in some]
        if verdict.reason == "non_finite" and (clips := _name_non_finite_clips(samples)):
            verdict = replace(verdict, message=f"{verdict.message} {clips}")
        # A step that is trained again after a rollback may get a second report.
        number = len(list(self._run.guard_path.glob(f"step_{statistics.step:08d}_*.json")))
        path = self._run.guard_report_path(statistics.step, number)
        resumable = (step for step in self._run.checkpoint_steps() if step <= statistics.step)
        report = {
            "step": statistics.step,
            "batch": statistics.batch,
            "time": fsio.now(),
            "verdict": asdict(verdict),
            "history": [
                {**each.statistics.as_dict(), "verdict": each.verdict_kind}
                for each in list(self.history)[-_REPORTED_STEPS:]
            ],
            "samples": samples,
            "state": {"checkpoint": max(resumable, default=None)},
        }
        self._run.write_record(path, report)
        return verdict, str(path.relative_to(self._run.path))


def _trained_samples(
    statistics: StepStatistics, losses: SampleLosses, batch: Batch, world: mesh.World
) -> list[dict[str, Any]]:
    """Return records of the samples that this rank trained in a step, for the guard's report."""
    where = {"step": statistics.step, "batch": statistics.batch, "rank": world.rank}
    samples = zip(batch.identities, batch.captions, batch.epochs, losses.sigmas, strict=True)
    rows = zip(samples, losses.losses, batch.weights.tolist(), strict=True)
    keys = ("identity", "caption", "epoch", "sigma", "loss")
    return [
        # JSON has neither NaN nor inf. Stand-ins have weight 0, and of the ranks that share clips
        # only one may list them.
        where | dict(zip(keys, (*row, loss if math.isfinite(loss) else str(loss)), strict=True))
        for row, loss, weight in rows
        if weight and world.speaks_for_data
    ]


def _name_non_finite_clips(samples: Sequence[Mapping[str, Any]]) -> str:
    """Describe clips whose loss was NaN or inf each time, while others' was finite; "" without any.

    Args:
        samples: trained samples as in a guard's report, where a loss that is not finite is a
            string.
    """
    steps = dict[str, list[int]]()
    for each in samples:
        if isinstance(each["loss"], str):
            steps.setdefault(each["identity"], []).append(each["step"])
    finite = [each for each in samples if not isinstance(each["loss"], str)]
    first = min((min(found) for found in steps.values()), default=0)
    if not any(each["step"] >= first for each in finite):  # the model is at fault, not a clip
        return ""
    for each in finite:
        steps.pop(each["identity"], None)
    captions = {each["identity"]: each["caption"] for each in samples}
    named = [
        f"{identity[:12]} ({captions[identity]!r:.80}, {len(found)} times)"
        for identity, found in steps.items()
        if len(found) > 1
    ]
    if not named:
        return ""
    return (
        f"Each time that it was trained, the loss of {', '.join(named[:_NAMED_CLIPS])} was NaN or "
        "infinite, and that of others was not: look at this clip, its caption and its inputs."
    )


def _non_finite_ranks(losses: SampleLosses, model: nn.Module, world: mesh.World) -> str:
    """Name the ranks with NaN or inf in their losses, else in their gradients; "" if all have it.

    Losses are looked at first, since reduction spreads a NaN gradient of one rank to all.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    in_losses = not all(math.isfinite(loss) for loss in losses.losses)
    in_gradients = any(not bool(each.isfinite().all()) for each in gradients)
    everyone = collectives.gather_objects((socket.gethostname(), in_losses, in_gradients), world)
    for index in (1, 2):
        ranks = [rank for rank, facts in enumerate(everyone) if facts[index]]
        if 0 < len(ranks) < world.size:
            hosts = ", ".join(sorted({everyone[rank][0] for rank in ranks}))
            return f"rank {', '.join(map(str, ranks))} of {world.size} alone (on {hosts})"
    return ""


def describe_non_finite_gradients(
    model: nn.Module, blocks: Sequence[nn.Module], world: mesh.World | None = None
) -> str:
    """Name the parameters whose gradients hold NaN or inf on any rank; all ranks must call it.

    The parameters nearest to the model's end come first. With `optimizer.fused_backward`, which has
    applied and freed the gradients, NaN and inf are looked for in the weights.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    where_found = "gradients"
    if not gradients:
        gradients = {name: p for name, p in model.named_parameters() if p.requires_grad}
        where_found = "weights, which this step's gradients have updated,"
    is_replicated = world is not None and world.num_copies > 1
    combine = max if is_replicated else sum  # shards add up; replicas count the same elements
    mine = _count_non_finite(gradients)
    everyone = [mine] if world is None else collectives.gather_objects(mine, world)
    non_finite = [name for name in gradients if any(name in counts for counts in everyone)]
    if not non_finite:
        return (
            "Each gradient is finite, but together they are so large that the sum of their squares "
            "is not."
        )
    module_names = {id(module): name for name, module in model.named_modules()}
    tops = [f"{module_names[id(block)]}." for block in blocks]
    named = []
    for name in non_finite[: -_MAX_NAMED_GRADIENTS - 1 : -1]:
        counts = zip(*(counts.get(name, (0, 0)) for counts in everyone), strict=True)
        num_nan, num_infinite = map(combine, counts)
        lost = [f"{num_nan} NaN"] * bool(num_nan) + [f"{num_infinite} infinite"] * bool(
            num_infinite
        )
        block = next((i for i, top in enumerate(tops, start=1) if name.startswith(top)), None)
        where = "outside the blocks" if block is None else f"block {block} of {len(tops)}"
        where = f"{name} ({where})"
        named.append(f"{where}, {' and '.join(lost)} of {gradients[name].numel()} numbers")
    more = " and more" if len(non_finite) > _MAX_NAMED_GRADIENTS else ""
    return (
        f"NaN or infinity is in the {where_found} of {len(non_finite)} of {len(gradients)} trained "
        "parameters. A backward pass runs from the model's end to its beginning, so the last ones "
        f"were lost first: {'; '.join(named)}{more}."
    )


@torch.no_grad()
def _count_non_finite(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Count NaN and inf in this rank's shard of the gradients, by name of the parameter.

    Gradients without any are left out.
    """
    found = {}
    for name, gradient in gradients.items():
        shard = local_shard(gradient)
        # The norm is cheaper than counting; it may also overflow without NaN or inf.
        if not torch.linalg.vector_norm(shard, dtype=torch.float32).isfinite():
            found[name] = (int(shard.isnan().sum()), int(shard.isinf().sum()))
    return {name: counts for name, counts in found.items() if any(counts)}
