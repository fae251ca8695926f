"""Muon: momentum with orthogonalised steps, for the matrices of a transformer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from longtake.optim.master_weights import Fp32Optimizer

# The quintic of Keller Jordan's Muon: it lifts small singular values fast and leaves all of them
# in about [0.7, 1.2], which serves as well as exactly 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_MAX_BATCH_ELEMENTS = 2**27
"""Of a batch of gathered matrices, which take half a GiB in fp32 beside the model's shard."""


class Muon(Fp32Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, for parameters of two dimensions.

    After Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024): with the
    momentum M of a weight [rows, columns], the weight moves by
    `-lr * sqrt(max(1, rows / columns)) * orthogonalise(M)`, after it has been scaled by
    `1 - lr * weight_decay`. It takes the same settings and the same steps as `torch.optim.Muon`
    with `adjust_lr_fn="original"`, but orthogonalises all weights of equal shape in one batch,
    which halves the time of small models, and accepts the sharded parameters of FSDP2.

    The state of a parameter is `momentum_buffer`, and `master` where the weight is not fp32: the
    copy that is updated in its place. Both are fp32, in the parameter's own layout. A sharded
    parameter's step is gathered, orthogonalised on every rank and sharded again, so any number of
    ranks takes the same step.

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
        self._dtype = dtype
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that are not matrices."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon takes parameters of two dimensions, not of {list(parameter.shape)}; "
                    "give this one to AdamW."
                )

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for batch in in_batches(parameters):
            self._step_batch(batch, group)

    def _step_batch(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        directions = [self._direction(parameter, group) for parameter in parameters]
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        matrices = torch.stack(
            [each.full_tensor() if isinstance(each, DTensor) else each for each in directions]
        )
        steps = orthogonalise(matrices.to(self._dtype), group["num_iterations"]).unbind()
        for parameter, step in zip(parameters, steps, strict=True):
            weight: Tensor = self.state[parameter].get("master", parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            step = step.to(weight.dtype)
            weight.add_(_shard_like(weight, step), alpha=-group["lr"] * scale)
            if weight is not parameter:
                parameter.copy_(weight)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum after this step's gradient, in the parameter's layout."""
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
    """Roughly the nearest matrices whose singular values are all 1.

    The Newton-Schulz iteration of Keller Jordan's Muon, X <- aX + (bA + cA^2)X with A = XX^T, in
    the type of the matrices.

    Args:
        matrices: [num_matrices, rows, columns].
        num_iterations: five bring the singular values of a usual gradient into about [0.7, 1.2].

    Returns:
        [num_matrices, rows, columns].
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices  # the smaller of the two XX^T
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(num_iterations):
        gram = x @ x.transpose(1, 2)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.transpose(1, 2) if is_tall else x


def in_batches(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Batches of equal shape and bounded size, in an order equal on every rank."""
    groups: defaultdict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.shape, parameter.device].append(parameter)
    batches = []
    for (shape, _), group in groups.items():
        most = max(1, _MAX_BATCH_ELEMENTS // shape.numel())
        batches += [group[start : start + most] for start in range(0, len(group), most)]
    return batches


def _shard_like(parameter: Tensor, matrix: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return matrix
    # Every rank holds the same matrix: it takes its own part and sends nothing.
    return distribute_tensor(
        matrix, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
