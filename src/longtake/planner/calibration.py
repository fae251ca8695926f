"""Measures how fast this machine's GPU is, in ten seconds, so that plans predict its real seconds.

A data sheet says what a GPU could do; the share of it that kernels reach depends on the GPU, its
power limit, the driver and torch's version. The rates are kept in the user's cache folder.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from longtake import fsio
from longtake.errors import PlanError
from longtake.health.gpu import driver_facts
from longtake.parallel import attention_rules

_SECONDS = 1.2
"""Time for which each of seven rates is measured, after a first call that is not counted."""
_LEAST_CALLS = 3
_TOKENS, _WIDTH = 16384, 3072
_HEADS, _HEAD_WIDTH = 24, 128
_COPIED_BYTES = 2**28
_Rate = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


@dataclass(frozen=True)
class MeasuredRates:
    """What a GPU reached: operations per second, and bytes per second."""

    bf16_products: _Rate
    fp32_products: _Rate
    attention: _Rate  # in bf16, forward and backward
    masked_attention: _Rate  # the same where padding is masked
    memory: _Rate  # read and written
    host: _Rate  # the slower one of copies to page-locked memory and back
    measured_at: str  # UTC, ISO 8601


_KEPT = TypeAdapter(MeasuredRates)


def calibrate(device: torch.device) -> MeasuredRates:
    """Measure a GPU, and keep its rates for later plans and trainings.

    Raises:
        PlanError: the rates cannot be kept.
    """
    rates = measure_rates(device)
    try:
        path = _path(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        fsio.write_json(path, asdict(rates))
    except (OSError, RuntimeError) as error:
        raise PlanError(
            f"The GPU's rates were measured, and cannot be kept in the cache folder: {error}. Set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return rates


def kept_rates(device: torch.device) -> MeasuredRates | None:
    """Return the rates of an earlier calibration of this GPU; None without one, or damaged."""
    # RuntimeError is raised for a user without a home folder.
    with suppress(RuntimeError, ValidationError, OSError):
        return _KEPT.validate_python(fsio.read_json(_path(device)))
    return None


def measure_rates(device: torch.device, seconds: float = _SECONDS, scale: int = 1) -> MeasuredRates:
    """Measure the rates of a device, each for some seconds, on problems that `scale` divides.

    The products and the attention have the sizes of a transformer's block of width 3072.
    """
    tokens, width, num_bytes = _TOKENS // scale, _WIDTH // scale, _COPIED_BYTES // scale**2

    def rate(count: float, work: Callable[[], object]) -> float:
        return count / _median_seconds(device, work, seconds)

    def products(dtype: torch.dtype) -> float:
        first = torch.randn(tokens, width, device=device, dtype=dtype)
        second = torch.randn(4 * width, width, device=device, dtype=dtype)
        return rate(2 * tokens * width * 4 * width, lambda: F.linear(first, second))

    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return MeasuredRates(
        bf16_products=products(torch.bfloat16),
        fp32_products=products(torch.float32),
        attention=_attention_rate(device, tokens // 2, rate),
        masked_attention=_attention_rate(device, tokens // 2, rate, is_masked=True),
        memory=rate(2 * num_bytes, lambda: target.copy_(source)),
        host=min(
            rate(num_bytes, lambda: pinned.copy_(source, non_blocking=True)),
            rate(num_bytes, lambda: source.copy_(pinned, non_blocking=True)),
        ),
        measured_at=fsio.now(),
    )


def _attention_rate(
    device: torch.device,
    tokens: int,
    rate: Callable[[float, Callable[[], object]], float],
    *,
    is_masked: bool = False,
) -> float:
    attention_rules.guard_attention()  # as in training, which refuses kernels with faults
    mask = torch.arange(tokens, device=device)[None, None, None] < tokens - 1
    shape = 1, _HEADS, tokens, _HEAD_WIDTH
    queries, keys, values, gradient = (
        torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    leaves = [each.requires_grad_() for each in (queries, keys, values)]

    def attend() -> tuple[Tensor, ...]:
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask if is_masked else None
        )
        return torch.autograd.grad(attended, leaves, gradient)

    # 4 operations for each pair of tokens and channel in the forward pass, and 10 in the backward
    # pass, which computes the scores again (Dao, "FlashAttention-2", 2023, section 4.1).
    return rate(14.0 * _HEADS * tokens**2 * _HEAD_WIDTH, attend)


def _median_seconds(device: torch.device, work: Callable[[], object], seconds: float) -> float:
    def once() -> float:
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    once()
    ends, taken = time.perf_counter() + seconds, list[float]()
    while len(taken) < _LEAST_CALLS or time.perf_counter() < ends:
        taken.append(once())
    return statistics.median(taken)


def _path(device: torch.device) -> Path:
    name = hashlib.sha256(json.dumps(device_facts(device)).encode()).hexdigest()[:32]
    return fsio.cache_folder() / "rates" / f"{name}.json"


def device_facts(device: torch.device) -> dict[str, object]:
    """Return what measurements of a device depend on: its name, the driver and torch's version."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "driver": driver_facts().get("driver") if on_cuda else None,
        "torch": torch.__version__,
    }
