"""How long a run stops when one of its ranks is killed, by phase of the restart.

    python -m benchmarks.restart [--kills 5] [--nodes 3]

Trains a small model by `longtake launch` on two ranks, kills one rank with SIGKILL several times,
and waits each time until the restarted ranks have done a step. With --nodes 3 there are three hosts
of one rank each, as network namespaces of this machine (root and iproute2 are needed). Prints a
table and writes it to benchmarks/results/restart.md, which keeps the table of the other mode. Two
minutes on two idle CPU cores.
"""

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from tests.cluster.hosts import Cluster, hosts, why_not
from tests.cluster.launchers import Launchers

from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.faults.sandbox import RunObserver, TrainingProcess
from longtake.heartbeat import heartbeat_dir, read_heartbeats
from longtake.inspection.tables import START_PHASES

_RESULTS = Path(__file__).parent / "results" / "restart.md"
_MARK = "## "
_STEPS_BETWEEN = 10
_RECIPE = """
out = "run"
seed = 0
data.catalog = "catalog.parquet"
data.buckets = [{ num_frames = 8, height = 32, width = 32 }]
data.workers = 1
model.family = "tubelet"
text.kind = "words"
text.max_tokens = 6
training.steps = 1000000
training.global_batch_size = 8
training.device = "cpu"
training.precision = "fp32"
checkpoint.every = 5
"""
_KILL_THERE = """
import os, signal
from pathlib import Path
from longtake.heartbeat import heartbeat_dir, read_heartbeats
pages = read_heartbeats(heartbeat_dir(Path("run")))
found = [each for each in pages if each.role == "rank" and each.is_alive]
os.kill(found[0].pid, signal.SIGKILL)
"""


def main() -> None:
    """Kill ranks, measure, and write the table of one machine or of several hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1)
    asked = parser.parse_args()
    with ExitStack() as held:
        # Not in the system's temporary folder: hosts may have that for themselves.
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
        held.callback(_wait_for_end, folder)
        _prepare(folder)
        if asked.nodes > 1:
            if reason := why_not():
                sys.exit(f"Not possible here: {reason}.")
            cluster = held.enter_context(hosts(asked.nodes, folder / "hosts"))
            observer: RunObserver = held.enter_context(Launchers(folder, cluster, str(asked.nodes)))
            kill = _killer_on(cluster, folder)
        else:
            observer = held.enter_context(
                TrainingProcess(folder, (), ranks=2, restarts=asked.kills + 1)
            )
            kill = _killer_here(folder)
        measured = [_recover(observer, kill) for _ in range(asked.kills)]
    _write(asked.nodes, _report(measured, asked.nodes))


def _prepare(folder: Path) -> None:
    (folder / "hosts").mkdir()
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    (folder / "recipe.toml").write_text(_RECIPE, encoding="utf-8")


def _killer_here(folder: Path) -> Callable[[], None]:
    def kill() -> None:
        heartbeats = read_heartbeats(heartbeat_dir(folder / "run"))
        ranks = [each for each in heartbeats if each.role == "rank" and each.is_alive]
        os.kill(ranks[-1].pid, signal.SIGKILL)

    return kill


def _killer_on(cluster: Cluster, folder: Path) -> Callable[[], None]:
    """Kill the rank of the last host by a Python process, whose start is subtracted."""

    def kill() -> None:
        cluster.run(cluster.names[-1], [sys.executable, "-c", _KILL_THERE], cwd=folder)

    return kill


def _wait_for_end(folder: Path) -> None:
    """Wait for the processes that work there: a watcher outlives its run, and writes of its end."""
    there = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(folder)]
    psutil.wait_procs(there)


def _recover(observer: RunObserver, kill: Callable[[], None]) -> dict[str, float]:
    """Seconds from a rank's death to the end of the first step after it, in all and by part."""
    observer.wait_for_rows(observer.num_rows() + _STEPS_BETWEEN)
    before = _num_starts(observer)
    kill()
    killed = time.monotonic()
    for _ in observer.polls():
        if _num_starts(observer) > before:
            break
    else:
        raise observer.failed("ended without having resumed")
    taken = time.monotonic() - killed
    started = [event for event in observer.events() if event["event"] == "startup_timing"][-1]
    return {"before": taken - started["total"], **started["seconds"], "all": taken}


def _num_starts(observer: RunObserver) -> int:
    return sum(event["event"] == "startup_timing" for event in observer.events())


def _report(measured: Sequence[Mapping[str, float]], nodes: int) -> list[str]:
    where = f"{nodes} hosts of one rank each" if nodes > 1 else "one machine with 2 ranks"
    parts = list(dict.fromkeys(part for each in measured for part in each))
    rows = [
        f"| {_words(part)} | {_seconds([each.get(part, 0) for each in measured])} |"
        for part in parts
    ]
    return [
        f"{_MARK}{where[0].upper()}{where[1:]}",
        "",
        f"`python -m benchmarks.restart --kills {len(measured)}"
        f"{f' --nodes {nodes}' if nodes > 1 else ''}`: {len(measured)} times a rank was killed "
        f"(SIGKILL), on {os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}. "
        "Medians, with the least and the most; of each part the slowest rank's.",
        "",
        "| part | seconds |",
        "|---|---|",
        *rows,
        "",
    ]


def _words(part: str) -> str:
    own = {
        "before": "the other ranks end, and all are restarted",
        "all": "**from the kill to the end of the first step**",
    }
    return own.get(part) or START_PHASES.get(part, part)


def _seconds(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def _write(nodes: int, lines: list[str]) -> None:
    """Write a section in place of the previous one."""
    text = _RESULTS.read_text(encoding="utf-8") if _RESULTS.exists() else ""
    known = {each.partition("\n")[0]: each for each in text.split(_MARK)[1:]}
    known[lines[0].removeprefix(_MARK)] = "\n".join(lines).removeprefix(_MARK)
    head = "# How long a run stops when a rank is killed\n\n"
    sections = (_MARK + known[name].rstrip("\n") + "\n" for name in sorted(known, reverse=True))
    _RESULTS.write_text(head + "\n".join(sections), encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
