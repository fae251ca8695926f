"""What `longtake plan` takes, and a tiny training up to the end of its first step.

    python -m benchmarks.planning [--rounds 5] [--before COMMIT]

Plans three of the examples in 24 GiB with an empty cache of plans and with a full one, and begins
trainings of two tiny models on the CPU, whose caches are full. With --before, each measurement is
made with the tree of an earlier commit as well, in turn. Prints a table of medians and writes it to
benchmarks/results/planning.md. Wall seconds count only on quiet cores; CPU seconds elsewhere, too.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from tests.build import TINY_WAN
from tests.goldens.tree import checked_out

from longtake.data.index import index
from longtake.demo.shapes import write_clips

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "planning.md"
_PLANNED = {
    "Wan 1.3B": "wan_1_3b_lora_24gb",
    "FLUX.1 Kontext": "flux_kontext_lora_48gb",
    "Wan 14B": "wan_14b_lora_80gb",
}
_TRAINED = {
    "a tubelet": ("model.family=tubelet", "text.max_tokens=6"),
    "a tiny Wan": TINY_WAN,
}
_RECIPE = """
out = "run"
data.catalog = "catalog.parquet"
data.buckets = [{ num_frames = 8, height = 32, width = 32 }]
data.workers = 1
model.family = "tubelet"
training.steps = 1000
training.global_batch_size = 4
training.device = "cpu"
training.precision = "fp32"
"""
_SECONDS = 300.0
_LOOK_SECONDS = 0.02


class Taken(NamedTuple):
    """Seconds of one command."""

    wall: float
    cpu: float


def main() -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", help="an earlier commit")
    asked = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        trees = {"": _ROOT}
        if asked.before:
            trees = {asked.before: held.enter_context(checked_out(asked.before)), **trees}
        captions = write_clips(folder / "clips", num_clips=16, seed=0)
        index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
        (folder / "recipe.toml").write_text(_RECIPE, encoding="utf-8")
        found: dict[str, dict[str, list[Taken]]] = defaultdict(lambda: defaultdict(list))
        for number in range(asked.rounds + 1):
            for name, tree in trees.items():
                for what, taken in _measure(tree, folder):
                    if number:  # the first round fills the caches of bytecode and files
                        found[what][name].append(taken)
    lines = _report(found, asked.rounds, asked.before)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _measure(tree: Path, folder: Path) -> Iterator[tuple[str, Taken]]:
    """Yield what each command takes with a tree's code, by its name."""
    cache = folder / f"cache-{tree.name}"
    for name, recipe in _PLANNED.items():
        shutil.rmtree(cache / "longtake" / "plans", ignore_errors=True)
        planning = ("plan", str(tree / "examples" / f"{recipe}.toml"), "--memory", "24GiB")
        for how in ("nothing cached", "planned before"):
            yield f"plan of {name}, {how}", _run(tree, folder, cache, planning)
    for name, changes in _TRAINED.items():
        shutil.rmtree(folder / "run", ignore_errors=True)
        training = ("train", "recipe.toml", *(f"--set={change}" for change in changes))
        taken = _run(tree, folder, cache, training, until=folder / "run" / "metrics.jsonl")
        yield f"first step of {name}", taken


def _run(
    tree: Path, folder: Path, cache: Path, command: Sequence[str], until: Path | None = None
) -> Taken:
    """Run a command of longtake to its end, or until a file has a line, and stop it then."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
        "XDG_CACHE_HOME": str(cache),
    }
    environment.pop("LONGTAKE_PLAN_CACHE", None)
    begun = time.perf_counter()
    process = psutil.Popen(
        [sys.executable, "-m", "longtake", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    cpu = 0.0
    while process.poll() is None:
        with suppress(psutil.Error):  # one of them has just ended
            cpu = sum(sum(each.cpu_times()[:4]) for each in _with_children(process))
        if until is not None and until.exists() and until.stat().st_size:
            break
        if time.perf_counter() - begun > _SECONDS:
            process.kill()
        time.sleep(_LOOK_SECONDS)
    taken = Taken(time.perf_counter() - begun, cpu)
    if until is not None and process.poll() is None:
        process.terminate()
    _, told = process.communicate(timeout=_SECONDS)
    if until is None and process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {told.decode()}")
    if until is not None and not until.exists():
        raise SystemExit(f"{' '.join(command)} did no step: {told.decode()}")
    return taken


def _with_children(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _report(
    found: Mapping[str, Mapping[str, list[Taken]]], rounds: int, before: str | None
) -> list[str]:
    names = [name for name in (before, "") if name is not None]
    heads = [f"{kind} s{f', {name}' if name else ''}" for name in names for kind in ("wall", "CPU")]
    rows = [
        f"| {what} | {' | '.join(_medians(of[name]) for name in names)} |"
        for what, of in found.items()
    ]
    asked = f"python -m benchmarks.planning --rounds {rounds}"
    return [
        "# What planning takes",
        "",
        f"`{asked}{f' --before {before}' if before else ''}`: medians of {rounds} rounds on "
        f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}. Plans are for "
        "24 GiB. A first step is counted from the command to its line in metrics.jsonl, with "
        "caches filled.",
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
        *rows,
    ]


def _medians(taken: Sequence[Taken]) -> str:
    values = zip(*taken, strict=True)
    return " | ".join(f"{statistics.median(each):.1f}" for each in values)


if __name__ == "__main__":
    main()
