"""Norms of weights, gradients and updates, and the one all-reduce of each training step.

Every rank takes its decisions (skip, roll back, stop, save) from the same reduced numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longtake import heartbeat, process
from longtake.data.batch import Batch
from longtake.guard.history import GROUPS, POPULATIONS, StepStatistics
from longtake.models.added_module import ADDED
from longtake.optim.update import adapted_rate, masters_of, rate_factor, schedule_cycle
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
NO_FACTS: Mapping[str, float] = MappingProxyType({})
"""Facts of a step on a rank that has none to report: no signal, no failed clip and no failed
save."""
_PROBES = 1024
"""Most elements per parameter that are compared before and after an update to measure it, evenly
spaced: a copy of all weights would double their memory. A parameter with at most this many
elements is measured exactly."""
_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "ffn", "ff", "feed_forward", "proj_mlp", "proj_out")


# --- Norms ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norms:
    """Norms of gradients, weights and last update, of the whole model and by parameter group."""

    grad_norm: float
    weight_norm: float
    update_ratio: float  # norm of the last update over that of the weights; 0 without an update
    learning_rate_factor: float  # learning rate of the last update, in multiples of the recipe's
    nonfinite_share: float  # fraction of gradient elements that are NaN or inf
    group_grad_norms: dict[str, float]
    group_weight_norms: dict[str, float]
    group_update_ratios: dict[str, float]


class NormStats:
    """Measures gradient, weight and update norms of a model; waits for the device once per step."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], world: mesh.World) -> None:
        groups = parameter_groups(model, blocks)
        self._names = tuple(groups)
        # Indices into `_parameters`: with a gradient other than 0 so far, and with any gradient.
        self._moved, self._reached = set[int](), set[int]()
        self._parameters = [model.get_parameter(name) for name in groups]
        self._group_of = [GROUPS.index(group) for group in groups.values()]
        self.groups = tuple(group for group in GROUPS if group in groups.values())
        self._copies, self._num_ranks = world.num_copies, world.size
        self._update: Tensor | None = None  # [groups] squares of the last update
        self._rate = 0.0  # learning rate factor of the last update; 0: none was made
        self._before: tuple[Tensor, Tensor, float] | None = None  # see `measure_weights`
        self.freed: Mapping[Tensor, Tensor] = {}
        """Norms of the gradients that the backward pass has applied to weights and freed, by
        weight."""
        self._probed: Tensor | None = None
        shares = [local_shard(parameter) for parameter in self._parameters]
        strides = [max(1, -(-each.numel() // _PROBES)) for each in shares]
        self._strides = strides
        sizes = [-(-each.numel() // stride) for each, stride in zip(shares, strides, strict=True)]
        device = shares[0].device
        # A probed element stands for all elements up to the next probe.
        stands_for = [each.numel() / max(1, size) for each, size in zip(shares, sizes, strict=True)]
        repeats = torch.tensor(sizes)
        self._probe_weight = torch.tensor(stands_for).repeat_interleave(repeats).to(device)
        self._probe_group = torch.tensor(self._group_of).repeat_interleave(repeats).to(device)

    @property
    def num_parameters(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def measure_weights(self) -> tuple[Tensor, Tensor, float]:
        """Measure, for `sums`, the squares of the weights and of the last update, and its rate.

        Call it before a backward pass that updates weights; else `sums` does.
        """
        of_weights = squares([local_shard(p) for p in self._parameters])
        if self._probed is None:
            self._probed = self._probe()
        self._before = of_weights, self._take_update(), self._rate
        self._rate = 0.0
        return self._before

    @torch.no_grad()
    def sums(self, losses: SampleLosses | None = None) -> dict[str, float]:
        """Return this rank's share of the sums of squares for `norms`, before clipping.

        The tensor of losses comes with them in the one wait for the device; a step with NaN or inf
        waits again to count them. The last update is forgotten.
        """
        freed, self.freed = self.freed, {}
        # NaN and inf of a freed gradient are NaN in the weight to which it was applied.
        gradients = [p if p in freed else p.grad for p in self._parameters]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        shards = [local_shard(gradient) for gradient in gradients if gradient is not None]
        own = [freed[parameter] for parameter in self._parameters if parameter in freed]
        of_gradients = torch.stack(own).double().square() if own else squares(shards)
        of_weights, update, rate = self._before or self.measure_weights()
        self._before = None
        on_device = [] if losses is None else [losses.on_device.double()]
        # Zeros that `reduce_gradients` has filled in are no gradient of this rank.
        self._reached.update(i for i in present if not hasattr(gradients[i], "stands_in"))
        # One transfer for everything, as each one waits for the device.
        sums = [of_gradients.to(update.device), of_weights, update, *on_device]
        numbers = torch.cat(sums).tolist()
        if losses is not None:
            num_losses = len(losses.on_device)
            losses.set_losses(numbers[-num_losses:])
            numbers = numbers[:-num_losses]
        end = len(present)
        found = {"nonfinite": 0.0, "elements": float(sum(each.numel() for each in shards))}
        # Rare, so that counting may wait for the device once more.
        if not all(map(math.isfinite, numbers[:end])):
            found["nonfinite"] = float(sum(int((~each.isfinite()).sum()) for each in shards))
        self._moved.update(i for i, square in zip(present, numbers, strict=False) if square)
        found |= self._by_group("gradient", present, numbers[:end])
        weights = range(len(self._parameters))
        found |= self._by_group("weight", weights, numbers[end : end + len(weights)])
        found |= self._named("update", numbers[end + len(weights) :])
        # All ranks have the same rate, and replicas the same squares: each adds its part to the
        # sums.
        rate /= self._num_ranks
        return {name: value / self._copies for name, value in found.items()} | {"rate": rate}

    def norms(self, sums: Mapping[str, float], scale: float) -> Norms:
        """Return the norms of the whole model, from `sums` added up over all ranks."""
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
        """Return the names of parameters whose gradient was exactly 0 in each step so far.

        Parameters that no backward pass reaches are not among them: the memory plan reports those.
        All ranks must call it.
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
        """Measure the optimizer's update that is made inside the context, and its learning rate."""
        before = self._probe() if self._probed is None else self._probed
        # Before the update: a step uses the rate that the optimizer estimated in the step before.
        adapted = [adapted_rate(group) for each in optimizers for group in each.param_groups]
        yield
        groups = [group for each in optimizers for group in each.param_groups]
        rates = [own * rate_factor(each) for own, each in zip(adapted, groups, strict=True)]
        self._rate = max(rates, default=1.0)
        self._probed = self._probe()  # weights do not change before the next update
        moved = self._probe_weight * (self._probed - before).square()
        # The sums are fp64, as many squares are added.
        sums = torch.zeros(len(GROUPS), dtype=torch.float64, device=moved.device)
        self._update = sums.index_add_(0, self._probe_group, moved.double())

    def last_update(self) -> dict[str, float]:
        """Return this rank's share of the last update's sums of squares, and keep them."""
        self._update = self._take_update()
        named = self._named("update", self._update.tolist())
        own = {name: value / self._copies for name, value in named.items()}
        return own | {"rate": self._rate / self._num_ranks}

    def set_last_update(self, sums: Mapping[str, float], num_ranks: int) -> None:
        # The weights have been replaced by a checkpoint's.
        self._probed = None
        by_group = [sums.get(f"update.{group}", 0.0) for group in GROUPS]
        # Each rank holds an equal part, so that the sum over ranks gives the saved numbers again.
        part = [self._copies * each / num_ranks for each in by_group]
        update = torch.tensor(part, dtype=torch.float64)
        self._update = update.to(self._probe_weight.device, non_blocking=True)
        self._rate = sums.get("rate", 1.0)

    @torch.no_grad()
    def _probe(self) -> Tensor:
        pairs = zip(self._parameters, self._strides, strict=True)
        return torch.cat([local_shard(each).flatten()[::stride].float() for each, stride in pairs])

    def _take_update(self) -> Tensor:
        """Return the last update's sums of squares [groups], and forget them."""
        update, self._update = self._update, None
        if update is not None:
            return update
        return torch.zeros(len(GROUPS), dtype=torch.float64, device=self._probe_weight.device)

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
    # The comparison is false for NaN, so that the root of NaN is NaN.
    return math.sqrt(square) if square >= 0 else math.nan


def _ratio(update: float, weight: float) -> float:
    return _root(update / weight) if weight > 0 else 0.0


# --- Groups of parameters ---------------------------------------------------------------------


def parameter_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, str]:
    """Return the group of each trained parameter, by name: one of `longtake.guard.history.GROUPS`.

    `embedding` holds the layers before and after the blocks, `added` the user's own module, `other`
    the norms and the modulation of blocks.
    """
    names = {id(module): name for name, module in model.named_modules()}
    in_blocks = tuple(f"{names[id(block)]}." for block in blocks)
    groups = {}
    for name in (name for name, each in model.named_parameters() if each.requires_grad):
        parts = name.split(".")
        if name.startswith(f"{ADDED}."):
            groups[name] = "added"
        elif not name.startswith(in_blocks):
            groups[name] = "embedding"
        elif any(word in part for part in parts for word in _ATTENTION):
            groups[name] = "attention"
        elif any(part == word or part.startswith(f"{word}_") for part in parts for word in _MLP):
            groups[name] = "mlp"
        else:
            groups[name] = "other"
    return groups


# --- The collective of a step -----------------------------------------------------------------


@dataclass(frozen=True)
class StepSummary:
    """Facts about a training step that are reduced over all ranks, and equal on each."""

    statistics: StepStatistics  # meaningless if no sample was trained
    scale: float  # the batch's global size over the number of samples that were trained
    num_failures: int
    """Number of clips that could not be used, plus decoders that were replaced, over all ranks."""
    stop: str | None  # most urgent signal that asked any rank to stop
    save_failed: bool  # true if any rank could not write its part of a checkpoint
    save_due: bool  # true if `checkpoint.minutes` have passed by rank 0's clock
    unlike: tuple[int, ...] = ()  # ranks whose trained weights differ from their replicas'


def reduce_statistics(
    session: Session,
    losses: SampleLosses,
    batch: Batch,
    state: TrainingState,
    norms: NormStats,
    replicas: ReplicaCheck | None = None,
    local: Mapping[str, float] = NO_FACTS,
) -> StepSummary:
    """Sum this step's losses, norms and local facts over all ranks, which must all call it."""
    heartbeat.set_phase("collective")
    world, step, slots = session.world, state.global_step, dict[str, float]()
    if replicas is not None and replicas.is_due(step):
        # Each rank has a place of its own in the sum, so that every rank sees all checksums.
        slots = replicas.slots(checksum(replicated_tensors(state).values()))
    measured = norms.sums(losses)
    # Ranks that share a batch's tokens have the same losses, so that one of them counts.
    by_sigma = _losses(losses, batch) if world.speaks_for_data else _NO_LOSSES
    sums = collectives.sum_over_ranks({**by_sigma, **measured, **local, **slots}, world)
    unlike = replicas.unlike(sums, step) if replicas is not None and slots else ()
    num_samples = int(sum(each for name, each in sums.items() if ".samples." in name))
    # Clips that could not be decoded do not shrink the gradient of the mean loss.
    scale = batch.global_size / max(1, num_samples)
    return StepSummary(
        statistics=_statistics(session, sums, num_samples, batch, state, norms.norms(sums, scale)),
        scale=scale,
        num_failures=int(sums.get("failures", 0)),
        stop=next((name for name in process.EXIT_CODES if sums.get(f"stop.{name}")), None),
        save_failed=bool(sums.get("save_failed")),
        save_due=bool(sums.get("save_due")),
        unlike=tuple(unlike),
    )


def replicated_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return the trained weights and their fp32 masters, which are bitwise equal on replicas."""
    masters = masters_of(state.optimizers)
    parameters = state.components.model.named_parameters()
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    exact = {f"{n}, fp32": masters[each] for n, each in trained.items() if each in masters}
    return {**trained, **exact}


def _losses(samples: SampleLosses, batch: Batch) -> dict[str, float]:
    """Sum losses and count samples, with and without caption, by quarter of the noise level.

    Stand-ins for clips that could not be decoded are left out.
    """
    sums = dict(_NO_LOSSES)
    for loss, sigma, has_caption, weight in zip(
        samples.losses, samples.sigmas, samples.captioned, batch.weights.tolist(), strict=True
    ):
        population = POPULATIONS[0] if has_caption else POPULATIONS[1]
        # Sigma = 1 belongs to the last quarter.
        quarter = min(_QUARTERS - 1, int(_QUARTERS * sigma))
        # 0 times NaN is NaN: the loss of a stand-in must not enter the sum at all.
        sums[f"{population}.loss.{quarter}"] += weight * loss if weight else 0.0
        sums[f"{population}.samples.{quarter}"] += weight
    return sums


def _loss_levels(losses: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    """Return mean loss, number of samples and mean losses by quarter of the noise level [6]."""
    means = [
        loss / count if count else math.nan for loss, count in zip(losses, counts, strict=True)
    ]
    return (sum(losses) / sum(counts) if sum(counts) else math.nan, sum(counts), *means)


def _statistics(
    session: Session,
    sums: Mapping[str, float],
    num_samples: int,
    batch: Batch,
    state: TrainingState,
    norms: Norms,
) -> StepStatistics:
    step, section = state.global_step, session.recipe.optimizer
    # Restarts are counted up to the previous update: its rate is the one that is measured.
    num_restarts, _ = schedule_cycle(step - 1, session.recipe.training.steps, section)
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
        num_restarts=num_restarts,
        **vars(norms),
    )


def edge_of(batch: Batch) -> str | None:
    """Describe the epoch or stage that begins with a batch.

    None for other batches, and for the run's first.
    """
    if not batch.begins_epoch or batch.step == 0:
        return None
    source = "" if batch.source == "catalog" else f" (catalog {batch.source})"
    if batch.epoch == 0:
        return f"stage {batch.stage}{source} begins"
    return f"epoch {batch.epoch} of stage {batch.stage}{source} begins"
