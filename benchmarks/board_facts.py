"""Time and memory of the facts that pages are made of, on a run of 1,000,000 steps.

    python -m benchmarks.board_facts [--steps 1000000] [--rounds 3]

Writes a metrics.jsonl as benchmarks/show_metrics.py does, with an event of a checkpoint every 5,000
steps, and 50 runs of 2,000 steps beside it. Each figure is the median of new processes: the index
without a cache on all cores; then on one core, with the cache, all series over all steps for 1,000
pixels (the first time and again), a window of 2,000 steps, time line and goodput, the same after
100 new lines, and the list of runs. Needs about 1 GB below `--folder`. Writes
benchmarks/results/board_facts.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.show_metrics import _append, _make_run

from longtake.run_dir import RunDirectory

_RESULTS = Path(__file__).parent / "results" / "board_facts.md"
_NUM_RUNS, _RUN_STEPS, _NEW_LINES, _PIXELS, _WINDOW = 50, 2000, 100, 1000, 2000
_MEASURE = """
import json, os, resource, sys, time
if sys.argv[4] != "cold":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
from pathlib import Path
from longtake.inspection.rows import read_rows
from longtake.inspection.run_list import list_runs
from longtake.inspection.series import SERIES, read_series
from longtake.inspection.timeline import goodput, timeline
from longtake.run_dir import RunDirectory
found = {}
def timed(name, function):
    begun, used = time.perf_counter(), time.process_time()
    result = function()
    found[name] = (time.perf_counter() - begun) * 1e3
    found[name + " CPU"] = (time.process_time() - used) * 1e3
    found[name + " MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return result
run, new, names = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2]), list(SERIES)
if sys.argv[4] == "list":
    timed("list", lambda: list_runs(Path(sys.argv[3])))
    timed("list again", lambda: list_runs(Path(sys.argv[3])))
else:
    rows = timed("rows", lambda: read_rows(run))
    if sys.argv[4] == "pages":
        last = int(rows.step[-1])
        timed("all", lambda: read_series(rows, names, 0, last, PIXELS))
        timed("all again", lambda: read_series(rows, names, 0, last, PIXELS))
        timed("window", lambda: read_series(rows, names, last // 2, last // 2 + WINDOW, PIXELS))
        timed("timeline", lambda: timeline(run, rows))
        timed("goodput", lambda: goodput(run, rows))
        with run.metrics_path.open("ab") as file:
            file.write(new.read_bytes())
        rows = timed("new lines", lambda: read_rows(run, rows))
        last = int(rows.step[-1])
        timed("all with new", lambda: read_series(rows, names, 0, last, PIXELS))
    found["lines"] = len(rows)
print(json.dumps(found))
""".replace("PIXELS", str(_PIXELS)).replace("WINDOW", str(_WINDOW))
_ROWS = {
    "rows": "`read_rows`, index in the cache",
    "all": "all series, all steps, first time",
    "all again": "all series, all steps, again",
    "window": f"all series, {_WINDOW:,} steps",
    "timeline": "`timeline`",
    "goodput": "`goodput`",
    "new lines": f"`read_rows`, {_NEW_LINES} new lines",
    "all with new": "all series, all steps, with the new lines",
}


def main() -> None:
    """Write the runs, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the runs are written", default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as text:
        folder = Path(text)
        run = _make_run(folder / "run", arguments.steps)
        for step in range(5000, arguments.steps + 1, 5000):
            run.append_event("checkpoint", step=step, path=f"step_{step:08d}")
        (folder / "runs").mkdir()
        for number in range(_NUM_RUNS):
            _make_run(folder / "runs" / f"run_{number}", _RUN_STEPS)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        found: dict[str, list[float]] = {}
        for number in range(arguments.rounds):
            for path in (folder / "cache").rglob("*.rows"):
                path.unlink()
            new = _new_lines(folder, arguments.steps + number * _NEW_LINES)
            for what in ("cold", "pages", "list"):
                for name, value in _measured(run, new, folder / "runs", what):
                    found.setdefault(name, []).append(value)
        text = _report(arguments, {name: statistics.median(each) for name, each in found.items()})
    _RESULTS.write_text(text)
    print(text)  # noqa: T201 - a script


def _new_lines(folder: Path, last_step: int) -> Path:
    run = RunDirectory(folder / "new")
    run.path.mkdir(exist_ok=True)
    run.metrics_path.unlink(missing_ok=True)
    _append(run, _NEW_LINES)
    lines = [json.loads(line) for line in run.metrics_path.read_bytes().splitlines()]
    later = [{**line, "step": line["step"] + last_step} for line in lines]
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in later))
    return run.metrics_path


def _measured(run: RunDirectory, new: Path, runs: Path, what: str) -> Iterator[tuple[str, float]]:
    command = [sys.executable, "-c", _MEASURE, str(run.path), str(new), str(runs), what]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - our own
    for name, value in json.loads(text).items():
        yield f"{what}: {name}", value


def _report(arguments: argparse.Namespace, found: dict[str, float]) -> str:
    seconds = found["cold: rows"] / 1e3
    rate = found["cold: lines"] / seconds
    per_core = 1e3 * found["cold: lines"] / found["cold: rows CPU"]
    load = os.getloadavg()[0]
    busy = f" The load average was {load:.1f}." if load > (os.cpu_count() or 1) else ""
    lines = [
        f"| `read_rows`, no cache ({rate:,.0f} lines/s; {per_core:,.0f} in a second of one core) "
        f"| {found['cold: rows']:,.0f} | "
        f"{found['cold: rows MB']:.0f} |"
    ]
    for name, words in _ROWS.items():
        milliseconds, size = found[f"pages: {name}"], found[f"pages: {name} MB"]
        lines.append(f"| {words} | {milliseconds:.1f} | {size:.0f} |")
    for name, words in {"list": "the first time", "list again": "again"}.items():
        milliseconds, size = found[f"list: {name}"], found[f"list: {name} MB"]
        lines.append(
            f"| `list_runs` of {_NUM_RUNS} runs, {words} | {milliseconds:.1f} | {size:.0f} |"
        )
    table = "\n".join(lines)
    return f"""# Facts of pages, on a long run

`python -m benchmarks.board_facts --steps {arguments.steps} --rounds {arguments.rounds}`:
{arguments.steps:,} steps, {_PIXELS:,} pixels; `read_rows` without a cache on {os.cpu_count()} \
cores of {platform.machine()}, the others on one; medians of new processes, without Python's start \
and imports.{busy}

| | ms | peak MB until then |
|---|---|---|
{table}
"""


if __name__ == "__main__":
    main()
