"""Devices that are planned for: their data sheets, and what a plan may take of their memory."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from longtake import config, errors
from longtake.formatting import nearest

Target = Literal["cuda", "cpu"]
"""Whose kernels are predicted."""


@dataclass(frozen=True)
class DeviceBudget:
    """A GPU, or this computer's processor, and what a plan may take of its memory."""

    name: str
    target: Target
    bf16_flops: float  # dense operations a second, summed in fp32
    fp32_flops: float
    bandwidth: float  # bytes a second between the chip and its memory
    total_bytes: int | None  # the device's own memory, where it is known
    memory_bytes: int | None = None  # what a plan may count on; None: there is no limit
    reserve: float = 0.0  # share of it that is left to what no plan knows
    host_bandwidth: float = 31.5e9  # bytes a second to the computer's memory, and as many back
    host_bytes: int = 64 * 2**30  # of that memory, what weights and activations may take of it
    nccl_bytes: int = 0  # left to NCCL beside that

    @property
    def link(self) -> float:
        """Bytes a second of large copies between pinned memory of the computer and the device."""
        return self.host_bandwidth * _SHARE_OF_HOST_BANDWIDTH

    @property
    def granule(self) -> int:
        """Bytes of which the device's allocator hands out multiples."""
        return CUDA_ROUNDS_TO if self.target == "cuda" else 1

    def flops(self, dtype: torch.dtype) -> float:
        return self.bf16_flops if dtype.itemsize < 4 else self.fp32_flops

    @property
    def budget_bytes(self) -> int | None:
        if self.memory_bytes is None:
            return None
        return max(0, int(self.memory_bytes * (1 - self.reserve)) - self.nccl_bytes)

    def memory_for(self, tensor_bytes: int) -> int:
        return int((tensor_bytes + self.nccl_bytes) / (1 - self.reserve)) + 1

    def with_own_memory(self) -> "DeviceBudget":
        return replace(self, memory_bytes=self.total_bytes or self.memory_bytes)


CUDA_ROUNDS_TO = 512
"""Bytes of which CUDA's caching allocator hands out multiples, and counts them."""

SHARE_OF_BANDWIDTH = 0.8
"""Of a data sheet's figure, what kernels reach."""

_MIB = 2**20
_SHARE_OF_HOST_BANDWIDTH = 0.8
"""Of PCIe's figure, what large copies of pinned memory reach: packets' headers and flow control
take the rest (24 to 26 of 31.5 GB/s are usual in NVIDIA's bandwidthTest)."""
_SHARE_OF_HOST_MEMORY = 0.6
"""Of this computer's, what may be pinned; the rest is left to loaders, caches and the system."""
_USUAL_BYTES = 24 * 2**30
"""Of a GPU that is not here, where its memory is not given."""
_PCIE_5 = 63e9
_ALMOST = 0.99
"""A GPU of 48 GiB has a little less."""
_NCCL_BYTES = 3 * 2**29
"""What NCCL's buffers take of a GPU where there are several ranks: 0.5 to 1.5 GiB."""

# NVIDIA's data sheets and architecture whitepapers: dense bf16 with fp32 accumulation (half of what
# is given with sparsity), fp32, memory bandwidth; memory as nvidia-smi shows it.
#   Ampere: A100 data sheet (2021), GA102 whitepaper (RTX 3090), A10 and RTX A6000 data sheets
#   Ada: Ada whitepaper (RTX 4090), L4, L40S and RTX 6000 Ada data sheets
#   Hopper: H100 and H200 data sheets; Blackwell: HGX B200 data sheet, RTX Blackwell whitepaper
# The link to the computer is PCIe 4.0 x16 (16 GT/s on 16 lanes with 128b/130b coding, PCI-SIG: 31.5
# GB/s in each direction), or PCIe 5.0 x16, twice that, where `_PCIE_5` is named (the same sheets).
_ALL = (
    DeviceBudget("a6000", "cuda", 154.8e12, 38.7e12, 768e9, 49140 * _MIB),
    DeviceBudget("h100", "cuda", 989.4e12, 66.9e12, 3.35e12, 81559 * _MIB, host_bandwidth=_PCIE_5),
    DeviceBudget(
        "h100-pcie", "cuda", 756e12, 51.2e12, 2.0e12, 81559 * _MIB, host_bandwidth=_PCIE_5
    ),
    DeviceBudget("h200", "cuda", 989.4e12, 66.9e12, 4.8e12, 143771 * _MIB, host_bandwidth=_PCIE_5),
    DeviceBudget("b200", "cuda", 2250e12, 75e12, 7.7e12, 183359 * _MIB, host_bandwidth=_PCIE_5),
    DeviceBudget("a100-40gb", "cuda", 312e12, 19.5e12, 1.555e12, 40960 * _MIB),
    DeviceBudget("a100-80gb", "cuda", 312e12, 19.5e12, 2.039e12, 81920 * _MIB),
    DeviceBudget("a10", "cuda", 125e12, 31.2e12, 600e9, 23028 * _MIB),
    DeviceBudget("l4", "cuda", 121e12, 30.3e12, 300e9, 23034 * _MIB),
    DeviceBudget("l40s", "cuda", 362.05e12, 91.6e12, 864e9, 46068 * _MIB),
    DeviceBudget("rtx-6000-ada", "cuda", 364.2e12, 91.1e12, 960e9, 49140 * _MIB),
    DeviceBudget("rtx3090", "cuda", 71e12, 35.6e12, 936e9, 24576 * _MIB),
    DeviceBudget("rtx4090", "cuda", 165.2e12, 82.6e12, 1.008e12, 24564 * _MIB),
    DeviceBudget(
        "rtx5090", "cuda", 209.5e12, 104.8e12, 1.792e12, 32607 * _MIB, host_bandwidth=_PCIE_5
    ),
)
DEVICES = {device.name: device for device in _ALL}
_FLOPS_PER_BYTE = 200
"""Of a GPU whose bandwidth is not given; known ones have 75 to 420."""
_GIVEN = re.compile(r"([\d.]+(?:e\d+)?)\s*(gib|gb|mib|mb|tflops|pflops|gb/s|tb/s)")
_UNITS = {"tflops": 1e12, "pflops": 1e15, "gb/s": 1e9, "tb/s": 1e12}
CPU = DeviceBudget("cpu", "cpu", 1e12, 5e11, 2e10, None)
"""Its memory is predicted; of its times, only their order."""


