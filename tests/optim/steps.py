"""Steps of an optimizer without a model."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def take_steps(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: Sequence[int] = range(5)
) -> None:
    """Step by bf16 gradients that follow from the steps' numbers, sharded like the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            gradient = gradient.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, placements)
            parameter.grad = gradient
        optimizer.step()
