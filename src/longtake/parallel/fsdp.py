"""Spreads a model over the mesh with FSDP2 (`fully_shard`)."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from longtake.parallel.mesh import World


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
def clip_gradients(model: nn.Module, max_norm: float, scale: float = 1.0) -> Tensor:
    """Multiply gradients by `scale`, then scale them down to a norm of at most `max_norm`.

    Returns:
        The norm between the two, over all ranks.
    """
    if scale != 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return full(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
