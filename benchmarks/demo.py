"""The demo on several seeds and instruction sets: what it learns, and how long it takes.

    python benchmarks/demo.py [--seeds 0 1 2 3 4] [--isa AVX512_CORE_BF16 AVX2] [--out FOLDER]

Runs `longtake demo` once for each seed and instruction set, one after the other, and writes
benchmarks/results/demo.md. ONEDNN_MAX_CPU_ISA limits the instructions that oneDNN may use;
`precision = "auto"` follows it. Two and a half to four minutes each on two CPU cores, with no
other process running.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from longtake.process import program
from longtake.run_dir import RunDirectory

_RESULTS = Path(__file__).parent / "results" / "demo.md"


def main() -> None:
    """Run every seed with every instruction set and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--isa", nargs="+", default=["AVX512_CORE_BF16", "AVX2"])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    asked = parser.parse_args()
    rows = [_run(asked.out, isa, seed) for isa in asked.isa for seed in asked.seeds]
    text = _table(rows, asked.isa)
    _RESULTS.write_text(text, encoding="utf-8")
    print(text)  # noqa: T201


def _run(folder: Path, isa: str, seed: int) -> dict[str, Any]:
    out = folder / f"demo_{isa}_{seed}"
    shutil.rmtree(out, ignore_errors=True)
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    begun = time.monotonic()
    command = program("longtake", "demo", "--seed", str(seed), "--out", str(out))
    subprocess.run(command, env=environment, check=True)  # noqa: S603 - our own program
    seconds = time.monotonic() - begun
    summary = json.loads((out / "summary.json").read_bytes())
    judged = summary["videos_checked"] // 2
    launched = next(each for each in RunDirectory(out).events() if each["event"] == "launched")
    alarms = [
        alarm
        for scores in out.glob("evaluations/*/step_*/scores.json")
        for alarm in json.loads(scores.read_bytes())["alarms"]
        if alarm["kind"] == "drift"
    ]
    return {
        "instructions": isa,
        "precision": launched["precision"],
        "seed": seed,
        "held out": f"{round(summary['held_out_adherence'] * judged)} of {judged}",
        "trained": f"{round(summary['adherence'] * judged)} of {judged}",
        "training s": round(summary["training_seconds"], 1),
        "whole command s": round(seconds, 1),
        "steps/s": summary["steps_per_second"],
        "drift alarms": len(alarms),
    }


def _table(rows: list[dict[str, Any]], isas: list[str]) -> str:
    medians = "; ".join(
        f"{isa}: {_median(rows, isa, 'training s'):.0f} s of training, "
        f"{_median(rows, isa, 'whole command s'):.0f} s in all"
        for isa in isas
    )
    return "\n".join(
        [
            "# The demo on several seeds",
            "",
            f"`python benchmarks/demo.py`, {platform.machine()}, {torch.get_num_threads()} "
            f"threads, torch {torch.__version__}. Medians: {medians}. Videos of prompts that were "
            "held out of training, and of prompts that were trained, are judged from their pixels.",
            "",
            "| " + " | ".join(rows[0]) + " |",
            "|" + "---|" * len(rows[0]),
            *("| " + " | ".join(map(str, row.values())) + " |" for row in rows),
            "",
        ]
    )


def _median(rows: list[dict[str, Any]], isa: str, column: str) -> float:
    return float(statistics.median(row[column] for row in rows if row["instructions"] == isa))


if __name__ == "__main__":
    main()
