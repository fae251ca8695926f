"""The card that a recipe is planned for."""

from dataclasses import dataclass, replace

import torch

from longtake import config
from longtake.config import Recipe
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.planner.devices import Device, Target, device_for, device_named

_NCCL_BYTES = 3 * 2**29
"""What NCCL's buffers take of a GPU where there are several ranks: 0.5 to 1.5 GiB."""
_FREE_STEP_BYTES = 2**28
"""Free memory is rounded down to multiples of this, so that restarts keep the plan."""


@dataclass(frozen=True)
class Card:
    """A device, and what may be taken of its memory."""

    device: Device
    memory_bytes: int | None
    """None: nobody said, so that everything fits."""
    reserve: float
    """Share of the memory that is left to what no plan knows."""
    nccl_bytes: int = 0
    """Left to NCCL beside that."""

    @property
    def budget_bytes(self) -> int | None:
        if self.memory_bytes is None:
            return None
        return max(0, int(self.memory_bytes * (1 - self.reserve)) - self.nccl_bytes)

    def with_its_own_memory(self) -> "Card":
        return replace(self, memory_bytes=self.device.memory_bytes or self.memory_bytes)

    def memory_for(self, tensor_bytes: int) -> int:
        return int((tensor_bytes + self.nccl_bytes) / (1 - self.reserve)) + 1


def card_of(recipe: Recipe, target: Target | None = None, world_size: int = 1) -> Card:
    """The card that a recipe names, or else the one that it would be trained on here.

    Args:
        recipe: names a device and a memory, or neither.
        target: whose kernels are run, where that is certain: in training.
        world_size: processes of the launch.

    Raises:
        RecipeError: there is no such device.
    """
    section = recipe.recompute
    memory = None if section.memory is None else config.memory_bytes(section.memory)
    if section.device is not None:
        device = device_named(section.device)
    else:
        device = device_for(target or recipe.training.device, memory)
    if target is not None:
        device = replace(device, target=target)
    uses_nccl = world_size > 1 and device.target == "cuda"
    return Card(device, memory, section.reserve, _NCCL_BYTES if uses_nccl else 0)


def free_memory(recipe: Recipe, world: World) -> int | None:
    """Free bytes of the GPU that has least, where the recipe names no memory; all ranks call it.

    Returns:
        None: on a CPU, or where the recipe says how much there is.
    """
    if recipe.recompute.memory is not None or world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    return min(gather_objects(free, world)) // _FREE_STEP_BYTES * _FREE_STEP_BYTES
