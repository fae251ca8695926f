"""Which precision the arithmetic runs in."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from longtake.process import cpu_flags

Precision = Literal["bf16", "fp32"]


_ISAS_WITHOUT_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN uses no bf16 instructions for matrix products."""


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], device: torch.device) -> Precision:
    """The precision of the arithmetic; `auto` is bf16 where the device has instructions for it."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if cpu_has_bf16() else "fp32"


def cpu_has_bf16() -> bool:
    """Whether the processor has AMX or avx512_bf16, and oneDNN may use them.

    Elsewhere oneDNN emulates bf16, which is slower than fp32.
    """
    limits = (os.environ.get(f"{name}_MAX_CPU_ISA", "") for name in ("ONEDNN", "DNNL"))
    if any(limit.upper() in _ISAS_WITHOUT_BF16 for limit in limits):
        return False
    return not cpu_flags().isdisjoint({"amx_bf16", "avx512_bf16"})


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """A context in which matrix products run in bf16, or nothing changes.

    Without the cache of bf16 weights: a forward pass uses each weight once, and the cache would
    keep the bf16 copies of all weights until its end.
    """
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    )


@contextmanager
def mixed_norms() -> Iterator[None]:
    """A context in which torch does not say that norms take bf16 inputs and fp32 weights.

    So they do under autocast. torch has no fused kernel for it and says so at every launch, but
    nobody can do anything about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an operation failed because the device's or the computer's memory is used up."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
