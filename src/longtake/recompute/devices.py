"""What a card can do: the figures that predicted times are made of."""

import difflib
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from longtake.errors import RecipeError

Target = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Device:
    """A card (or this computer's processor), by its maker's figures."""

    name: str
    target: Target
    """Whose kernels are predicted."""
    narrow_flops: float
    """Dense bf16 operations a second, summed in fp32."""
    fp32_flops: float
    """fp32 operations a second."""
    bandwidth: float
    """Bytes a second between the chip and its memory."""
    memory_bytes: int | None

    def flops(self, dtype: torch.dtype) -> float:
        """Operations a second in a type."""
        return self.narrow_flops if dtype.itemsize < 4 else self.fp32_flops


_MIB = 2**20
_ALMOST = 0.99
"""A card of 48 GiB has a little less."""

# Makers' data sheets (dense, without sparsity); memory as nvidia-smi shows it.
DEVICES = {
    "a6000": Device("a6000", "cuda", 154.8e12, 38.7e12, 768e9, 49140 * _MIB),
    "h100": Device("h100", "cuda", 989.4e12, 66.9e12, 3.35e12, 81559 * _MIB),
    "h200": Device("h200", "cuda", 989.4e12, 66.9e12, 4.8e12, 143771 * _MIB),
    "rtx4090": Device("rtx4090", "cuda", 165.2e12, 82.6e12, 1.008e12, 24564 * _MIB),
}
CPU = Device("cpu", "cpu", 1e12, 5e11, 2e10, None)
"""Only its memory is predicted in earnest; of its times, no more than their order."""


def device_named(name: str) -> Device:
    """A known card by its name, or any by "FLOPS,BANDWIDTH" such as "312e12,2.0e12".

    Raises:
        RecipeError: it is neither; names the nearest.
    """
    wanted = name.strip().lower()
    if wanted == CPU.name:
        return CPU
    if wanted in DEVICES:
        return DEVICES[wanted]
    try:
        flops, bandwidth = (float(part) for part in wanted.split(","))
    except ValueError:
        flops = bandwidth = 0
    if 0 < flops < math.inf and 0 < bandwidth < math.inf:
        return Device(name, "cuda", flops, flops / 8, bandwidth, None)
    nearest = difflib.get_close_matches(wanted, [*DEVICES, CPU.name], n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise RecipeError(
        f"The device {name!r} is not known.{hint} Known are {', '.join(DEVICES)} and {CPU.name}; "
        "any other is given as FLOPS,BANDWIDTH in operations and bytes a second: 312e12,2.0e12."
    )


def device_for(training_device: str, memory_bytes: int | None = None) -> Device:
    """What a recipe is planned for that names no card.

    Args:
        training_device: of the recipe: `auto`, `cpu` or `cuda`.
        memory_bytes: of the card, where the recipe says it.

    Returns:
        This processor; or the card at hand; or, where a card is wanted and there is none, the
        smallest known one of so much memory.
    """
    if training_device != "cpu" and torch.cuda.is_available():
        return _card_at_hand()
    if training_device != "cuda":
        return CPU
    by_size = sorted(DEVICES.values(), key=lambda device: device.memory_bytes or 0)
    wanted = (memory_bytes or 0) * _ALMOST
    return next((card for card in by_size if (card.memory_bytes or 0) >= wanted), by_size[-1])


def _card_at_hand() -> Device:
    """With the speed of a known card where its name says so, and the memory that it has."""
    properties = torch.cuda.get_device_properties(0)
    label = properties.name.lower().replace(" ", "")
    named = [device for name, device in DEVICES.items() if name in label]
    speed = named[0] if named else Device("", "cuda", 150e12, 40e12, 8e11, None)
    return replace(speed, name=properties.name, memory_bytes=properties.total_memory)
