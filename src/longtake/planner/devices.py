"""Devices that a memory plan can be made for: their data sheets, and the memory it may use."""

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.backends import cudnn

from longtake import config, errors
from longtake.formatting import nearest
from longtake.models.low_bit import FIRST_WITH_FP8
from longtake.planner.calibration import MeasuredRates, kept_rates
from longtake.planner.host_memory import lockable_bytes, usable_ram

Target = Literal["cuda", "cpu"]
"""Type of device ("cuda" or "cpu") whose kernels a plan predicts."""


@dataclass(frozen=True)
class DeviceBudget:
    """A GPU or this machine's CPU, with the memory that a plan may use."""

    name: str
    target: Target
    bf16_flops: float  # dense operations per second, accumulated in fp32
    fp32_flops: float
    bandwidth: float  # bytes per second between the chip and its memory
    total_bytes: int | None  # the device's own memory; None: unknown
    memory_bytes: int | None = None  # limit of the plan; None: no limit
    reserve: float = 0.0  # share of `memory_bytes` that is left unplanned
    host_bandwidth: float = 31.5e9  # bytes per second to host memory, and the same back
    host_bytes: int = 64 * 2**30  # host memory for streamed weights and offloaded activations
    ram_bytes: int | None = None  # all host RAM of a rank; None: unknown
    nccl_bytes: int = 0  # left to NCCL in addition to `reserve`
    int8_rate: float = 2.0  # of products of int8 numbers, as a multiple of `bf16_flops`
    fp8_rate: float = 2.0  # the same for fp8, with sums in fp32; 0: the GPU has none
    # Shares of these figures that kernels reach: usual ones of large transformers, or measured.
    share_of_products: float = 0.7
    share_of_attention: float = 0.5
    share_of_masked_attention: float = 0.5
    share_of_bandwidth: float = 0.8
    share_of_link: float = 0.8  # (24 to 26 of 31.5 GB/s are usual in NVIDIA's bandwidthTest)
    measured_at: str | None = None  # UTC; None: the shares are usual ones

    @property
    def link(self) -> float:
        """Bytes per second that large copies between pinned host memory and the device reach."""
        return self.host_bandwidth * self.share_of_link

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second that kernels read and write in the device's memory."""
        return self.bandwidth * self.share_of_bandwidth

    def with_rates(self, rates: MeasuredRates) -> "DeviceBudget":
        """Return this device with the rates that it was measured to reach."""
        share = rates.bf16_products / self.bf16_flops
        return replace(
            self,
            fp32_flops=rates.fp32_products / share,
            share_of_products=share,
            share_of_attention=rates.attention / self.bf16_flops,
            share_of_masked_attention=rates.masked_attention / self.bf16_flops,
            share_of_bandwidth=rates.memory / self.bandwidth,
            share_of_link=rates.host / self.host_bandwidth,
            measured_at=rates.measured_at,
        )

    @property
    def granule(self) -> int:
        """Multiple of bytes to which the device's memory allocator rounds sizes up."""
        return CUDA_ROUNDS_TO if self.target == "cuda" else 1

    def flops(self, dtype: torch.dtype) -> float:
        rates = {torch.int8: self.int8_rate, torch.float8_e4m3fn: self.fp8_rate}
        if dtype in rates:
            return self.bf16_flops * rates[dtype]
        return self.bf16_flops if dtype.itemsize < 4 else self.fp32_flops

    def convolution_flops(self, dtype: torch.dtype) -> float:
        """Return operations per second of convolutions.

        cuDNN rounds their fp32 operands to TF32, at half the rate of bf16.
        """
        is_rounded = dtype == torch.float32 and self.target == "cuda" and cudnn.allow_tf32
        return max(self.fp32_flops, self.bf16_flops / 2) if is_rounded else self.flops(dtype)

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
"""Multiple of bytes to which CUDA's caching allocator rounds sizes."""

_MIB = 2**20
SHARE_OF_HOST_MEMORY = 0.6
"""Share of host memory that may be pinned; the rest is for loaders, caches and the system."""
_USUAL_BYTES = 24 * 2**30
"""Memory of the GPU that is assumed where there is none and the recipe names neither GPU nor
memory."""
_PCIE_4, _PCIE_5, _NVLINK_C2C = 31.5e9, 63e9, 450e9
_PCIE_4_X8 = _PCIE_4 / 2
_ALMOST = 0.99
"""Least share of its nominal size that a GPU's memory really has: 48 GiB are a little less."""
_NCCL_BYTES = 3 * 2**29
"""Memory for NCCL's buffers if there are several ranks; they take 0.5 to 1.5 GiB."""


def _gpu(
    name: str,
    bf16_tflops: float,
    fp32_tflops: float,
    gigabytes_per_second: float,
    mebibytes: int,
    host_bandwidth: float = _PCIE_4,
) -> DeviceBudget:
    flops = float(round(bf16_tflops * 1e12)), float(round(fp32_tflops * 1e12))
    sizes = float(round(gigabytes_per_second * 1e9)), mebibytes * _MIB
    return DeviceBudget(name, "cuda", *flops, *sizes, host_bandwidth=host_bandwidth)


