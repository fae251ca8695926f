"""What the processor takes to issue a block whose attention is kept, compared with other options.

    python benchmarks/save_attention.py [--rounds 200]

Blocks of FLUX and Wan with few tokens and narrow layers, so that the arithmetic takes next to
nothing and a step's time is that of issuing operations, which is what a GPU waits for. Before,
attention was kept by torch's selective checkpointing, which passes every operation through Python.
The options take turns in every round. Writes benchmarks/results/save_attention.md.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longtake.planner.activation_checkpointing import _contexts, run_block

_RESULTS = Path(__file__).parent / "results" / "save_attention.md"
_TOKENS, _TEXT, _HEADS, _CHANNELS = 4, 2, 2, 8

Call = Callable[..., Any]
_OPTIONS: dict[str, Call] = {
    "keep": partial(run_block, "keep"),
    "recompute": partial(run_block, "recompute"),
    "save-attention": partial(run_block, "save-attention"),
    "selective checkpointing (before)": partial(
        checkpoint, use_reentrant=False, context_fn=_contexts
    ),
}


def main() -> None:
    """Measure both kinds of blocks; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    lines = [
        "# Issuing a block, forward and backward",
        "",
        f"Medians of {rounds} rounds in ms on one core, and their ratio to `save-attention`.",
        "",
        "| block | option | ms | ratio |",
        "|---|---|---|---|",
    ]
    for name, (block, inputs) in {"FLUX": _flux(), "Wan": _wan()}.items():
        found = _measured(block, inputs, rounds)
        base = found["save-attention"]
        lines += [
            f"| {name} | {option} | {1e3 * seconds:.2f} | {seconds / base:.2f} |"
            for option, seconds in found.items()
        ]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    _RESULTS.write_text(text, encoding="utf-8")


def _flux() -> tuple[nn.Module, tuple[Any, ...]]:
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    width = _HEADS * _CHANNELS
    block = FluxTransformerBlock(width, _HEADS, _CHANNELS)
    angles = torch.randn(_TOKENS + _TEXT, _CHANNELS)
    tokens, text = torch.randn(1, _TOKENS, width), torch.randn(1, _TEXT, width)
    return block, (tokens, text, torch.randn(1, width), (angles.cos(), angles.sin()))


def _wan() -> tuple[nn.Module, tuple[Any, ...]]:
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    width = _HEADS * _CHANNELS
    block = WanTransformerBlock(width, 4 * width, _HEADS, cross_attn_norm=True)
    angles = torch.randn(1, _TOKENS, 1, _CHANNELS)
    tokens, text = torch.randn(1, _TOKENS, width), torch.randn(1, _TEXT, width)
    return block, (tokens, text, torch.randn(1, 6, width), (angles.cos(), angles.sin()))


def _measured(block: nn.Module, inputs: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Median seconds of a forward and backward pass by each option."""
    taken: dict[str, list[float]] = {name: [] for name in _OPTIONS}
    inputs[0].requires_grad_()
    for _ in range(rounds):
        for name, call in _OPTIONS.items():
            begun = time.perf_counter()
            output = call(block, *inputs)
            parts = output if isinstance(output, tuple) else (output,)
            torch.autograd.backward(torch.stack([part.sum() for part in parts]).sum())
            taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds[5:]) for name, seconds in taken.items()}


if __name__ == "__main__":
    main()
