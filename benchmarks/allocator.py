"""The cost of glibc returning freed memory to the kernel, in a training step on a CPU.

    python benchmarks/allocator.py [--steps 200] [--rounds 3]

Trains the demo's recipe on a few clips, alternating between glibc's defaults and freed memory kept,
each time in a new process. Prints medians over the steps and writes them to
benchmarks/results/allocator.md. Two minutes on two idle CPU cores.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from longtake.data.index import index
from longtake.demo.run import demo_recipe
from longtake.demo.shapes import write_clips
from longtake.run_dir import RunDirectory
from longtake.training import train as training

_RESULTS = Path(__file__).parent / "results" / "allocator.md"
_WARM_UP = 40


def main() -> None:
    """Measure both ways alternately, or the way of `--one`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["default", "kept"])
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(_measure(asked.one == "kept", asked.steps)))  # noqa: T201
        return
    rounds = [
        {way: _in_a_process(way, asked.steps) for way in ("default", "kept")}
        for _ in range(asked.rounds)
    ]
    table = _table(rounds)
    _RESULTS.write_text(table, encoding="utf-8")
    print(table)  # noqa: T201


def _in_a_process(way: str, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", way, "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - our own program
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _measure(is_kept: bool, steps: int) -> dict[str, float]:
    if not is_kept:
        setattr(training, "keep_freed_memory", lambda: False)  # noqa: B010 - for mypy, not exported
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        recipe = demo_recipe(out, steps, seed=0)
        captions = write_clips(out / "data" / "clips", 320, seed=0)
        index([captions.parent], captions=captions, out=recipe.data.sources()["catalog"])
        training.train(recipe, Console(quiet=True))
        rows = RunDirectory(out).metrics()[_WARM_UP:]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    median = statistics.median(row["step_seconds"] for row in rows)
    return {"step_ms": 1e3 * median, "system_seconds": usage.ru_stime}


def _table(rounds: list[dict[str, dict[str, float]]]) -> str:
    lines = [
        "# Freed memory, handed back or kept",
        "",
        "`python benchmarks/allocator.py`: the demo's step on CPU, medians of each round.",
        "",
        "| round | step, handed back | step, kept | ratio | system time, handed back | kept |",
        "|---|---|---|---|---|---|",
    ]
    for number, ways in enumerate(rounds, start=1):
        default, kept = ways["default"], ways["kept"]
        lines.append(
            f"| {number} | {default['step_ms']:.1f} ms | {kept['step_ms']:.1f} ms "
            f"| {kept['step_ms'] / default['step_ms']:.2f} "
            f"| {default['system_seconds']:.1f} s | {kept['system_seconds']:.1f} s |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
