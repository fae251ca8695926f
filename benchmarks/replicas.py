"""The cost of comparing replicas of the weights, as a share of a training step.

    python benchmarks/replicas.py [--rounds 20]

One process: a step of a transformer (forward, backward, AdamW) and the checksum of its weights, by
turns, in CPU seconds. The sum that carries checksums is made in any case. Writes
benchmarks/results/replicas.md.
"""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from longtake.config import GuardSection
from longtake.parallel.replicas import checksum

_RESULTS = Path(__file__).parent / "results" / "replicas.md"
_WIDTH, _LAYERS, _TOKENS = 512, 6, 512


def main() -> None:
    """Measure both by turns; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, 0.0) for _ in range(_LAYERS)]
    model, tokens = nn.Sequential(*layers), torch.randn(_TOKENS, 1, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = [
        (_seconds(step), _seconds(lambda: checksum(model.parameters()))) for _ in range(rounds + 2)
    ]
    steps, checksums = zip(*pairs[2:], strict=True)
    share = median(sum_ / step for step, sum_ in zip(steps, checksums, strict=True))
    every = GuardSection().compare_replicas_every
    weights = sum(each.numel() for each in model.parameters())
    lines = [
        "# Comparing replicas of the weights",
        "",
        f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} thread. A "
        f"transformer of {weights / 1e6:.1f} M fp32 weights, {_TOKENS} tokens a step; {rounds} "
        "rounds, medians of CPU seconds.",
        "",
        "| | |",
        "|---|---|",
        f"| a step | {1e3 * median(steps):.0f} ms |",
        f"| a checksum of all weights | {1e3 * median(checksums):.1f} ms |",
        f"| its share of a step | {share:.2%} |",
        f"| the same, every {every} steps (the default) | {share / every:.3%} |",
    ]
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
