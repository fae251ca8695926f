"""Whether batches are independent random samples, and how fast their order is computed.

    python benchmarks/data_order.py [--clips 1000000] [--seeds 5] [--rounds 5]

One epoch of N clips in one bucket, batches of 256, compared with a true permutation (numpy's) and
other orders in O(1) memory. A catalog is never in random order: clips of one source, one length or
one camera are adjacent. Features f of a clip's position p in the catalog represent that:

    place   p / N                      tenth   1 in the first tenth, else 0
    parity  p mod 2                    period  (p mod 1000) / 1000

Variance ratio. Split the epoch into K batches of B samples. Under sampling without replacement the
mean of a batch has the variance s^2 / B x (N - B) / (N - 1), s^2 being that of f over all clips.
The ratio is the mean of (batch mean - mean over all)^2 over the K batches, divided by that. It is 1
for a true permutation, with a standard deviation of sqrt(2 / K). Below 1, batches are more similar
than random ones; above, less similar. For B = 32 and B = 256; the worst is the furthest from 1.

Lag-1 chi-square. Divide the positions into 100 equal cells, and count the pairs (cell of the i-th
sample, cell of the one after it) over the epoch: (count - expected)^2 / expected, summed over the
100 x 100 pairs and divided by the 99^2 degrees of freedom that fixed margins leave. It is 1 for a
true permutation, with a standard deviation of 0.014; higher if a sample predicts the next one, and
lower if all pairs occur more evenly than at random. Lag 256 compares a sample with the one at its
position in the next batch.

Prints a table, and writes it to benchmarks/results/data_order.md. A minute on two CPU cores.
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.data.order import EpochSpan, permuted

Order = NDArray[np.int64]
"""[N] position in the catalog of each sample of an epoch, in training order."""

_RESULTS = Path(__file__).parent / "results" / "data_order.md"
_BATCH = 256
_BATCHES = (32, 256)
_CELLS = 100
_OURS = "longtake, batch by batch"


def main() -> None:
    """Measure independence, then throughput; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=10**6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    grain = _grain()
    ways: dict[str, Callable[[int, int], Order]] = {_OURS: _ours, "numpy's permutation": _numpy}
    if grain is not None:
        ways["grain's index_shuffle, 4 rounds"] = grain
    ways["LCG of 2^k, others skipped"] = _lcg
    lines = _head(asked.clips, asked.seeds, grain is not None)
    lines += [_row(name, way, asked.clips, asked.seeds) for name, way in ways.items()]
    lines += _throughput({**ways, "longtake, the whole epoch": _at_once}, asked.clips, asked.rounds)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _ours(size: int, seed: int) -> Order:
    """The order of a run: batches in their shuffled order."""
    leg = EpochSpan((size,), _BATCH, seed, num_epochs=1)
    assert leg.num_batches is not None
    return np.concatenate([leg.batch(number).positions for number in range(leg.num_batches)])


def _at_once(size: int, seed: int) -> Order:
    return permuted(np.arange(size), size, seed, "", "clips", 0, 0)


def _numpy(size: int, seed: int) -> Order:
    return np.random.default_rng(seed).permutation(size)


def _lcg(size: int, seed: int) -> Order:
    """Steps x -> a x + c modulo a power of two, with the constants of Numerical Recipes (1992)."""
    modulus = 1 << (size - 1).bit_length()
    values = np.empty(modulus, np.int64)
    values[0], known = (seed * 7919 + 12345) % modulus, 1
    factor, addend = 1664525 % modulus, 1013904223 % modulus  # of `known` steps at once
    while known < modulus:
        values[known : 2 * known] = (values[:known] * factor + addend) % modulus
        factor, addend = factor * factor % modulus, (factor + 1) * addend % modulus
        known *= 2
    return values[values < size]


def _grain() -> Callable[[int, int], Order] | None:
    """The order of grain's IndexSampler and `shuffle`, or None if grain is not installed."""
    try:
        from grain._src.python.experimental.index_shuffle.python import (  # type: ignore[import-not-found,unused-ignore]
            index_shuffle_module,
        )
    except ImportError:
        return None

    def ordered(size: int, seed: int) -> Order:
        place = partial(index_shuffle_module.index_shuffle, max_index=size - 1, seed=seed, rounds=4)
        return np.fromiter(map(place, range(size)), np.int64, size)

    return ordered


def _head(size: int, seeds: int, has_grain: bool) -> list[str]:
    versions = f"numpy {np.__version__}"
    versions += f", grain {importlib.metadata.version('grain')}" if has_grain else ""
    absent = "" if has_grain else " grain is not installed, and not in the table."
    return [
        "# The order of the data: independence of batches, and speed",
        "",
        f"`python benchmarks/data_order.py`, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}. {size:,} clips, {seeds} seeds; what is measured "
        f"is defined in the script.{absent}",
        "",
        "Worst over the seeds; 1 is a true permutation. Wanted: variance ratios 0.9 to 1.1, "
        "chi-square/df 0.8 to 1.2.",
        "",
        "| order | place | tenth | parity | period | chi-square/df, lag 1 | lag 256 |",
        "|---|---|---|---|---|---|---|",
    ]


def _row(name: str, way: Callable[[int, int], Order], size: int, seeds: int) -> str:
    measured = [_measures(way(size, seed)) for seed in range(seeds)]
    return f"| {name} | " + " | ".join(f"{_worst(each):.3f}" for each in zip(*measured)) + " |"  # noqa: B905 - all as long


def _worst(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda ratio: abs(np.log(ratio)))


def _measures(order: Order) -> list[float]:
    """The columns of the table for one epoch."""
    size = len(order)
    assert (np.bincount(order, minlength=size) == 1).all(), "each clip exactly once"
    features = [
        order / size,
        (order < size // 10).astype(np.float64),
        (order % 2).astype(np.float64),
        order % 1000 / 1000,
    ]
    ratios = [_worst([_ratio(each, batch) for batch in _BATCHES]) for each in features]
    return [*ratios, _chi_square(order, 1), _chi_square(order, _BATCH)]


def _ratio(values: NDArray[np.float64], batch: int) -> float:
    size, count = len(values), len(values) // batch
    means = values[: count * batch].reshape(count, batch).mean(1)
    expected = values.var() / batch * (size - batch) / (size - 1)
    return float(((means - values.mean()) ** 2).mean() / expected)


def _chi_square(order: Order, lag: int) -> float:
    cells = order * _CELLS // len(order)
    pairs = cells[:-lag] * _CELLS + cells[lag:]
    counts = np.bincount(pairs, minlength=_CELLS**2)
    expected = len(pairs) / _CELLS**2
    return float(((counts - expected) ** 2 / expected).sum() / (_CELLS - 1) ** 2)


def _throughput(ways: dict[str, Callable[[int, int], Order]], size: int, rounds: int) -> list[str]:
    """Alternate in each round, so that other load of the machine affects all equally."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way(size, seed)
            rates[name].append(size / (time.perf_counter() - begun))
    lines = ["", f"Clips ordered per second, median of {rounds} rounds.", ""]
    lines += ["| order | million/s | to numpy's |", "|---|---|---|"]
    medians = {name: statistics.median(each) for name, each in rates.items()}
    numpys = medians["numpy's permutation"]
    for name, rate in medians.items():
        lines.append(f"| {name} | {rate / 1e6:.2f} | {rate / numpys:.3f} |")
    return [
        *lines,
        "",
        "longtake and grain compute any part of the order alone; the others compute and keep all "
        "of it, 8 bytes per clip.",
    ]


if __name__ == "__main__":
    main()
