"""Which precision the arithmetic runs in."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["bf16", "fp32"]


def choose_precision(wanted: Literal["auto", "bf16", "fp32"], device: torch.device) -> Precision:
    """`auto` takes bf16 where the device is faster in it.

    CUDA cards say whether they have it. A CPU has to be tried: without avx512_bf16 or AMX bf16 is
    slower than fp32.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if _matmul_seconds(torch.bfloat16) < _matmul_seconds(torch.float32) else "fp32"


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """A context in which matrix products run in bf16, or nothing changes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def mixed_norms() -> Iterator[None]:
    """A context in which torch does not say that norms take bf16 inputs and fp32 weights.

    So they do under autocast. torch has no fused kernel for it and says so at every launch, but
    nobody can do anything about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def _matmul_seconds(dtype: torch.dtype, size: int = 384, tries: int = 7) -> float:
    """The least time of a matrix product: the least disturbed by whatever else is running."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return min(times)