def _ampere(*sheet: Any) -> DeviceBudget:
    return replace(_gpu(*sheet), fp8_rate=0.0)


# GeForce GPUs sum bf16 products in fp32 at half the rate of their chips, and fp8 ones, too.
def _geforce(*sheet: Any) -> DeviceBudget:
    return replace(_gpu(*sheet), int8_rate=4.0)


def _geforce_30(*sheet: Any) -> DeviceBudget:
    return replace(_geforce(*sheet), fp8_rate=0.0)


# NVIDIA's data sheets and architecture whitepapers: dense bf16 with fp32 accumulation (half of what
# is given with sparsity), fp32, memory bandwidth; memory as nvidia-smi shows it.
#   Ampere: A100 data sheet (2021), GA102 whitepaper (RTX 30), A10, A40 and RTX A6000 data sheets
#   Ada: Ada whitepaper (RTX 40), L4, L40, L40S and RTX 6000 Ada data sheets
#   Hopper: H100 (SXM, PCIe, NVL), H200 (SXM, NVL), H20 and GH200 data sheets
#   Blackwell: HGX B200 and B300, GB200 and RTX PRO 6000 data sheets, RTX Blackwell whitepaper
# A800 and H800 are A100 and H100 with fewer links to other GPUs.
# The link to the computer is PCIe 4.0 x16 (16 GT/s on 16 lanes with 128b/130b coding, PCI-SIG: 31.5
# GB/s in each direction), or PCIe 5.0 x16, twice that, where `_PCIE_5` is named (the same sheets).
# GH200 and GB200 have NVLink-C2C: 900 GB/s in both directions together. Products in 8 bits run at
# twice the rate of bf16 by the same sheets, but for GeForce, B300's int8, and Ampere, which has no
# fp8.
_ALL = (
    _ampere("a6000", 154.8, 38.7, 768, 49140),
    _gpu("h100", 989.4, 66.9, 3350, 81559, _PCIE_5),
    _gpu("h100-pcie", 756, 51.2, 2000, 81559, _PCIE_5),
    _gpu("h100-nvl", 835, 60, 3900, 95830, _PCIE_5),
    _gpu("h800", 989.4, 66.9, 3350, 81559, _PCIE_5),
    _gpu("h20", 148, 44, 4000, 97871, _PCIE_5),
    _gpu("gh200", 989.4, 66.9, 4000, 97871, _NVLINK_C2C),
    _gpu("h200", 989.4, 66.9, 4800, 143771, _PCIE_5),
    _gpu("h200-nvl", 835, 60, 4800, 143771, _PCIE_5),
    _gpu("b200", 2250, 75, 7700, 183359, _PCIE_5),
    _gpu("gb200", 2500, 80, 8000, 189471, _NVLINK_C2C),
    replace(_gpu("b300", 2250, 75, 8000, 275040, _PCIE_5), int8_rate=0.06),
    _ampere("a100-40gb", 312, 19.5, 1555, 40960),
    _ampere("a100-80gb", 312, 19.5, 2039, 81920),
    _ampere("a800", 312, 19.5, 2039, 81920),
    _ampere("a10", 125, 31.2, 600, 23028),
    _gpu("l4", 121, 30.3, 300, 23034),
    _gpu("l40s", 362.05, 91.6, 864, 46068),
    _gpu("l40", 181.05, 90.5, 864, 46068),
    _ampere("a40", 149.7, 37.4, 696, 46068),
    _gpu("rtx-6000-ada", 364.2, 91.1, 960, 49140),
    _gpu("rtx-pro-6000", 503.8, 126, 1792, 97887, _PCIE_5),
    _geforce_30("rtx3090", 71, 35.6, 936, 24576),
    _geforce("rtx4090", 165.2, 82.6, 1008, 24564),
    _geforce("rtx5090", 209.5, 104.8, 1792, 32607, _PCIE_5),
    _geforce("rtx4080", 97.5, 48.7, 716.8, 16376),
    _geforce("rtx4080-super", 104.4, 52.2, 736, 16376),
    _geforce("rtx5080", 112.6, 56.3, 960, 16303, _PCIE_5),
    _geforce("rtx5070-ti", 87.9, 43.9, 896, 16303, _PCIE_5),
    _geforce("rtx4070-ti", 80.2, 40.1, 504, 12282),
    _geforce("rtx4070", 58.3, 29.1, 504, 12282),
    _geforce("rtx5070", 61.7, 30.9, 672, 12227, _PCIE_5),
    _geforce_30("rtx3060", 25.5, 12.7, 360, 12288),
    _geforce_30("rtx3080", 59.5, 29.8, 760, 10240),
    _geforce_30("rtx3070", 40.6, 20.3, 448, 8192),
    _geforce("rtx4060", 30.2, 15.1, 272, 8188, _PCIE_4_X8),
)
DEVICES = {device.name: device for device in _ALL}
_FLOPS_PER_BYTE = 200
"""Assumed operations per byte of a GPU without a given bandwidth; known GPUs have 75 to 420."""
_GIVEN = re.compile(r"([\d.]+(?:e\d+)?)\s*(gib|gb|mib|mb|tflops|pflops|gb/s|tb/s)")
_UNITS = {"tflops": 1e12, "pflops": 1e15, "gb/s": 1e9, "tb/s": 1e12}
CPU = DeviceBudget("cpu", "cpu", 1e12, 5e11, 2e10, None)
"""This machine's CPU as a device: its memory is predicted; its times can only be compared."""


