"""The cost of longtake's training loop on two ranks, compared with plain FSDP2 in a bare loop.

    python benchmarks/fsdp_overhead.py [--steps 20] [--rounds 7] [--strategy shard replicate]

Two gloo ranks on this machine. Each holds the model twice, sharded by the same `fully_shard` calls;
replicas are whole in longtake, and FSDP2's in the bare loop. It trains one by longtake's loop
(statistics in one collective, guard, metrics, ledger, heartbeats) and the other by a bare loop:
forward, backward, `clip_grad_norm_`, fused AdamW, `zero_grad`. The loops alternate every few steps,
in alternating order, on the same batches, all of which are in memory. Writes
benchmarks/results/fsdp_overhead.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longtake import config
from longtake.checkpoint.store import keep_saver
from longtake.config import ParallelSection, Recipe
from longtake.data.batch import Batch
from longtake.data.index import index
from longtake.data.ledger import Ledger, begin_launch, stream_names
from longtake.data.loader import Loader
from longtake.demo.shapes import write_clips
from longtake.heartbeat import HeartbeatWriter, heartbeat_dir, heartbeat_session
from longtake.models.components import Components, assemble, outline
from longtake.models.objective import flow_losses
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World, join
from longtake.parallel.replicas import ReplicaCheck
from longtake.process import StopSignal
from longtake.run_dir import RunDirectory
from longtake.training.build import build_state
from longtake.training.guard_runner import GuardRunner
from longtake.training.inputs import prepare
from longtake.training.loop import train_steps
from longtake.training.parts import Training
from longtake.training.record import Recorder
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats
from longtake.training.threads import CpuThreads

_RESULTS = Path(__file__).parent / "results" / "fsdp_overhead.md"
_FOREVER = 10**6
_CAPTIONS = ["a red square moves left"]
_Turn = dict[str, list[float]]


def main() -> None:
    """Start the ranks for each strategy; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="per loop and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategy", nargs="+", default=["shard", "replicate"])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of is not None:
        _as_rank(asked.rank_of, asked.steps, asked.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [_row(Path(folder) / each, each, asked) for each in asked.strategy]
    lines = _report(rows, asked)
    _RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _report(rows: Sequence[str], asked: argparse.Namespace) -> list[str]:
    return [
        "# Cost of longtake's loop on two ranks, relative to plain FSDP2",
        "",
        f"`python benchmarks/fsdp_overhead.py --steps {asked.steps} --rounds {asked.rounds} "
        f"--strategy {' '.join(asked.strategy)}`: two gloo ranks on {os.cpu_count()} cores of "
        f"{platform.machine()}, a thread each, torch {torch.__version__}; a model of "
        f"{_millions():.1f} M parameters, 16 clips a rank. The loops alternate "
        f"every {asked.steps} steps in one launch; the ratio is that of the medians of a round, "
        "its median over the rounds, and its range.",
        "",
        "| strategy | bare loop, ms a step | longtake, ms a step | longtake over bare |",
        "|---|---|---|---|",
        *rows,
        "",
        "The bare loop computes the same loss of the same samples, clips by torch's "
        "`clip_grad_norm_`, and records nothing. Longtake's adds up statistics of gradients, "
        "weights and updates over ranks in one collective, runs the guard, and writes metrics, "
        "ledger and heartbeats.",
    ]


def _millions() -> float:
    parts = outline(_recipe(Path(), "shard"))
    return sum(parameter.numel() for parameter in parts.model.parameters()) / 1e6


def _row(folder: Path, strategy: str, asked: argparse.Namespace) -> str:
    turns = _turns(folder, strategy, asked.steps, asked.rounds)
    medians = {
        name: 1000 * statistics.median(each for turn in turns for each in turn[name])
        for name in ("bare", "longtake")
    }
    ratios = [
        statistics.median(turn["longtake"]) / statistics.median(turn["bare"]) for turn in turns
    ]
    cells = (strategy, f"{medians['bare']:.1f}", f"{medians['longtake']:.1f}")
    spread = f"{statistics.median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f})"
    return f"| {' | '.join((*cells, spread))} |"


def _turns(folder: Path, strategy: str, steps: int, rounds: int) -> list[_Turn]:
    """Start two ranks as torchrun does; rank 0's measurements of each round except the first."""
    folder.mkdir()
    captions = write_clips(folder / "clips", num_clips=64, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    recipe = _recipe(folder, strategy)
    (folder / "recipe.toml").write_text(config.dump(recipe), encoding="utf-8")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    counts = ["--steps", str(steps), "--rounds", str(rounds)]
    script = [__file__, "--rank-of", str(folder / "recipe.toml"), *counts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launched, "--nproc-per-node", "2", *script], env=environment, check=True)  # noqa: S603 - our own program
    found: list[_Turn] = json.loads((folder / "turns.json").read_text(encoding="utf-8"))
    return found[1:]  # in the first round libraries warm up


def _recipe(folder: Path, strategy: str) -> Recipe:
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
        "ema": {"decay": 0.0},
        "parallel": {"strategy": strategy},
        "tracking": {"tensorboard": False},
        "checkpoint": {"every": _FOREVER},
    }
    return config.parse(values, source="the benchmark's recipe")


