"""Norms of a model, the one collective of each step, and the guard's verdict from its sums.

Every rank decides from the same reduced numbers: skip, roll back, stop, save.
"""

import math
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longtake import fsio, heartbeat, process
from longtake.data.loader import Batch, Loader
from longtake.guard.detectors import OK, GuardVerdict, judge
from longtake.guard.history import (
    GROUPS,
    POPULATIONS,
    GuardSettings,
    History,
    JudgedStep,
    StepStatistics,
)
from longtake.models.added_module import ADDED
from longtake.optim.update import adapted_rate, masters_of, rate_factor
from longtake.parallel import collectives, mesh
from longtake.parallel.fsdp import local_shard, squares
from longtake.parallel.replicas import ReplicaCheck, checksum
from longtake.training.session import SampleLosses, Session, TrainingState

_QUARTERS = 4
_NO_LOSSES = {
    f"{population}.{what}.{quarter}": 0.0
    for population in POPULATIONS
    for what in ("loss", "samples")
    for quarter in range(_QUARTERS)
}
_PROBES = 1024
"""Numbers of each parameter, spread evenly over it, by which an update is measured: a copy of all
weights would cost the memory of all weights. Exact for a parameter with no more numbers."""
_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "ff", "feed_forward", "proj_mlp", "proj_out")


# --- Norms ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norms:
    """Norms of a whole model, by group and of all groups together."""

    grad_norm: float
    weight_norm: float
    update_ratio: float  # norm of the last update over that of the weights; 0 where there was none
    learning_rate_factor: float  # the rate of that update, in multiples of the recipe's
    nonfinite_share: float  # of the gradients' numbers, those that are NaN or infinite
    group_grad_norms: dict[str, float]
    group_weight_norms: dict[str, float]
    group_update_ratios: dict[str, float]


