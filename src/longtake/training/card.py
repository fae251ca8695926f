"""The card that a recipe is planned for."""

from dataclasses import dataclass, replace

from longtake import config
from longtake.config import Recipe
from longtake.recompute.devices import Device, Target, device_for, device_named


@dataclass(frozen=True)
class Card:
    """A device, and what may be taken of its memory."""

    device: Device
    memory_bytes: int | None
    """None: nobody said, so that everything fits."""
    reserve: float
    """Share of the memory that is left to what no plan knows."""

    @property
    def budget_bytes(self) -> int | None:
        """What tensors may take."""
        return None if self.memory_bytes is None else int(self.memory_bytes * (1 - self.reserve))

    def with_its_own_memory(self) -> "Card":
        """The same, with all the memory that the device has, where that is known."""
        return replace(self, memory_bytes=self.device.memory_bytes or self.memory_bytes)

    def memory_for(self, tensor_bytes: int) -> int:
        """The least memory of a card on which tensors may take so much."""
        return int(tensor_bytes / (1 - self.reserve)) + 1


def card_of(recipe: Recipe, target: Target | None = None) -> Card:
    """The card that a recipe names, or else the one that it would be trained on here.

    Args:
        recipe: names a device and a memory, or neither.
        target: whose kernels are run, where that is certain: in training.

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
    return Card(device, memory, section.reserve)
