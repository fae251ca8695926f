"""What guard, metrics and ledger cost, against a bare loop that only trains.

    python benchmarks/loop_overhead.py [--steps 40] [--rounds 5]

One process, one model of a step of more than 100 ms, trained in turn by longtake's own loop and by
a bare one: gradients, their norm, clipping, the optimizer and the EMA, and nothing written down.
Both take the same batches, all in memory. Writes benchmarks/results/loop_overhead.md.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from longtake import config
from longtake.checkpoint.saver import keep_saver
from longtake.config import Recipe
from longtake.data.index import index
from longtake.data.ledger import begin_launch, keep_ledger, stream_names
from longtake.data.loader import Loader
from longtake.demo.shapes import write_clips
from longtake.models.assemble import assemble
from longtake.parallel.mesh import World
from longtake.parallel.norms import squares
from longtake.run_dir import RunDirectory
from longtake.training.ema import Averages
from longtake.training.gauge import Gauge
from longtake.training.guarding import Guard
from longtake.training.interrupt import Interrupt
from longtake.training.loop import Watch, train_steps
from longtake.training.optim import build_optimizers
from longtake.training.peak import PeakCheck
from longtake.training.record import keep_record
from longtake.training.step import TrainingState, apply_update, compute_gradients

_RESULTS = Path(__file__).parent / "results" / "loop_overhead.md"
_ALONE = World(0, 0, 1, torch.device("cpu"), None)
_FOREVER = 10**6


def main() -> None:
    """Train by both loops in turn; print and write the table."""
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
    seconds: dict[str, list[float]] = {"bare": [], "longtake": []}
    ratios = []
    for number in range(rounds + 1):
        bare_seconds = _bare(bare, recipe, steps)
        full_seconds = _longtake(full, recipe, steps)
        if number:  # in the first round libraries warm up
            seconds["bare"] += bare_seconds
            seconds["longtake"] += full_seconds
            ratios.append(statistics.median(full_seconds) / statistics.median(bare_seconds))
    rows = [f"| {name} | {1000 * statistics.median(each):.2f} |" for name, each in seconds.items()]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    parameters = sum(p.numel() for p in bare.components.model.parameters())
    return [
        "# What guard, metrics and ledger cost",
        "",
        f"`python benchmarks/loop_overhead.py --steps {steps} --rounds {rounds}`: a model of "
        f"{parameters / 1e6:.1f} M parameters on {torch.get_num_threads()} threads of "
        f"{platform.machine()}, torch {torch.__version__}. The two loops take turns of {steps} "
        "steps.",
        "",
        "| loop | median ms a step |",
        "|---|---|",
        *rows,
        "",
        f"Ratio of the medians, by round: {middle:.4f} (from {low:.4f} to {high:.4f}). Above 1 is "
        "what statistics in one collective, the verdict, metrics.jsonl, TensorBoard's mirror and "
        "the ledger take together.",
    ]


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
        "training": {"steps": _FOREVER, "batch_size": 32, "device": "cpu", "precision": "fp32"},
        "checkpoint": {"every": _FOREVER},
    }
    return config.parse(values, source="the benchmark's recipe")


def _state(recipe: Recipe) -> TrainingState:
    captions = ["a red square moves left"]
    torch.manual_seed(0)
    parts = assemble(recipe, captions, None)
    blocks = parts.family.blocks(parts.model)
    optimizers = build_optimizers(parts.model, blocks, recipe.optimizer, "fp32")
    return TrainingState(parts, optimizers, Averages(parts.model, recipe.ema.averages()), "fp32")


def _loader(recipe: Recipe) -> Loader:
    return Loader(recipe.data, batch_size=recipe.training.batch_size)


def _bare(state: TrainingState, recipe: Recipe, steps: int) -> list[float]:
    def step(batch: object) -> None:
        compute_gradients(state, batch, recipe, _ALONE)  # type: ignore[arg-type]
        gradients = [p.grad for p in state.components.model.parameters() if p.grad is not None]
        norm = float(squares(gradients).sum().sqrt())
        apply_update(state, recipe, norm, 1.0)

    return _timed(_loader(recipe).batches(steps), step)


def _timed(batches: object, step: Callable[[object], None]) -> list[float]:
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
    folder = begin_launch(run.ledger_path, 0, 1, streams, loader.course.history)
    blocks = state.components.family.blocks(state.components.model)
    gauge, guard = Gauge(state.components.model, blocks), Guard(recipe.guard, run, _ALONE)
    to_here = replace(state, global_step=0)
    peak = PeakCheck(None, recipe.data.buckets[0], _ALONE.device)
    short = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"steps": steps})}
    )
    quiet = Console(quiet=True)
    with (
        keep_saver(run, _ALONE, recipe.checkpoint, start=0) as saver,
        keep_record(0, steps, {}, run, _ALONE, quiet) as record,
        keep_ledger(folder, 0, streams) as ledger,
    ):
        watch = Watch(guard, gauge, saver, record, peak, Interrupt())
        train_steps(to_here, loader, ledger, watch, short, _ALONE)
    rows = list(run.metrics())
    assert len(rows) >= min(before, steps)
    return [row["step_seconds"] for row in rows[1:]]


if __name__ == "__main__":
    main()