def rounded(number: int, multiple: int) -> int:
    """The next multiple that is not less."""
    return -(-number // multiple) * multiple


def device_named(name: str) -> DeviceBudget:
    """A known GPU by its name, or any by its figures."""
    wanted = name.strip().lower()
    known = {_plain(each): device for each, device in {**DEVICES, CPU.name: CPU}.items()}
    if _plain(wanted) in known:
        return known[_plain(wanted)]
    if given := _given(name, wanted.split(",")):
        return given
    near = nearest(wanted, [*DEVICES, CPU.name])
    hint = f" Did you mean {near}?" if near else ""
    raise errors.RecipeError(
        f"The device {name!r} is not known.{hint} Known are {', '.join(DEVICES)} and {CPU.name}; "
        "any other is given by its memory and its dense bf16 speed, such as 24GiB,165TFLOPS, and "
        "its bandwidth, where it is known: 24GiB,165TFLOPS,1008GB/s."
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _given(name: str, parts: Sequence[str]) -> DeviceBudget | None:
    """A device by figures with units, or by two numbers; None where it is neither of them."""
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
            value = (
                config.memory_bytes(part) if kind == "memory" else float(found[1]) * _UNITS[unit]
            )
        except (errors.RecipeError, ValueError):
            return None
        figures[kind] = value
    flops = figures.get("flops", 0.0)
    bandwidth = figures.get("bandwidth", flops / _FLOPS_PER_BYTE)
    if not (0 < flops < math.inf and 0 < bandwidth < math.inf):
        return None
    memory = int(figures["memory"]) if "memory" in figures else None
    return DeviceBudget(name, "cuda", flops, flops / 8, bandwidth, memory)


def _by_numbers(name: str, parts: Sequence[str]) -> DeviceBudget | None:
    try:
        flops, bandwidth = map(float, parts)
    except ValueError:
        return None
    if not (0 < flops < math.inf and 0 < bandwidth < math.inf):
        return None
    return DeviceBudget(name, "cuda", flops, flops / 8, bandwidth, None)


def device_budget(
    recipe: config.Recipe, target: Target | None = None, world_size: int = 1
) -> DeviceBudget:
    """The device that a recipe names, or that it would be trained on here, and its memory.

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
    target = target or device.target
    host = device.host_bytes
    if section.host_memory is not None:
        host = config.memory_bytes(section.host_memory)
    elif torch.cuda.is_available():
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        host = int(psutil.virtual_memory().total * _SHARE_OF_HOST_MEMORY) // ranks
    nccl_bytes = _NCCL_BYTES if world_size > 1 and target == "cuda" else 0
    return replace(
        device,
        target=target,
        memory_bytes=memory,
        reserve=section.reserve,
        nccl_bytes=nccl_bytes,
        host_bytes=host,
    )


def device_for(training_device: str, memory_bytes: int | None = None) -> DeviceBudget:
    """What a recipe that names no device is planned for."""
    if training_device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        unknown = DeviceBudget("", "cuda", 150e12, 40e12, 8e11, None)
        speed = _of_label(properties.name) or unknown
        return replace(speed, name=properties.name, total_bytes=properties.total_memory)
    if training_device != "cuda":
        return CPU
    by_size = sorted(DEVICES.values(), key=lambda device: device.total_bytes or 0)
    wanted = (memory_bytes or _USUAL_BYTES) * _ALMOST
    return next((gpu for gpu in by_size if (gpu.total_bytes or 0) >= wanted), by_size[-1])


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second of a GPU by its maker's figures; None: the GPU is not known, or a CPU."""
    if device.type != "cuda":
        return None
    known = _of_label(torch.cuda.get_device_properties(device).name)
    return None if known is None else known.flops(dtype)


def _of_label(label: str) -> DeviceBudget | None:
    """The known GPU that a driver's label means, such as "NVIDIA A100-SXM4-80GB"."""
    words = set(re.findall(r"[a-z0-9]+", label.lower()))
    named = [
        device
        for name, device in DEVICES.items()
        if set(re.findall(r"rtx|[a-z0-9]+", name.replace("rtx", "rtx "))) <= words
    ]
    return max(named, key=lambda device: len(device.name), default=None)
