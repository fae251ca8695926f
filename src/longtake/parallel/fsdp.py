"""Spreads a model over the mesh with FSDP2 (`fully_shard`)."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from longtake.parallel.mesh import World

_LEAST_NORM = 1e-6
"""Added to a norm, so that gradients of 0 do not divide by it."""


def spread(model: nn.Module, blocks: Sequence[nn.Module], world: World) -> None:
    """Shard (or replicate) each block and then the rest onto the device; alone, just move it.

    The model comes on the CPU: a card never holds more of it than its share and one block.

    Parameters become DTensors and stay in fp32, reductions too; the arithmetic's precision is
    autocast's business, the same on one process and on many.
    """
    if world.mesh is None:
        model.to(world.device)
        return
    # Some families return a view. torch warns at each step that nobody may change it in place,
    # and nobody does: the loss reads it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    for block in blocks:
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)


def synchronise_gradients(model: nn.Module, wanted: bool) -> None:
    """Say whether the next backward reduces gradients over ranks (only the last micro-step's)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered where it is sharded (a collective: all ranks must call it)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, scale: float = 1.0) -> float:
    """Multiply gradients by `scale`, then scale them down to a norm of at most `max_norm`.

    Gradients whose norm is no finite number are left as they are, to be looked at.

    Returns:
        The norm between the two, over all ranks; accurate to fp32 whatever the gradients are in.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = scale * float(full(_norm(gradients))) if gradients else 0.0
    factor = scale * min(1.0, max_norm / (norm + _LEAST_NORM))
    if math.isfinite(norm) and factor != 1:
        _multiply(gradients, factor)
    return norm


def _multiply(gradients: list[Tensor], factor: float) -> None:
    """Multiply in place; by a number, as a tensor would be rounded to the gradients' dtype."""
    exact = [gradient for gradient in gradients if gradient.dtype == torch.float32]
    if exact:
        torch._foreach_mul_(exact, factor)
    for gradient in gradients:
        if gradient.dtype != torch.float32:  # on a CPU `_foreach_mul_` rounds numbers as well
            gradient.mul_(factor)


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together, in fp32; a DTensor where they are."""
    norms: list[Tensor] = []
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        norms += torch._foreach_norm(alike, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
