"""How soon a hang is named, and how many alarms there are without one, at default settings.

    python -m benchmarks.stalls [--hangs 5] [--steps 10000]

Lets a rank of two sleep for ever, and a decode worker hang in C, several times each, and measures
until the diagnosis is written. Then trains two ranks without a fault, while other processes use all
cores in bursts of random length, and counts alarms: a `stalled` event, and dumps that a watcher has
requested. Writes benchmarks/results/stalls.md. Twenty minutes on two idle CPU cores.
"""

import argparse
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from longtake.faults.sandbox import Injection, TrainingSite
from longtake.process import periodic

_RESULTS = Path(__file__).parent / "results" / "stalls.md"
_HANGS = (
    ("a rank of two sleeps in Python", Injection("hang-rank-1-asleep", 23), 2),
    ("a decode worker hangs in C", Injection("freeze-worker-in-c", 40), 1),
)
_BURST = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    pass
"""
_LONGEST_BURST, _SECONDS_BETWEEN_BURSTS = 3.0, 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    asked = parser.parse_args()
    lines = [
        "# How soon a hang is named, and alarms without one",
        "",
        f"`python -m benchmarks.stalls --hangs {asked.hangs} --steps {asked.steps}` on "
        f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}; "
        "`watch.min_seconds` and all limits are the defaults.",
        "",
        "| | |",
        "|---|---|",
    ]
    folder = Path(tempfile.mkdtemp(prefix="stalls-"))  # stays if a run fails
    blank = TrainingSite(folder / "blank")
    blank.folder.mkdir()
    blank.prepare()
    for at, (name, inject, ranks) in enumerate(_HANGS if asked.hangs else ()):
        sites = (blank.copied_to(folder / f"{at}_{number}") for number in range(asked.hangs))
        seconds = sorted(_seconds_until_named(site, inject, ranks) for site in sites)
        lines.append(
            f"| {name}: from the hang to the diagnosis, {asked.hangs} times | "
            f"{seconds[len(seconds) // 2]:.1f} s ({seconds[0]:.1f} to {seconds[-1]:.1f}) |"
        )
    if asked.steps:
        lines.append(_undisturbed(blank.copied_to(folder / "undisturbed"), asked.steps))
    shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(lines) + "\n"
    _RESULTS.write_text(text, encoding="utf-8")
    print(text)  # noqa: T201


def _seconds_until_named(site: TrainingSite, inject: Injection, ranks: int) -> float:
    changes = ("data.workers=2", "data.sample_timeout_seconds=60")
    with site.launch(*changes, ranks=ranks, inject=inject) as process:
        hang = process.wait_for_hang()
        found = process.wait_for_node_event("stalled")
        if found is None:
            sys.exit(f"{site.run.path} has ended without a diagnosis.")
        return found.at - hang.at


def _undisturbed(site: TrainingSite, steps: int) -> str:
    changes = (f"training.steps={steps}", "data.workers=1", "checkpoint.every=100")
    with _bursts(), site.launch(*changes, ranks=2) as process:
        while process.exit_code() is None:
            time.sleep(1.0)
        process.finish()
        stalls = sum(event["event"] == "stalled" for event in process.node_events())
    requests = len(list((site.run.path / "requests").glob("stall_*")))
    longest = max(row["step_seconds"] for row in site.run.metrics())
    return (
        f"| {steps:,} steps of two ranks without a hang, the longest {longest:.1f} s, on cores "
        f"that other processes use in bursts | {requests} alarms, {stalls} stalls |"
    )


@contextmanager
def _bursts() -> Iterator[None]:
    """Use all cores now and then, until the block ends."""
    running: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        for _ in range(2 * (os.cpu_count() or 1)):
            seconds = str(random.uniform(0, _LONGEST_BURST))  # noqa: S311 - not a secret
            command = [sys.executable, "-c", _BURST, seconds]
            running.append(subprocess.Popen(command))  # noqa: S603 - ourselves

    try:
        with periodic("bursts", begin, _SECONDS_BETWEEN_BURSTS):
            yield
    finally:
        for each in running:
            each.wait()


if __name__ == "__main__":
    main()