class NormStats:
    """Measures one model: a pass over gradients and weights, and one wait for the device."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], world: mesh.World) -> None:
        groups = parameter_groups(model, blocks)
        self._names = tuple(groups)
        self._moved, self._reached = set[int](), set[int]()
        self._parameters = [model.get_parameter(name) for name in groups]
        self._group_of = [GROUPS.index(group) for group in groups.values()]
        self.groups = tuple(group for group in GROUPS if group in groups.values())
        self._copies, self._num_ranks = world.num_copies, world.size
        self._update: Tensor | Sequence[float] | None = None
        self._rate = 0.0  # of the last update
        self._probed: Tensor | None = None
        shares = [local_shard(parameter) for parameter in self._parameters]
        strides = [max(1, -(-each.numel() // _PROBES)) for each in shares]
        self._strides = strides
        sizes = [-(-each.numel() // stride) for each, stride in zip(shares, strides, strict=True)]
        device = shares[0].device
        stands_for = [each.numel() / max(1, size) for each, size in zip(shares, sizes, strict=True)]
        repeats = torch.tensor(sizes)
        self._probe_weight = torch.tensor(stands_for).repeat_interleave(repeats).to(device)
        self._probe_group = torch.tensor(self._group_of).repeat_interleave(repeats).to(device)

    @property
    def num_parameters(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def sums(self, losses: SampleLosses | None = None) -> dict[str, float]:
        """This rank's part of all sums of squares, before gradients are clipped; for `norms`.

        Forgets the last update. The one wait for the device brings the step's losses as well; a
        step with NaN or inf waits again to count them.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        shards = [local_shard(gradient) for gradient in gradients if gradient is not None]
        of_gradients = squares(shards)
        of_weights = squares([local_shard(p) for p in self._parameters])
        update = self._taken_update(of_weights.device)
        on_device = [] if losses is None else [losses.on_device.double()]
        self._reached.update(i for i in present if not hasattr(gradients[i], "stands_in"))
        sums = [of_gradients.to(update.device), of_weights, update, *on_device]
        numbers = torch.cat(sums).tolist()
        if losses is not None:
            num_losses = len(losses.on_device)
            losses.set_losses(numbers[-num_losses:])
            numbers = numbers[:-num_losses]
        end = len(present)
        found = {"nonfinite": 0.0, "elements": float(sum(each.numel() for each in shards))}
        if not all(map(math.isfinite, numbers[:end])):
            found["nonfinite"] = float(sum(int((~each.isfinite()).sum()) for each in shards))
        self._moved.update(i for i, square in zip(present, numbers, strict=False) if square)
        found |= self._by_group("gradient", present, numbers[:end])
        weights = range(len(self._parameters))
        found |= self._by_group("weight", weights, numbers[end : end + len(weights)])
        found |= self._named("update", numbers[end + len(weights) :])
        rate, self._rate = self._rate, 0.0
        return {name: value / self._copies for name, value in found.items()} | self._part(rate)

    def norms(self, sums: Mapping[str, float], scale: float) -> Norms:
        """The whole model's norms, from `sums` added up over all ranks."""
        grads, weights, updates = (
            {group: sums[f"{kind}.{group}"] for group in self.groups}
            for kind in ("gradient", "weight", "update")
        )
        return Norms(
            grad_norm=scale * _root(sum(grads.values())),
            weight_norm=_root(sum(weights.values())),
            update_ratio=_ratio(sum(updates.values()), sum(weights.values())),
            learning_rate_factor=sums["rate"],
            nonfinite_share=sums["nonfinite"] / max(1.0, sums["elements"]),
            group_grad_norms={group: scale * _root(each) for group, each in grads.items()},
            group_weight_norms={group: _root(each) for group, each in weights.items()},
            group_update_ratios={
                group: _ratio(each, weights[group]) for group, each in updates.items()
            },
        )

    def without_gradient(self, world: mesh.World) -> list[str]:
        """Parameters that a backward pass reached, and each gradient so far was exactly 0.

        Of none that no graph reaches: a plan names these. All ranks call it.
        """
        for index in self._reached - self._moved:
            gradient = self._parameters[index].grad
            if gradient is not None and local_shard(gradient).any():  # its square was too small
                self._moved.add(index)
        everyone = collectives.gather_objects((self._reached, self._moved), world)
        reached, moved = (set[int]().union(*each) for each in zip(*everyone, strict=True))
        return [self._names[index] for index in sorted(reached - moved)]

    def all_finite(self, world: mesh.World) -> bool:
        mine = squares([local_shard(parameter) for parameter in self._parameters]).sum()
        return math.isfinite(collectives.sum_over_ranks({"weights": float(mine)}, world)["weights"])

    @contextmanager
    def track_update(self, optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
        """Measure the update that is made inside the block, and the rate that it is made with."""
        before = self._probe() if self._probed is None else self._probed
        # A step uses the estimate of the step before.
        adapted = [adapted_rate(group) for each in optimizers for group in each.param_groups]
        yield
        groups = [group for each in optimizers for group in each.param_groups]
        rates = [own * rate_factor(each) for own, each in zip(adapted, groups, strict=True)]
        self._rate = max(rates, default=1.0)
        self._probed = self._probe()  # weights do not change before the next update
        moved = self._probe_weight * (self._probed - before).square()
        sums = torch.zeros(len(GROUPS), dtype=torch.float64, device=moved.device)
        self._update = sums.index_add_(0, self._probe_group, moved.double())

    def last_update(self) -> dict[str, float]:
        """This rank's part of the last update's sums of squares, as in `sums`."""
        update = self._taken_update(self._probe_weight.device)
        self._update = update
        named = self._named("update", update.tolist())
        return {name: value / self._copies for name, value in named.items()} | self._part(
            self._rate
        )

    def set_last_update(self, sums: Mapping[str, float], num_ranks: int) -> None:
        self._probed = None
        by_group = [sums.get(f"update.{group}", 0.0) for group in GROUPS]
        self._update = [self._copies * each / num_ranks for each in by_group]
        self._rate = sums.get("rate", 1.0)

    def _part(self, rate: float) -> dict[str, float]:
        return {"rate": rate / self._num_ranks}

    @torch.no_grad()
    def _probe(self) -> Tensor:
        pairs = zip(self._parameters, self._strides, strict=True)
        return torch.cat([local_shard(each).flatten()[::stride].float() for each, stride in pairs])

    def _taken_update(self, device: torch.device) -> Tensor:
        update, self._update = self._update, None
        if isinstance(update, Tensor):
            return update
        if update is None:
            return torch.zeros(len(GROUPS), dtype=torch.float64, device=device)
        return torch.tensor(update, dtype=torch.float64).to(device, non_blocking=True)

    def _by_group(
        self, kind: str, indices: Sequence[int], numbers: Sequence[float]
    ) -> dict[str, float]:
        sums = [0.0] * len(GROUPS)
        for index, number in zip(indices, numbers, strict=True):
            sums[self._group_of[index]] += number
        return self._named(kind, sums)

    def _named(self, kind: str, by_group: Sequence[float]) -> dict[str, float]:
        return {f"{kind}.{group}": by_group[GROUPS.index(group)] for group in self.groups}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _ratio(update: float, weight: float) -> float:
    return _root(update / weight) if weight > 0 else 0.0


# --- Groups of parameters ---------------------------------------------------------------------


def parameter_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, str]:
    """The group (`longtake.guard.history.GROUPS`) of each trained parameter, by its name.

    `embedding`: what comes before and after the blocks; `added`: the user's own module; `other`:
    norms and modulation of a block.
    """
    names = {id(module): name for name, module in model.named_modules()}
    in_blocks = tuple(f"{names[id(block)]}." for block in blocks)
    return {
        name: _group(name, in_blocks)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _group(name: str, in_blocks: tuple[str, ...]) -> str:
    if name.startswith(f"{ADDED}."):
        return "added"
    if not name.startswith(in_blocks):
        return "embedding"
    parts = name.split(".")
    if any(word in part for part in parts for word in _ATTENTION):
        return "attention"
    if any(part == word or part.startswith(f"{word}_") for part in parts for word in _MLP):
        return "mlp"
    return "other"


# --- The collective of a step -----------------------------------------------------------------


@dataclass(frozen=True)
class StepSummary:
    """What all ranks know about a step, the same on each."""

    statistics: StepStatistics  # for the guard; meaningless if no sample was trained
    scale: float  # the batch's global size over the number of samples that were trained
    num_troubles: int
    """Clips that could not be decoded and decoders that were replaced, over all ranks."""
    stop: str | None  # the signal by which a rank was asked to stop; of several, the most urgent
    save_failed: bool  # whether a checkpoint could not be written, on any rank
    save_due: bool  # whether `checkpoint.minutes` have passed, by the clock of rank 0
    unlike: tuple[int, ...] = ()  # ranks whose trained weights are unlike those of their replicas


def reduce_statistics(
    session: Session,
    losses: SampleLosses,
    batch: Batch,
    state: TrainingState,
    norms: NormStats,
    local: Mapping[str, float],
    replicas: ReplicaCheck | None = None,
) -> StepSummary:
    """Add up what each rank has measured, with its `local_facts`; all ranks call it once a step."""
    heartbeat.set_phase("collective")
    world, step, slots = session.world, state.global_step, dict[str, float]()
    if replicas is not None and replicas.is_due(step):
        slots = replicas.slots(checksum(replicated_tensors(state).values()))
    measured = norms.sums(losses)
    by_sigma = _losses(losses, batch) if world.speaks_for_data else _NO_LOSSES
    sums = collectives.sum_over_ranks({**by_sigma, **measured, **local, **slots}, world)
    unlike = replicas.unlike(sums, step) if replicas is not None and slots else ()
    num_samples = int(sum(each for name, each in sums.items() if ".samples." in name))
    scale = batch.global_size / max(1, num_samples)
    return StepSummary(
        statistics=_statistics(sums, num_samples, batch, state, norms.norms(sums, scale)),
        scale=scale,
        num_troubles=int(sums["troubles"]),
        stop=next((name for name in process.EXIT_CODES if sums[f"stop.{name}"]), None),
        save_failed=bool(sums["save_failed"]),
        save_due=bool(sums["save_due"]),
        unlike=tuple(unlike),
    )


def replicated_tensors(state: TrainingState) -> dict[str, Tensor]:
    """The trained weights and their fp32 masters, which replicas hold to the bit."""
    masters = masters_of(state.optimizers)
    parameters = state.components.model.named_parameters()
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    exact = {f"{n}, fp32": masters[each] for n, each in trained.items() if each in masters}
    return {**trained, **exact}


def local_facts(
    loader: Loader, stop: str | None, save_failed: bool, save_due: bool = False
) -> dict[str, float]:
    troubles = len(loader.failures) + len(loader.incidents)
    signals = {f"stop.{name}": float(name == stop) for name in process.EXIT_CODES}
    return {"troubles": troubles, **signals, "save_failed": save_failed, "save_due": save_due}


def _losses(samples: SampleLosses, batch: Batch) -> dict[str, float]:
    """Sums of losses, and numbers of samples, by population and quarter of the sigmas.

    Without stand-ins.
    """
    sums = dict(_NO_LOSSES)
    for loss, sigma, has_caption, weight in zip(
        samples.losses, samples.sigmas, samples.captioned, batch.weights.tolist(), strict=True
    ):
        population = POPULATIONS[0] if has_caption else POPULATIONS[1]
        quarter = min(_QUARTERS - 1, int(_QUARTERS * sigma))
        sums[f"{population}.loss.{quarter}"] += weight * loss if weight else 0.0
        sums[f"{population}.samples.{quarter}"] += weight
    return sums


def _loss_levels(losses: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    """[6] as `StepStatistics.population`, from sums of losses and numbers by quarter."""
    means = [
        loss / count if count else math.nan for loss, count in zip(losses, counts, strict=True)
    ]
    return (sum(losses) / sum(counts) if sum(counts) else math.nan, sum(counts), *means)


def _statistics(
    sums: Mapping[str, float],
    num_samples: int,
    batch: Batch,
    state: TrainingState,
    norms: Norms,
) -> StepStatistics:
    step = state.global_step
    losses, counts = (
        [[sums[f"{each}.{what}.{quarter}"] for quarter in range(_QUARTERS)] for each in POPULATIONS]
        for what in ("loss", "samples")
    )
    captioned, dropped = map(_loss_levels, losses, counts)
    of_all = (list(map(sum, zip(*each, strict=True))) for each in (losses, counts))
    loss, _, first, second, third, fourth = _loss_levels(*of_all)
    return StepStatistics(
        step=step,
        batch=batch.step,
        stage=batch.stage,
        edge=edge_of(batch),
        bucket=str(batch.bucket),
        loss=loss if num_samples else 0.0,
        num_samples=num_samples,
        loss_by_sigma=(first, second, third, fourth),
        captioned=captioned,
        dropped=dropped,
        **vars(norms),
    )


def edge_of(batch: Batch) -> str | None:
    """Which epoch or stage begins with a batch, in words; None: none, or the run itself."""
    if not batch.begins_epoch or batch.step == 0:
        return None
    source = "" if batch.source == "catalog" else f" (catalog {batch.source})"
    if batch.epoch == 0:
        return f"stage {batch.stage}{source} begins"
    return f"epoch {batch.epoch} of stage {batch.stage}{source} begins"


# --- The guard --------------------------------------------------------------------------------


_REPORTED_SAMPLE_STEPS = 16
_NAMED_CLIPS = 3
_REPORTED_STEPS = 128
_MAX_NAMED_GRADIENTS = 3
_GRADIENT_STEPS = 10
"""Judged steps after which each trained parameter must have had a gradient."""
_MAX_NAMED_PARAMETERS = 6


class GuardRunner:
    """The guard of one run, the same on every rank."""

    def __init__(self, session: Session) -> None:
        self.settings = GuardSettings.of(session.recipe.guard)
        self.history = History(self.settings.window)
        self._run, self._world = session.run, session.world
        self._data = session.recipe.data
        self._gradient_steps = _GRADIENT_STEPS  # that are still to be counted
        # What is added to a frozen model from scratch has no gradient while that gives 0.
        is_trained = session.recipe.model.pretrained is not None or session.parent is not None
        learns = is_trained or session.recipe.trainable.base() == "full"
        self._ends_without_gradient = self.settings.mode == "act" and learns
        # Of each step the samples that this rank trained, as a report has them.
        self._samples: deque[list[dict[str, Any]]] = deque(maxlen=_REPORTED_SAMPLE_STEPS)

    def judge(
        self, statistics: StepStatistics, losses: SampleLosses, batch: Batch, unlike: str = ""
    ) -> GuardVerdict:
        """The verdict on a step before its update; the step becomes part of the history.

        `unlike` says how replicas of the weights differ, if they do.
        """
        self._samples.append(_trained_samples(statistics, losses, batch, self._world))
        if unlike:  # checkpoints up to now were compared before they were saved
            verdict = GuardVerdict("roll_back", "replicas", unlike, statistics.step)
        else:
            verdict = judge(self.history, statistics, self.settings)
        verdict = self._by_mode(verdict)
        done = "ok" if self.allows(verdict) else verdict.kind
        self.history = self.history.append(JudgedStep(statistics, done))
        return verdict

    def judge_gradients(
        self, norms: NormStats, batch: Batch, statistics: StepStatistics
    ) -> GuardVerdict:
        """End a run some of whose weights have had no gradient in its first steps, with names.

        Counts steps that can reach all: with a caption, and with videos if there are any. LoRA and
        layers that begin at zero pass gradient on after a step or two.
        """
        is_image = all(shape.num_frames == 1 for shape in self._data.shapes())
        is_whole = is_image or batch.bucket.num_frames > 1
        if not self._gradient_steps or not is_whole or not statistics.population("captioned")[1]:
            return OK
        self._gradient_steps -= 1
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
        if verdict.reason == "no_gradient" and not self._ends_without_gradient:
            return True
        return verdict.kind == "ok" or (self.settings.mode != "act" and verdict.kind != "stop")

    def _by_mode(self, verdict: GuardVerdict) -> GuardVerdict:
        mode = self.settings.mode
        if mode != "act" and verdict.reason in ("non_finite", "replicas"):  # it cannot go on so
            return replace(verdict, kind="stop")
        return OK if mode == "off" else verdict

    def load(self, data: Any) -> None:
        self.history = History.from_json(data, self.settings.window)
        self._samples.clear()
        if len(self.history) >= _GRADIENT_STEPS:
            self._gradient_steps = 0

    def report(
        self,
        verdict: GuardVerdict,
        statistics: StepStatistics,
        losses: SampleLosses,
        state: TrainingState,
    ) -> tuple[GuardVerdict, str | None]:
        """Write a report on the newest step's verdict; all ranks call it."""
        verdict = _explain_non_finite(verdict, statistics, losses, state, self._world)
        host = {"host": socket.gethostname()}
        mine = [host | each for step in self._samples for each in step]
        everyone = collectives.gather_objects(mine, self._world)
        if not self._world.is_first:
            return verdict, None
        samples = [each for some in everyone for each in some]
        if verdict.reason == "non_finite" and (clips := _name_non_finite_clips(samples)):
            verdict = replace(verdict, message=f"{verdict.message} {clips}")
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
    where = {"step": statistics.step, "batch": statistics.batch, "rank": world.rank}
    samples = zip(batch.identities, batch.captions, batch.epochs, losses.sigmas, strict=True)
    rows = zip(samples, losses.losses, batch.weights.tolist(), strict=True)
    keys = ("identity", "caption", "epoch", "sigma", "loss")
    return [
        where | dict(zip(keys, (*row, loss if math.isfinite(loss) else str(loss)), strict=True))
        for row, loss, weight in rows
        if weight and world.speaks_for_data
    ]


def _name_non_finite_clips(samples: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on clips whose loss was never finite, while that of others was; or nothing.

    Args:
        samples: of a report: the loss of one that is not finite is a text.
    """
    steps = dict[str, list[int]]()
    for each in samples:
        if isinstance(each["loss"], str):
            steps.setdefault(each["identity"], []).append(each["step"])
    finite = [each for each in samples if not isinstance(each["loss"], str)]
    first = min((min(found) for found in steps.values()), default=0)
    if not any(each["step"] >= first for each in finite):  # the model, not a clip
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


# --- Where NaN and inf came from --------------------------------------------------------------


def _explain_non_finite(
    verdict: GuardVerdict,
    statistics: StepStatistics,
    losses: SampleLosses,
    state: TrainingState,
    world: mesh.World,
) -> GuardVerdict:
    """The verdict; of `non_finite` its message locates NaN and inf. All ranks must call it."""
    if verdict.reason != "non_finite":
        return verdict
    parts, message = state.components, [verdict.message]
    where = _non_finite_ranks(losses, parts.model, world)
    if where:
        message.append(f"It came from {where}.")
    if not math.isfinite(statistics.grad_norm):
        message.append(
            describe_non_finite_gradients(parts.model, parts.family.blocks(parts.model), world)
        )
    if not math.isfinite(statistics.loss):
        message.append("The loss is NaN or inf: it was already lost in the forward pass.")
    return replace(verdict, message=" ".join(message))


def _non_finite_ranks(losses: SampleLosses, model: nn.Module, world: mesh.World) -> str:
    """Ranks with NaN or inf in their own losses, or else in their gradient shards, if not all.

    A gradient that is NaN on one rank before it is reduced is NaN on all after that.
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

    Those at the model's end come first.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    is_replicated = world is not None and world.num_copies > 1
    combine = max if is_replicated else sum  # one copy alone may have NaN
    mine = _count_non_finite(gradients)
    everyone = [mine] if world is None else collectives.gather_objects(mine, world)
    non_finite = [name for name in gradients if any(name in counts for counts in everyone)]
    if not non_finite:
        return (
            "Each gradient is finite, but together they are so large that the sum of their squares "
            "is not."
        )
    named = []
    for name in non_finite[: -_MAX_NAMED_GRADIENTS - 1 : -1]:
        counts = zip(*(counts.get(name, (0, 0)) for counts in everyone), strict=True)
        num_nan, num_infinite = map(combine, counts)
        where = f"{name} ({_block_of(name, model, blocks)})"
        named.append(f"{where}, {_numbers(num_nan, num_infinite, gradients[name].numel())}")
    more = " and more" if len(non_finite) > _MAX_NAMED_GRADIENTS else ""
    return (
        f"NaN or infinity is in the gradients of {len(non_finite)} of {len(gradients)} trained "
        "parameters. A backward pass runs from the model's end to its beginning, so the last ones "
        f"were lost first: {'; '.join(named)}{more}."
    )


@torch.no_grad()
def _count_non_finite(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Number of NaN and of inf in this rank's shard of each gradient that has any."""
    found = {}
    for name, gradient in gradients.items():
        shard = local_shard(gradient)
        # The norm is cheaper than counting; it may also overflow without NaN or inf.
        if not torch.linalg.vector_norm(shard, dtype=torch.float32).isfinite():
            found[name] = (int(shard.isnan().sum()), int(shard.isinf().sum()))
    return {name: counts for name, counts in found.items() if any(counts)}


def _numbers(num_nan: int, num_infinite: int, num_all: int) -> str:
    counts = [f"{num_nan} NaN"] * bool(num_nan) + [f"{num_infinite} infinite"] * bool(num_infinite)
    return f"{' and '.join(counts)} of {num_all} numbers"


def _block_of(name: str, model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Which block a parameter is in, counted from 1."""
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks, start=1):
        if name.startswith(f"{names[id(block)]}."):
            return f"block {number} of {len(blocks)}"
    return "outside the blocks"
