"""Muon: momentum with orthogonalised steps, for the matrices of a transformer."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longtake.optim.master_weights import Fp32Optimizer
from longtake.parallel.fsdp import local_shard

# The quintic of Keller Jordan's Muon: it lifts small singular values fast and leaves all of them
# in about [0.7, 1.2], which serves as well as exactly 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_MAX_BATCH_ELEMENTS = 2**27
"""Most elements in a batch of matrices gathered by Muon: half a GiB in fp32, on top of the
shards."""


class Muon(Fp32Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for parameters of two dimensions.

    After Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): with the
    momentum M of a weight [rows, columns], the weight moves by
    `-lr * sqrt(max(1, rows / columns)) * orthogonalise(M)`, after it has been scaled by
    `1 - lr * weight_decay`. It takes the same settings and the same steps as `torch.optim.Muon`
    with `adjust_lr_fn="original"`, but orthogonalises all weights of equal shape in one batch,
    which halves the time of small models, and accepts the sharded parameters of FSDP2.

    The state of a parameter is `momentum_buffer`, and `master` where the weight is not fp32: the
    copy that is updated in its place. Both are fp32, in the parameter's own layout. The ranks that
    share parameters also share the work: each gathers some of the momenta whole, orthogonalises
    them, and sends every rank its shard of the result. Any number of ranks takes the same step.
    So do the ranks of `replicas`, which hold the same whole parameters and gradients.

    Raises:
        ValueError: a parameter does not have two dimensions, or a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        num_iterations: int = 5,
        dtype: torch.dtype = torch.bfloat16,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1 or num_iterations < 1:
            raise ValueError(
                f"Muon cannot run with lr={lr}, momentum={momentum}, weight_decay={weight_decay}, "
                f"num_iterations={num_iterations}; expected lr and weight_decay of 0 or more, "
                "momentum in [0, 1) and at least one iteration."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "num_iterations": num_iterations,
        }
        self._dtype, self._replicas = dtype, replicas
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to Muon; ValueError for parameters that are not matrices."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon takes parameters of two dimensions, not of {list(parameter.shape)}; "
                    "give this one to AdamW."
                )

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        num_matrices = 0
        for batch in in_batches(parameters):
            # `first` continues the count, so that the extra matrices of many batches spread over
            # all ranks instead of meeting on the first.
            self._step_batch(batch, group, first=num_matrices)
            num_matrices += len(batch)

    def _step_batch(self, parameters: list[Tensor], group: dict[str, Any], first: int) -> None:
        """Update weights of equal shape by Muon; `first` counts the matrices of earlier batches."""
        directions = [self._direction(parameter, group) for parameter in parameters]
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        matrices = torch.stack([local_shard(each) for each in directions]).to(self._dtype)
        steps: Iterable[Tensor]
        if isinstance(parameters[0], DTensor):
            share = _Share.of(parameters[0], len(parameters), first)
            whole = share.gather(matrices)
            # A rank may have no whole matrix of a batch, but takes part in both exchanges.
            if len(whole):
                whole = orthogonalise(whole, group["num_iterations"])
            steps = share.scatter(whole)
        elif self._replicas is not None:
            steps = _orthogonalise_among(self._replicas, matrices, group["num_iterations"], first)
        else:
            steps = orthogonalise(matrices, group["num_iterations"])
        for parameter, step in zip(parameters, steps, strict=True):
            weight: Tensor = self.state[parameter].get("master", parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            local_shard(weight).add_(step.to(weight.dtype), alpha=-group["lr"] * scale)
            if weight is not parameter:
                parameter.copy_(weight)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return a weight's momentum after this step's gradient, in the weight's layout."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(self.add_master(parameter))
        momentum: Tensor = state["momentum_buffer"]
        gradient = parameter.grad.to(momentum.dtype)
        momentum.lerp_(gradient, 1 - group["momentum"])
        if not group["nesterov"]:
            return momentum
        return torch.lerp(gradient, momentum, group["momentum"])


def orthogonalise(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Approximate the nearest matrices whose singular values are all 1.

    The Newton-Schulz iteration of Keller Jordan's Muon, X <- aX + (bA + cA^2)X with A = XX^T, in
    the type of the matrices.

    Args:
        matrices: [num_matrices, rows, columns].
        num_iterations: five bring the singular values of a usual gradient into about [0.7, 1.2].

    Returns:
        [num_matrices, rows, columns].
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices  # the smaller of the two products X X^T
    # The Frobenius norm bounds the singular values by 1, where the iteration converges.
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(num_iterations):
        gram = x @ x.transpose(1, 2)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.transpose(1, 2) if is_tall else x


def in_batches(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split parameters into batches of equal shape and bounded size, in one order on all ranks."""
    groups: defaultdict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape, parameter.device].append(parameter)
    batches = []
    for (shape, _), group in groups.items():
        # Each rank gathers only its share of a batch, so batches grow with the number of ranks.
        most = max(1, _MAX_BATCH_ELEMENTS // shape.numel()) * _num_shards(group[0])
        batches += [group[start : start + most] for start in range(0, len(group), most)]
    return batches


def _num_shards(parameter: Tensor) -> int:
    return parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1


def _counts(num_matrices: int, num_ranks: int, first: int) -> list[int]:
    """Return how many matrices each rank orthogonalises; the numbers differ by at most one.

    `first` shifts the ranks that have one more.
    """
    counts = [num_matrices // num_ranks] * num_ranks
    for number in range(first, first + num_matrices % num_ranks):
        counts[number % num_ranks] += 1
    return counts


def _orthogonalise_among(
    replicas: dist.ProcessGroup, matrices: Tensor, num_iterations: int, first: int
) -> list[Tensor]:
    """Orthogonalise a batch of matrices, some on each rank, and gather all on every rank."""
    counts = _counts(len(matrices), replicas.size(), first)
    begin, count = sum(counts[: replicas.rank()]), counts[replicas.rank()]
    # All ranks send equally many; the zeros behind a rank's own matrices are cut off below.
    mine = matrices.new_zeros(max(counts), *matrices.shape[1:])
    if count:
        mine[:count] = orthogonalise(matrices[begin : begin + count], num_iterations)
    gathered = matrices.new_empty(len(counts), *mine.shape)
    # torch 2.13 has another name for it and warns of the old one.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather(gathered.flatten(0, 1), mine, replicas)
    parts = zip(gathered, counts, strict=True)
    return [step for part, count in parts for step in part[:count]]


@dataclass(frozen=True)
class _Share:
    """Split of a batch of matrices into those that each rank gathers whole.

    The matrices are sharded by rows over a process group.
    """

    group: dist.ProcessGroup
    rank: int  # within `group`
    columns: int
    rows: list[int]  # rows of a matrix, by rank
    counts: list[int]  # whole matrices, by rank

    @classmethod
    def of(cls, like: DTensor, num_matrices: int, first: int) -> "_Share":
        mesh, size, dim = like.device_mesh, _num_shards(like), like.device_mesh.ndim - 1
        height, columns = like.shape
        most = -(-height // size)  # FSDP2 cuts rows into parts of equal size, the last ones less
        rows = [min(most, max(0, height - most * rank)) for rank in range(size)]
        assert isinstance(like.placements[-1], Shard)
        assert like.to_local().shape[0] == rows[mesh.get_local_rank(dim)]
        counts = _counts(num_matrices, size, first)
        return cls(mesh.get_group(dim), mesh.get_local_rank(dim), columns, rows, counts)

    def gather(self, shards: Tensor) -> Tensor:
        """Exchange shards of matrices [num_matrices, own rows, columns] for whole ones.

        These are [own count, rows, columns].
        """
        parts = self._exchange(shards.flatten(), self._of_shards(), self._of_whole())
        mine = self.counts[self.rank]
        views = [
            part.view(mine, rows, self.columns) for part, rows in zip(parts, self.rows, strict=True)
        ]
        return torch.cat(views, dim=1)

    def scatter(self, whole: Tensor) -> Tensor:
        """Send every rank its rows of this rank's whole matrices; the reverse of `gather`."""
        flat = torch.cat([part.flatten() for part in torch.split(whole, self.rows, dim=1)])
        parts = self._exchange(flat, self._of_whole(), self._of_shards())
        return torch.cat(parts).view(sum(self.counts), self.rows[self.rank], self.columns)

    def _of_shards(self) -> list[int]:
        """Return the elements that this rank's rows have in the matrices of each rank."""
        return [count * self.rows[self.rank] * self.columns for count in self.counts]

    def _of_whole(self) -> list[int]:
        """Return the elements that each rank's rows have in the matrices of this rank."""
        return [self.counts[self.rank] * rows * self.columns for rows in self.rows]

    def _exchange(self, sent: Tensor, to: list[int], expected: list[int]) -> list[Tensor]:
        received = sent.new_empty(sum(expected))
        dist.all_to_all_single(received, sent, expected, to, self.group)
        return list(torch.split(received, expected))
