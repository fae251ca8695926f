"""Predicted against really allocated memory and measured time, on a CUDA card.

    python benchmarks/gpu_plan.py [--budget 44.5] [--only kernels small large]

Three things, each predicted without weights or values and then really run:

- kernels: what attention, norms and products keep and take for a moment, and how long they run
- small: FLUX Kontext and Wan with a few narrow blocks, under every recompute policy and the best
- large: FLUX.1 Kontext itself, 12 billion random weights made on the card, at 1024x1024 with a
  reference; LoRA of rank 16 in bf16, as in examples/flux_kontext_lora_48gb.toml; and AdamW's update

Memory is `torch.cuda.max_memory_allocated`; times are medians of three after one to warm up. Prints
the tables and writes them to benchmarks/results/gpu_plan.md. Under eight minutes on one card of
80 GB; a policy that is predicted not to fit is left out. Besides longtake's own dependencies on the
way from a recipe to a model (torch, diffusers, transformers, peft, accelerate, safetensors,
tokenizers, pydantic, tomli-w, numpy, scipy) it needs nothing: no clips are read and no weights
loaded. Without a card it says so and ends.
"""

import argparse
import gc
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longtake import config
from longtake.config import Recipe
from longtake.recompute.apply import caller
from longtake.recompute.devices import Device, device_at_hand
from longtake.recompute.measure import Memory, measured
from longtake.recompute.plan import Survey, find_best, survey
from longtake.recompute.policies import POLICIES, Options, options_of
from longtake.recompute.trace import StepTrace, Subject, Tracer
from longtake.training.objective import flow_losses
from longtake.training.optim import build_optimizers
from longtake.training.optimizer_memory import foreach_bytes, optimizer_bytes
from longtake.training.outlined import OutlinedStep, outlined_step

_RESULTS = Path(__file__).parent / "results" / "gpu_plan.md"
_EXAMPLE = Path(__file__).parents[1] / "examples" / "flux_kontext_lora_48gb.toml"
_GIB, _MIB = 2**30, 2**20
_TIMES = 3
_SHARE_OF_CARD = 0.93
_SECTIONS = ("kernels", "small", "large")
_NOTHING = """# Predicted against measured on a card

`python benchmarks/gpu_plan.py`

Nothing was measured on a GPU: {reason}. All that `longtake plan` says of a GPU is a prediction. What
its traces say of memory is held against the CPU's allocator, and what stands in for CUDA's kernels
against torch's own derivatives, in [plan_accuracy.md](plan_accuracy.md). What CUDA's kernels take for
a moment is taken from their source, and times are a roofline of the card's data sheet.
"""


def main() -> None:
    """Measure what is asked for; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=44.5, help="GiB, for the large model's best")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, default=_SECTIONS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        _skip("torch finds no CUDA card here")
        return
    begun, card, device = time.perf_counter(), device_at_hand(), torch.device("cuda")
    lines = _head(card)
    if "kernels" in asked.only:
        lines += _kernels(card, device)
    if "small" in asked.only:
        lines += _small(card, device)
    if "large" in asked.only:
        lines += _large(card, device, int(asked.budget * _GIB))
    lines += [f"{time.perf_counter() - begun:.0f} s for everything.", ""]
    _RESULTS.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _skip(reason: str) -> None:
    """Say so, and write it down unless a card's figures are there already."""
    print(f"Skipped: {reason}. Figures of a GPU are predictions until it is run on one.")  # noqa: T201
    nothing = _NOTHING.format(reason=reason)
    if not _RESULTS.exists() or "Nothing was measured" in _RESULTS.read_text(encoding="utf-8"):
        _RESULTS.write_text(nothing, encoding="utf-8")


def _head(card: Device) -> list[str]:
    return [
        "# Predicted against measured on a card",
        "",
        f"`python benchmarks/gpu_plan.py`, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}. Predicted for the data sheet of {card.name}.",
        "",
    ]


@dataclass(frozen=True)
class Run:
    """A step that was really made, in bytes beside what was there before, and seconds."""

    forward_end_bytes: int
    peak_bytes: int
    seconds: float


def _run(step: Callable[[Memory | None], None], device: torch.device) -> Run:
    """Memory of the second run, and the median time of those after it."""
    step(None)  # libraries take what they keep
    with measured(device) as memory:
        step(memory)
    seconds = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        step(None)
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    return Run(memory.at["forward"], memory.peak_bytes, statistics.median(seconds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _off(predicted: float, real: float) -> str:
    return f"{predicted / real - 1:+.1%}"
