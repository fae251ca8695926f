"""Time and memory of `longtake show` on a run of 1,000,000 steps.

    python benchmarks/show_metrics.py [--steps 1000000] [--rounds 3]

Writes a metrics.jsonl as the training loop does (about 680 bytes per step), reads it once so that
it is in the page cache, and measures new processes: `read_rows` without a cache, `read_rows` after
1,000 lines were appended to a file that is in the cache, and `longtake show` in both cases. Needs
about 1 GB below `--folder`. Writes benchmarks/results/show_metrics.md.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from longtake import config
from longtake.fsio import read_last_record
from longtake.metrics import Metrics
from longtake.run_dir import RunDirectory

_RESULTS = Path(__file__).parent / "results" / "show_metrics.md"
_NEW_LINES = 1000
_GROUPS = ("embedding", "attention", "mlp", "other")
_READ = """
import sys, time
from pathlib import Path
from longtake.inspection.rows import read_rows
from longtake.run_dir import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
begun, cpu = time.perf_counter(), time.process_time()
rows = read_rows(run)
print(len(rows), time.perf_counter() - begun, time.process_time() - cpu)
"""


class Measured(NamedTuple):
    """Measurements of one process: seconds, CPU seconds and peak memory."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def main() -> None:
    """Write the file, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the run is written", default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run = _make_run(Path(folder) / "run", arguments.steps)
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        found: dict[str, list[Measured]] = {}
        for _ in range(arguments.rounds):
            for name, measure in (("read_rows", _read), ("longtake show", _show)):
                _empty(Path(folder) / "cache")
                found.setdefault(f"{name}, no cache", []).append(measure(run))
                _append(run, _NEW_LINES)
                new = f"{name}, {_NEW_LINES:,} new lines"
                found.setdefault(new, []).append(measure(run))
        text = _report(arguments, run, found)
    _RESULTS.write_text(text)
    print(text)  # noqa: T201 - a script


def _make_run(path: Path, steps: int) -> RunDirectory:
    values = {
        "out": str(path),
        "data": {
            "catalog": "clips.parquet",
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
        },
        "model": {"family": "tubelet"},
        "training": {"steps": 2 * steps, "global_batch_size": 4},
    }
    path.mkdir()
    run = RunDirectory(path)
    run.create(config.parse(values, "benchmark"))
    run.record_launch(start_step=0, world_size=1, device="cpu", precision="fp32")
    run.append_event("launched", step=0, world_size=1)
    _append(run, steps)
    return run


def _append(run: RunDirectory, count: int) -> None:
    last = read_last_record(run.metrics_path, Metrics)
    first = last["step"] if last else 0
    with run.metrics_path.open("ab") as file:
        file.writelines(_lines(first, count))


def _lines(first: int, count: int) -> Iterator[bytes]:
    numbers = random.Random(first)  # noqa: S311 - only numbers

    def number() -> float:
        return round(numbers.random(), 7)

    for step in range(first + 1, first + count + 1):
        row = {
            "step": step,
            "epoch": step // 1000,
            "loss": numbers.random(),
            "grad_norm": numbers.random(),
            "learning_rate": 0.0001,
            "step_seconds": round(number(), 6),
            "data_seconds": round(number(), 6),
            "time": round(1.8e9 + step / 3, 3),
            "batch": step - 1,
            "num_samples": 4,
            "loss_by_sigma": [number(), None, number(), number()],
            "weight_norm": round(50 + number(), 5),
            "update_ratio": number() * 1e-6,
            "nonfinite_share": 0.0,
            "group_grad_norms": {name: number() for name in _GROUPS},
            "group_weight_norms": {name: round(10 + number(), 5) for name in _GROUPS},
            "group_update_ratios": {name: number() * 1e-6 for name in _GROUPS},
            "launch": "73e88faa",
            "tflops_per_second": round(number(), 6),
        }
        yield json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _empty(cache: Path) -> None:
    for path in cache.rglob("*.rows"):
        path.unlink()


def _read(run: RunDirectory) -> Measured:
    """Seconds of `read_rows` alone, without imports; the peak is of the process."""
    process, peak, _, _ = _run([sys.executable, "-c", _READ, str(run.path)])
    _, seconds, cpu_seconds = process.split()
    return Measured(float(seconds), float(cpu_seconds), peak)


def _show(run: RunDirectory) -> Measured:
    """Seconds of the whole command, from the start of Python to its end."""
    _, peak, seconds, cpu_seconds = _run([sys.executable, "-m", "longtake", "show", str(run.path)])
    return Measured(seconds, cpu_seconds, peak)


def _run(command: list[str]) -> tuple[str, float, float, float]:
    """Output, peak memory in MB, seconds and CPU seconds of a process."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)  # noqa: S603 - our own
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        output.seek(0)
        text = output.read()
    return text, usage.ru_maxrss * 1024 / 1e6, seconds, usage.ru_utime + usage.ru_stime


def _report(
    arguments: argparse.Namespace, run: RunDirectory, found: dict[str, list[Measured]]
) -> str:
    size = run.metrics_path.stat().st_size / 1e6
    load = os.getloadavg()[0]
    rows = "\n".join(
        "| {} | {:.2f} | {:.2f} | {:.0f} |".format(
            name, *(statistics.median(each) for each in zip(*runs, strict=True))
        )
        for name, runs in found.items()
    )
    busy = (
        f" Other programs were running (load average {load:.0f}): seconds are too high, compare "
        "CPU seconds."
        if load > (os.cpu_count() or 1)
        else ""
    )
    return f"""# `longtake show` on a long run

`python benchmarks/show_metrics.py --steps {arguments.steps} --rounds {arguments.rounds}`:
{arguments.steps:,} steps, {size:,.0f} MB of metrics.jsonl in the page cache, {os.cpu_count()} \
cores of {platform.machine()}. Medians of new processes.{busy}

| | seconds | CPU seconds | peak MB |
|---|---|---|---|
{rows}

`read_rows` is timed without Python's start and imports; `longtake show` with both. CPU seconds are
of all threads.
"""


if __name__ == "__main__":
    main()
