"""What a card can do: the figures that predicted times are made of."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from longtake.config import memory_bytes
from longtake.errors import RecipeError
from longtake.formatting import nearest

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
        return self.narrow_flops if dtype.itemsize < 4 else self.fp32_flops


_MIB = 2**20
_USUAL_BYTES = 24 * 2**30
"""Of a GPU that is not here, where nobody says how much memory it has."""
_ALMOST = 0.99
"""A card of 48 GiB has a little less."""

# NVIDIA's data sheets and architecture whitepapers: dense bf16 with fp32 accumulation (half of what
# is given with sparsity), fp32, memory bandwidth; memory as nvidia-smi shows it.
#   Ampere: A100 data sheet (2021), GA102 whitepaper (RTX 3090), A10 and RTX A6000 data sheets
#   Ada: Ada whitepaper (RTX 4090), L4, L40S and RTX 6000 Ada data sheets
#   Hopper: H100 and H200 data sheets; Blackwell: HGX B200 data sheet, RTX Blackwell whitepaper
_ALL = (
    Device("a6000", "cuda", 154.8e12, 38.7e12, 768e9, 49140 * _MIB),
    Device("h100", "cuda", 989.4e12, 66.9e12, 3.35e12, 81559 * _MIB),
    Device("h100-pcie", "cuda", 756e12, 51.2e12, 2.0e12, 81559 * _MIB),
    Device("h200", "cuda", 989.4e12, 66.9e12, 4.8e12, 143771 * _MIB),
    Device("b200", "cuda", 2250e12, 75e12, 7.7e12, 183359 * _MIB),
    Device("a100-40gb", "cuda", 312e12, 19.5e12, 1.555e12, 40960 * _MIB),
    Device("a100-80gb", "cuda", 312e12, 19.5e12, 2.039e12, 81920 * _MIB),
    Device("a10", "cuda", 125e12, 31.2e12, 600e9, 23028 * _MIB),
    Device("l4", "cuda", 121e12, 30.3e12, 300e9, 23034 * _MIB),
    Device("l40s", "cuda", 362.05e12, 91.6e12, 864e9, 46068 * _MIB),
    Device("rtx-6000-ada", "cuda", 364.2e12, 91.1e12, 960e9, 49140 * _MIB),
    Device("rtx3090", "cuda", 71e12, 35.6e12, 936e9, 24576 * _MIB),
    Device("rtx4090", "cuda", 165.2e12, 82.6e12, 1.008e12, 24564 * _MIB),
    Device("rtx5090", "cuda", 209.5e12, 104.8e12, 1.792e12, 32607 * _MIB),
)
DEVICES = {device.name: device for device in _ALL}
_FLOPS_PER_BYTE = 200
"""Of a GPU whose bandwidth nobody gives; known ones have 75 to 420."""
_GIVEN = re.compile(r"([\d.]+(?:e\d+)?)\s*(gib|gb|mib|mb|tflops|pflops|gb/s|tb/s)")
_UNITS = {"tflops": 1e12, "pflops": 1e15, "gb/s": 1e9, "tb/s": 1e12}
CPU = Device("cpu", "cpu", 1e12, 5e11, 2e10, None)
"""Only its memory is predicted in earnest; of its times, no more than their order."""


def device_named(name: str) -> Device:
    """A known GPU by its name, or any by its figures.

    Args:
        name: such as `a100-80gb`; or memory, bf16 operations a second and, where it is known,
            bandwidth: `24GiB,165TFLOPS,1008GB/s`; or `FLOPS,BANDWIDTH`: `312e12,2.0e12`.

    Raises:
        RecipeError: it is none of these; names the nearest.
    """
    wanted = name.strip().lower()
    known = {_plain(each): device for each, device in {**DEVICES, CPU.name: CPU}.items()}
    if _plain(wanted) in known:
        return known[_plain(wanted)]
    if given := _given(name, wanted.split(",")):
        return given
    near = nearest(wanted, [*DEVICES, CPU.name])
    hint = f" Did you mean {near}?" if near else ""
    raise RecipeError(
        f"The device {name!r} is not known.{hint} Known are {', '.join(DEVICES)} and {CPU.name}; "
        "any other is given by its memory and its dense bf16 speed, such as 24GiB,165TFLOPS, and "
        "its bandwidth, where it is known: 24GiB,165TFLOPS,1008GB/s."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _given(name: str, parts: Sequence[str]) -> Device | None:
    """A device by figures with units, or by two numbers; None where it is neither."""
    figures: dict[str, float] = {}
    for part in parts:
        found = _GIVEN.fullmatch(part.strip())
        if found is None:
            return _by_numbers(name, parts)
        unit = found[2]
        kind = "bandwidth" if unit.endswith("/s") else "flops" if "flops" in unit else "memory"
        if kind in figures:
            return None
        try:
            value = memory_bytes(part) if kind == "memory" else float(found[1]) * _UNITS[unit]
        except (RecipeError, ValueError):
            return None
        figures[kind] = value
    flops = figures.get("flops", 0.0)
    bandwidth = figures.get("bandwidth", flops / _FLOPS_PER_BYTE)
    if not (0 < flops < math.inf and 0 < bandwidth < math.inf):
        return None
    memory = int(figures["memory"]) if "memory" in figures else None
    return Device(name, "cuda", flops, flops / 8, bandwidth, memory)


def _by_numbers(name: str, parts: Sequence[str]) -> Device | None:
    try:
        flops, bandwidth = map(float, parts)
    except ValueError:
        return None
    if not (0 < flops < math.inf and 0 < bandwidth < math.inf):
        return None
    return Device(name, "cuda", flops, flops / 8, bandwidth, None)


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
    wanted = (memory_bytes or _USUAL_BYTES) * _ALMOST
    return next((card for card in by_size if (card.memory_bytes or 0) >= wanted), by_size[-1])


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of a GPU by its maker's figures; None: the GPU is not known, or a CPU."""
    if device.type != "cuda":
        return None
    known = _of_label(torch.cuda.get_device_properties(device).name)
    return None if known is None else known.flops(dtype)


def _card_at_hand() -> Device:
    """With the speed of a known card where its name says so, and the memory that it has."""
    properties = torch.cuda.get_device_properties(0)
    known = _of_label(properties.name)
    speed = known or Device("", "cuda", 150e12, 40e12, 8e11, None)
    return replace(speed, name=properties.name, memory_bytes=properties.total_memory)


def _of_label(label: str) -> Device | None:
    """The known GPU that a driver's label means, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.findall(r"[a-z0-9]+", label.lower()))
    named = [
        device
        for name, device in DEVICES.items()
        if set(re.findall(r"rtx|[a-z0-9]+", name.replace("rtx", "rtx "))) <= words
    ]
    return max(named, key=lambda device: len(device.name), default=None)
