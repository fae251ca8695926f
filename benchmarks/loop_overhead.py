"""The cost of guard, metrics, ledger and watcher, compared with a bare training loop.

    python benchmarks/loop_overhead.py [--steps 40] [--rounds 5]

One process, one model with steps of more than 100 ms, trained alternately by longtake's own loop
and by a bare one: gradients, their norm, clipping, the optimizer and the EMA, without any record. A
third loop is longtake's with heartbeats, and a watcher beside it as in every run. All use the same
batches, all in memory. Writes benchmarks/results/loop_overhead.md.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console

from longtake import config
from longtake.checkpoint.store import keep_saver
from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.index import index
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.demo.shapes import write_clips
from longtake.heartbeat import HeartbeatWriter, heartbeat_dir, heartbeat_session, set_phase
from longtake.models.components import assemble
from longtake.optim.build import build_optimizers
from longtake.optim.update import Averages
from longtake.parallel.fsdp import squares
from longtake.parallel.mesh import World
from longtake.parallel.replicas import ReplicaCheck
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory
from longtake.training.guard_runner import GuardRunner
from longtake.training.inputs import InputQueue
from longtake.training.loop import train_steps
from longtake.training.parts import Training
from longtake.training.record import Recorder
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats
from longtake.training.step import apply_update, compute_gradients
from longtake.training.threads import CpuThreads

_RESULTS = Path(__file__).parent / "results" / "loop_overhead.md"
_ALONE = World(0, 0, 1, torch.device("cpu"), None)
_FOREVER = 10**6
_SECONDS_TO_START = 3.0


def main() -> None:
    """Train by the loops alternately; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="per loop and round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = _compare(Path(folder), asked.steps, asked.rounds)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _compare(folder: Path, steps: int, rounds: int) -> list[str]:
    recipe = _recipe(folder)
    bare, full = _state(recipe), _state(recipe)
    RunDirectory(recipe.out).claim(recipe)
    RunDirectory(recipe.out).create(recipe)
    turns: list[dict[str, list[float]]] = []
    costs: list[Cost] = []
    loops: dict[str, Callable[[], list[float]]] = {
        "bare": lambda: _bare(bare, recipe, steps),
        "longtake": lambda: _longtake(full, recipe, steps),
        "longtake, watched": lambda: _watched(full, recipe, steps, costs),
    }
    for number in range(rounds + 1):
        order = [list(loops)[(number + place) % len(loops)] for place in range(len(loops))]
        turn = {name: loops[name]() for name in order}
        turns.append({name: turn[name] for name in loops})
    turns = turns[1:]  # in the first round libraries warm up
    medians = {
        name: 1000 * statistics.median(each for turn in turns for each in turn[name])
        for name in turns[0]
    }
    rows = [f"| {name} | {median:.2f} |" for name, median in medians.items()]
    parameters = sum(p.numel() for p in bare.components.model.parameters())
    return [
        "# Cost of guard, metrics, ledger and watcher",
        "",
        f"`python benchmarks/loop_overhead.py --steps {steps} --rounds {rounds}`: a model of "
        f"{parameters / 1e6:.1f} M parameters on {torch.get_num_threads()} threads of "
        f"{platform.machine()}, torch {torch.__version__}. The loops alternate every {steps} "
        "steps.",
        "",
        "| loop | median ms a step |",
        "|---|---|",
        *rows,
        "",
        f"Longtake's loop over the bare one, medians by round: {_ratios(turns, 'longtake', 'bare')}"
        ". Above 1 is the cost of the statistics in one collective, the guard, metrics.jsonl, "
        "the TensorBoard follower and the ledger together.",
        "",
        "Watched over not watched: "
        f"{_ratios(turns, 'longtake, watched', 'longtake')}. A heartbeat write takes "
        f"{1e6 * _seconds_of_a_heartbeat(folder):.1f} µs, and there are eight in a step. The "
        "watcher takes "
        f"{100 * statistics.median(each.cores for each in costs):.2f} % of a core and "
        f"{max(each.num_bytes for each in costs) / 2**20:.0f} MiB resident.",
    ]


class Cost(NamedTuple):
    """Cost of a watcher process."""

    cores: float
    """Cores that it uses while it watches."""
    num_bytes: int
    """Resident at most."""