def rounded(number: int, multiple: int) -> int:
    """Round a number up to a multiple."""
    return -(-number // multiple) * multiple


def device_named(name: str) -> DeviceBudget:
    """Return the device of a text: the name of a GPU, or figures such as "24GiB,165TFLOPS".

    Raises:
        RecipeError: it is neither.
    """
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
    """Return the GPU that figures such as "24GiB,165TFLOPS" describe; None for other text."""
    figures: dict[str, float] = {}
    for part in parts:
        match = _GIVEN.fullmatch(part.strip())
        if match is None:
            return None
        unit = match[2]
        kind = "bandwidth" if unit.endswith("/s") else "flops" if "flops" in unit else "memory"
        if kind in figures:
            return None
        try:
            value = (
                config.memory_bytes(part) if kind == "memory" else float(match[1]) * _UNITS[unit]
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


def with_host_memory(device: DeviceBudget, ram_bytes: int, ranks: int) -> DeviceBudget:
    """Return a device whose ranks share the page-locked part of `ram_bytes` of host RAM equally."""
    pinned = int(ram_bytes * SHARE_OF_HOST_MEMORY) // ranks
    return replace(device, host_bytes=pinned, ram_bytes=ram_bytes // ranks)


def device_budget(
    recipe: config.Recipe, target: Target | None = None, world_size: int = 1
) -> DeviceBudget:
    """Return the device that a recipe names, or on which it would be trained here, with its memory.

    Args:
        recipe: may name a device and a memory.
        target: type of device on which kernels run, if that is certain, as in training.
        world_size: number of processes of the launch.

    Raises:
        RecipeError: there is no such device.
    """
    section = recipe.recompute
    memory = None if section.memory is None else config.memory_bytes(section.memory)
    if section.device is not None:
        device = _with_kept_rates(device_named(section.device))
    else:
        device = device_for(target or recipe.training.device, memory)
    target = target or device.target
    host = device.host_bytes
    if section.host_memory is not None:
        host = config.memory_bytes(section.host_memory)
    elif torch.cuda.is_available():
        # All ranks of a node pin their part of the same memory.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        host = with_host_memory(device, usable_ram(), 1).host_bytes
        if device.target == "cuda" and target == "cuda":
            host = lockable_bytes(host)
        host //= ranks
    nccl_bytes = _NCCL_BYTES if world_size > 1 and target == "cuda" else 0
    return replace(
        device,
        target=target,
        memory_bytes=memory,
        reserve=section.reserve,
        nccl_bytes=nccl_bytes,
        host_bytes=host,
    )


def _with_kept_rates(device: DeviceBudget) -> DeviceBudget:
    """Return a named device with its measured rates, if it is this machine's GPU and has some."""
    # A plan for a named device needs no GPU, and none that works (torch raises either error).
    with suppress(RuntimeError, AssertionError):
        here = torch.device("cuda", 0)
        if _of_label(torch.cuda.get_device_properties(here).name) is device:
            rates = kept_rates(here)
            return device if rates is None else device.with_rates(rates)
    return device


def device_for(training_device: str, memory_bytes: int | None = None) -> DeviceBudget:
    """Choose a device for a recipe that names none: this machine's GPU, a usual GPU, or the CPU."""
    if training_device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        has_fp8 = (properties.major, properties.minor) >= FIRST_WITH_FP8
        unknown = DeviceBudget(
            "", "cuda", 150e12, 40e12, 8e11, None, fp8_rate=2.0 if has_fp8 else 0.0
        )
        speed = _of_label(properties.name) or unknown
        found = replace(speed, name=properties.name, total_bytes=properties.total_memory)
        rates = kept_rates(torch.device("cuda", 0))
        return found if rates is None else found.with_rates(rates)
    if training_device != "cuda":
        return CPU
    by_size = sorted(DEVICES.values(), key=lambda device: device.total_bytes or 0)
    wanted = (memory_bytes or _USUAL_BYTES) * _ALMOST
    return next((gpu for gpu in by_size if (gpu.total_bytes or 0) >= wanted), by_size[-1])


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a GPU's operations per second by its data sheet; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    known = _of_label(torch.cuda.get_device_properties(device).name)
    return None if known is None else known.flops(dtype)


def _of_label(label: str) -> DeviceBudget | None:
    """Return the known GPU that a driver calls, say, "NVIDIA A100-SXM4-80GB"; None if unknown."""
    words = set(re.findall(r"[a-z0-9]+", label.lower()))
    named = [
        device
        for name, device in DEVICES.items()
        if set(re.findall(r"rtx|[a-z0-9]+", name.replace("rtx", "rtx "))) <= words
    ]
    # The longest name is the most specific: "h100-pcie" rather than "h100".
    return max(named, key=lambda device: len(device.name), default=None)
