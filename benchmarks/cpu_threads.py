"""Seconds of a step of the demo on a CPU, alone and beside busy processes, by number of threads.

    python -m benchmarks.cpu_threads [--steps 150] [--busy 2]

`measured` is what `longtake train` does by itself; the other rows set OMP_NUM_THREADS. Rows are run
in turn, so that other load on the machine meets all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from longtake import config, process
from longtake.demo.run import demo_recipe, make_catalog
from longtake.run_dir import RunDirectory

_OUT = Path(__file__).with_name("results") / "cpu_threads.md"
_BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep a core busy")
    options = parser.parse_args()
    cores = process.num_cores()
    numbers = {"measured": None, f"{cores} threads": cores, "1 thread": 1}
    lines = [
        "# Threads of a training on a CPU",
        "",
        f"`python -m benchmarks.cpu_threads --steps {options.steps} --busy {options.busy}`, "
        f"{cores} cores; median milliseconds of the second half of the demo's steps.",
        "",
        "| | alone | beside busy processes | ratio |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        make_catalog(RunDirectory(top / "demo"), 0, Console(quiet=True))
        found = {
            (name, busy): _step_seconds(top, options.steps, number, busy)
            for busy in (0, options.busy)
            for name, number in numbers.items()
        }
    for name in numbers:
        alone, beside = found[name, 0], found[name, options.busy]
        lines.append(f"| {name} | {alone:.0f} | {beside:.0f} | {beside / alone:.2f} |")
    text = "\n".join(lines) + "\n"
    _OUT.write_text(text)
    print(text)  # noqa: T201


def _step_seconds(top: Path, steps: int, number: int | None, busy: int) -> float:
    """Median milliseconds of a step."""
    recipe = demo_recipe(top / "demo", steps, 0)
    out = top / f"run_{number}_{busy}"
    values = recipe.model_copy(update={"out": out})
    (top / "recipe.toml").write_text(config.dump(values))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {} if number is None else {"OMP_NUM_THREADS": str(number)}
    command = [sys.executable, "-m", "longtake", "train", str(top / "recipe.toml")]
    with _busy(busy):
        subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds: list[float] = [row["step_seconds"] for row in rows[steps // 2 :]]
    return 1e3 * statistics.median(seconds)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]  # noqa: S603
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


if __name__ == "__main__":
    main()
