"""The demo on several seeds: does it learn what it should, and how long does it take?

    python benchmarks/demo.py [--seeds 0 1 2] [--steps 3000] [--out runs/benchmark]

Trains the demo once per seed, one after the other, and writes a table to
benchmarks/results/demo.md. Four to five minutes a seed on two quiet CPU cores.
"""

import argparse
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longtake.demo.run import run_demo

_RESULTS = Path(__file__).parent / "results" / "demo.md"
_COLUMNS = (
    "seed",
    "steps",
    "held_out_adherence",
    "adherence",
    "training_seconds",
    "steps_per_second",
    "final_loss",
)


def main() -> None:
    """Run every seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    asked = parser.parse_args()
    console = Console(stderr=True, soft_wrap=True)
    rows = []
    for seed in asked.seeds:
        out = asked.out / f"demo_{seed}"
        summary = run_demo(out=out, steps=asked.steps, minutes=None, seed=seed, console=console)
        if summary is None:
            raise SystemExit("Interrupted; the same command goes on.")
        rows.append(summary)
    _RESULTS.write_text(_table(rows), encoding="utf-8")
    console.print(_table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    median = statistics.median(row["training_seconds"] for row in rows)
    judged = rows[0]["videos_judged"] // 2
    lines = [
        "# The demo on several seeds",
        "",
        f"`python benchmarks/demo.py`, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}. Median training time {median:.0f} s. Adherence is judged on "
        f"{judged} generated videos each of held-out and of trained prompts.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(str(row[name]) for name in _COLUMNS) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
