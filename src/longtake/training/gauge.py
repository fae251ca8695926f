"""Measures gradients, weights and updates in every step, on this rank's share of them.

All that it gives are sums, so that those of the whole model are one collective away.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longtake.guard.history import GROUPS
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.fsdp import local_shard, num_copies, squares
from longtake.parallel.mesh import World
from longtake.training.groups import groups_of

_PROBES = 1024
"""Numbers of each parameter, spread evenly over it, by which an update is measured: a copy of all
weights would cost the memory of all weights. Of a parameter with no more than these it is exact."""


@dataclass(frozen=True)
class Norms:
    """Of a whole model; by group, and of all groups together."""

    grad_norm: float
    weight_norm: float
    update_ratio: float
    """Norm of the last update over that of the weights; 0 where there was none."""
    nonfinite_share: float
    """Of the gradients' numbers, those that are NaN or infinite."""
    group_grad_norms: dict[str, float]
    group_weight_norms: dict[str, float]
    group_update_ratios: dict[str, float]


class Gauge:
    """Measures one model; costs a pass over gradients and weights, and one wait for the device.

    Args:
        model: after it was spread over the ranks.
        blocks: of the model.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        groups = groups_of(model, blocks)
        self._parameters = [model.get_parameter(name) for name in groups]
        self._group_of = [GROUPS.index(group) for group in groups.values()]
        self.groups = tuple(group for group in GROUPS if group in groups.values())
        self._copies = num_copies(model)
        self._update: Tensor | Sequence[float] | None = None
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

    @torch.no_grad()
    def sums(self) -> dict[str, float]:
        """This rank's part of all sums of squares, for `norms`; forgets the last update.

        Call it when the gradients are there, before they are clipped.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        there = [local_shard(gradient) for gradient in gradients if gradient is not None]
        of_gradients, of_weights = (
            squares(there),
            squares([local_shard(p) for p in self._parameters]),
        )
        update = self._taken_update(of_weights.device)
        numbers = torch.cat([of_gradients.to(update.device), of_weights, update]).tolist()
        end = len(places)
        found = {"nonfinite": 0.0, "elements": float(sum(each.numel() for each in there))}
        if not all(map(math.isfinite, numbers[:end])):
            found["nonfinite"] = float(sum(int((~each.isfinite()).sum()) for each in there))
        found |= self._by_group("gradient", places, numbers[:end])
        weights = range(len(self._parameters))
        found |= self._by_group("weight", weights, numbers[end : end + len(weights)])
        found |= self._named("update", numbers[end + len(weights) :])
        return {name: value / self._copies for name, value in found.items()}

    def norms(self, sums: Mapping[str, float], scale: float) -> Norms:
        """The whole model's norms, from `sums` added up over all ranks.

        Args:
            sums: of all ranks together.
            scale: that the gradients will be multiplied with before they are clipped.
        """
        grads, weights, updates = (
            {group: sums[f"{kind}.{group}"] for group in self.groups}
            for kind in ("gradient", "weight", "update")
        )
        return Norms(
            grad_norm=scale * _root(sum(grads.values())),
            weight_norm=_root(sum(weights.values())),
            update_ratio=_ratio(sum(updates.values()), sum(weights.values())),
            nonfinite_share=sums["nonfinite"] / max(1.0, sums["elements"]),
            group_grad_norms={group: scale * _root(each) for group, each in grads.items()},
            group_weight_norms={group: _root(each) for group, each in weights.items()},
            group_update_ratios={
                group: _ratio(each, weights[group]) for group, each in updates.items()
            },
        )

    def is_sound(self, world: World) -> bool:
        """Whether all weights are finite numbers, on all ranks, each of which calls this."""
        mine = squares([local_shard(parameter) for parameter in self._parameters]).sum()
        return math.isfinite(sum_over_ranks({"weights": float(mine)}, world)["weights"])

    @contextmanager
    def of_update(self) -> Iterator[None]:
        """Measures the update that is made inside."""
        before = self._probe() if self._probed is None else self._probed
        yield
        self._probed = self._probe()  # nobody changes weights before the next update
        moved = self._probe_weight * (self._probed - before).square()
        sums = torch.zeros(len(GROUPS), dtype=torch.float64, device=moved.device)
        self._update = sums.index_add_(0, self._probe_group, moved.double())

    def last_update(self) -> dict[str, float]:
        """This rank's part of the last update's sums of squares, as in `sums`; stays measured."""
        update = self._taken_update(self._probe_weight.device)
        self._update = update
        named = self._named("update", update.tolist())
        return {name: value / self._copies for name, value in named.items()}

    def set_last_update(self, sums: Mapping[str, float], num_ranks: int) -> None:
        """Go on from `last_update`, added up over all ranks, with weights of a checkpoint."""
        self._probed = None
        by_group = [sums.get(f"update.{group}", 0.0) for group in GROUPS]
        self._update = [self._copies * each / num_ranks for each in by_group]

    @torch.no_grad()
    def _probe(self) -> Tensor:
        pairs = zip(self._parameters, self._strides, strict=True)
        return torch.cat([local_shard(each).flatten()[::stride].float() for each, stride in pairs])

    def _taken_update(self, device: torch.device) -> Tensor:
        update, self._update = self._update, None
        if isinstance(update, Tensor):
            return update
        return torch.tensor(update or [0.0] * len(GROUPS), dtype=torch.float64, device=device)

    def _by_group(
        self, kind: str, places: Sequence[int], numbers: Sequence[float]
    ) -> dict[str, float]:
        sums = [0.0] * len(GROUPS)
        for place, number in zip(places, numbers, strict=True):
            sums[self._group_of[place]] += number
        return self._named(kind, sums)

    def _named(self, kind: str, by_group: Sequence[float]) -> dict[str, float]:
        return {f"{kind}.{group}": by_group[GROUPS.index(group)] for group in self.groups}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _ratio(update: float, weight: float) -> float:
    return _root(update / weight) if weight > 0 else 0.0