def _as_rank(path: Path, steps: int, rounds: int) -> None:
    recipe = config.load(path)
    with join("cpu", ParallelSection(strategy=recipe.parallel.strategy)) as world:
        run = RunDirectory(recipe.out)
        if world.is_first:
            run.claim(recipe)
            run.create(recipe)
        loader = _Ready(recipe, world)
        session = Session(recipe, run, world, Console(quiet=True), "fp32")
        bare, state = _bare_parts(recipe, world), build_state(session, _parts(recipe))
        optimizer = torch.optim.AdamW(
            bare.model.parameters(), recipe.optimizer.learning_rate, fused=True
        )
        writer = HeartbeatWriter(
            heartbeat_dir(recipe.out), "rank", rank=world.rank, world_size=world.size
        )
        loops: dict[str, Callable[[], list[float]]] = {
            "bare": lambda: _bare(bare, optimizer, loader, recipe, steps),
            "longtake": lambda: _longtake(session, state, loader, writer, steps),
        }
        turns = []
        for number in range(rounds + 1):
            order = list(loops) if number % 2 else list(reversed(loops))
            turns.append({name: loops[name]() for name in order})
        if world.is_first:
            path.with_name("turns.json").write_text(json.dumps(turns), encoding="utf-8")


class _Ready(Loader):
    """Returns batches from memory, which were decoded once."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(
            recipe.data,
            batch_size=recipe.training.global_batch_size,
            rank=world.data_rank,
            world_size=world.data_size,
        )
        self._in_memory = list(super().batches(4))

    def batches(self, end_step: int | None = None) -> Generator[Batch]:
        """Batches from the first one on."""
        for number in range(end_step or 0):
            yield self._in_memory[number % len(self._in_memory)]

    def end_after(self, steps: int) -> int:
        """The number of the batch after `count` more."""
        return steps


def _parts(recipe: Recipe) -> Components:
    torch.manual_seed(0)
    parts = assemble(recipe, _CAPTIONS, None)
    parts.model.train()
    return parts


def _bare_parts(recipe: Recipe, world: World) -> Components:
    """Shard as FSDP2's tutorial does: each block, then the rest."""
    parts = _parts(recipe)
    mesh = world.mesh
    if not world.is_sharded:
        mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    for part in (*parts.family.blocks(parts.model), parts.model):
        fully_shard(part, mesh=mesh)
    return parts


def _bare(
    parts: Components,
    optimizer: torch.optim.Optimizer,
    loader: Loader,
    recipe: Recipe,
    steps: int,
) -> list[float]:
    device, seconds, began = torch.device("cpu"), [], time.perf_counter()
    for batch in loader.batches(steps):
        examples = prepare(batch, parts, recipe, device)
        loss = flow_losses(parts, examples, "fp32", device).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parts.model.parameters(), recipe.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter()
        seconds.append(now - began)
        began = now
    return seconds[1:]


def _longtake(
    session: Session, state: TrainingState, loader: Loader, writer: HeartbeatWriter, steps: int
) -> list[float]:
    recipe, run, world = session.recipe, session.run, session.world
    streams = stream_names(recipe.data)
    before = len(run.metrics())
    folder = from_first(
        begin_launch(run.ledger_path, 0, world.size, streams, loader.plan_history.history)
        if world.is_first
        else None,
        world,
    )
    assert folder is not None
    blocks = state.components.family.blocks(state.components.model)
    short = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"steps": steps})}
    )
    session = replace(session, recipe=short)
    norms, guard = NormStats(state.components.model, blocks, world), GuardRunner(session)
    with (
        keep_saver(run, world, recipe.checkpoint, start=0) as saver,
        Recorder(session, None, 0, {}) as recorder,
        Ledger(folder, world.rank, streams) as ledger,
        heartbeat_session(writer),
    ):
        threads, replicas = CpuThreads(world), ReplicaCheck(world, 0)
        no_plan: Any = None  # only an error of memory reads it
        begun = replace(state, global_step=0)
        built: Any = (session, begun, loader, guard, norms, replicas, threads, no_plan, {}, folder)
        train_steps(Training(*built, saver=saver, recorder=recorder, stop=StopSignal()), ledger)
    rows = list(run.metrics())[-steps:] if world.is_first else []
    assert not world.is_first or len(rows) >= min(before, steps)
    return [row["step_seconds"] for row in rows[1:]]


if __name__ == "__main__":
    main()