def _watched(state: TrainingState, recipe: Recipe, steps: int, costs: list[Cost]) -> list[float]:
    """Write heartbeats beside a watcher, as in every run; append the watcher's cost."""
    writer = HeartbeatWriter(heartbeat_dir(recipe.out), "rank")
    command = [sys.executable, "-P", "-m", "longtake.monitor.watcher", str(recipe.out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process, heartbeat_session(writer):  # noqa: S603 - our own program
        watcher = psutil.Process(process.pid)
        time.sleep(_SECONDS_TO_START)
        begun, used = time.perf_counter(), sum(watcher.cpu_times()[:2])
        step_seconds = _longtake(state, recipe, steps)
        seconds = time.perf_counter() - begun
        cores = (sum(watcher.cpu_times()[:2]) - used) / seconds
        costs.append(Cost(cores, watcher.memory_info().rss))
        return step_seconds


def _seconds_of_a_heartbeat(folder: Path, times: int = 20_000) -> float:
    writer = HeartbeatWriter(folder / "heartbeats", "rank")
    with heartbeat_session(writer):
        begun = time.perf_counter()
        for _ in range(times):
            set_phase("forward")
        return (time.perf_counter() - begun) / times


def _ratios(turns: list[dict[str, list[float]]], name: str, other: str) -> str:
    each = [statistics.median(turn[name]) / statistics.median(turn[other]) for turn in turns]
    return f"{statistics.median(each):.4f} (from {min(each):.4f} to {max(each):.4f})"


def _recipe(folder: Path) -> Recipe:
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    values = {
        "out": str(folder / "run"),
        "data": {
            "catalog": str(folder / "catalog.parquet"),
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
            "workers": 0,
        },
        "model": {"family": "tubelet", "config": {"hidden_size": 144, "num_blocks": 6}},
        "text": {"max_tokens": 6},
        "training": {
            "steps": _FOREVER,
            "global_batch_size": 32,
            "device": "cpu",
            "precision": "fp32",
        },
        "checkpoint": {"every": _FOREVER},
    }
    return config.parse(values, source="the benchmark's recipe")


def _state(recipe: Recipe) -> TrainingState:
    captions = ["a red square moves left"]
    torch.manual_seed(0)
    parts = assemble(recipe, captions, None)
    blocks = parts.family.blocks(parts.model)
    optimizers = build_optimizers(parts.model, blocks, recipe.optimizer, "fp32")
    averages = Averages(parts.model, recipe.ema.averages())
    return TrainingState(parts, optimizers, averages, InputQueue(parts, recipe, _ALONE.device))


def _loader(recipe: Recipe) -> Loader:
    return Loader(recipe.data, batch_size=recipe.training.global_batch_size)


def _session(recipe: Recipe) -> Session:
    return Session(recipe, RunDirectory(recipe.out), _ALONE, Console(quiet=True), "fp32")


def _bare(state: TrainingState, recipe: Recipe, steps: int) -> list[float]:
    session = _session(recipe)

    def step(batch: Batch) -> None:
        compute_gradients(session, state, batch)
        gradients = [p.grad for p in state.components.model.parameters() if p.grad is not None]
        norm = float(squares(gradients).sum().sqrt())
        apply_update(session, state, norm, 1.0, batch.position)

    return _timed(_loader(recipe).batches(steps), step)


def _timed(batches: object, step: Callable[[Batch], None]) -> list[float]:
    seconds, began = [], time.perf_counter()
    for batch in batches:  # type: ignore[attr-defined]
        step(batch)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return seconds[1:]  # decoding begins in the first


def _longtake(state: TrainingState, recipe: Recipe, steps: int) -> list[float]:
    run, loader = RunDirectory(recipe.out), _loader(recipe)
    before = len(run.metrics())
    streams = stream_names(recipe.data)
    folder = begin_launch(run.ledger_path, 0, 1, streams, loader.plan_history.history)
    blocks = state.components.family.blocks(state.components.model)
    to_here = replace(state, global_step=0)
    short = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"steps": steps})}
    )
    session = _session(short)
    norms, guard = NormStats(state.components.model, blocks, _ALONE), GuardRunner(session)
    with (
        keep_saver(run, _ALONE, recipe.checkpoint, start=0) as saver,
        Recorder(session, None, 0, {}) as recorder,
        Ledger(folder, 0, streams) as ledger,
    ):
        threads, replicas = CpuThreads(_ALONE), ReplicaCheck(_ALONE, 0)
        no_plan: Any = None  # only an error of memory reads it
        built: Any = (
            session,
            to_here,
            loader,
            guard,
            norms,
            replicas,
            threads,
            no_plan,
            {},
            folder,
        )
        train_steps(Training(*built, saver=saver, recorder=recorder, stop=StopSignal()), ledger)
    rows = list(run.metrics())
    assert len(rows) >= min(before, steps)
    return [row["step_seconds"] for row in rows[1:]]


if __name__ == "__main__":
    main()
