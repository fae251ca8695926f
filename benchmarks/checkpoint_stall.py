"""How long saving delays training: synchronous, in the background, by torch's async_save alone.

    python benchmarks/checkpoint_stall.py [--saves 15] [--steps 12] [--processor]

One process trains one model on the CPU, in fp32 with AdamW and one EMA, and saves it at intervals,
alternating between the three ways. The cost of a save is the time that training waits, and the time
by which steps are slower while it is written. Prints a table and writes it to
benchmarks/results/checkpoint_stall.md. Six minutes on two idle CPU cores.

With --processor it measures instead what each save takes of the processor, without steps: where
all cores are the training's, that is what steps lose. Other programs change it little. The table
goes to benchmarks/results/checkpoint_processor.md.
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from longtake import config, process
from longtake.checkpoint.store import Saver, keep_saver
from longtake.config import CheckpointSection, Recipe
from longtake.data.batch import Batch
from longtake.data.index import index
from longtake.data.loader import Loader
from longtake.demo.shapes import write_clips
from longtake.models.components import assemble
from longtake.models.trainable import trained_state
from longtake.optim.build import build_optimizers
from longtake.optim.update import Averages
from longtake.parallel.mesh import World
from longtake.process import keep_freed_memory
from longtake.run_dir import RunDirectory
from longtake.training.inputs import InputQueue
from longtake.training.saving import state_parts
from longtake.training.session import Session, TrainingState
from longtake.training.step import compute_gradients

_FOLDER = Path(__file__).parent / "results"
_ALONE = World(0, 0, 1, torch.device("cpu"), None)
_WARM_UP = 5
_BESIDE, _TORCH = "longtake, in the background", "torch's async_save"


class Cost(NamedTuple):
    """The cost of one save, in seconds."""

    waiting: float
    """Until the next step may begin."""
    slower: float
    """Sum of the additional time of the steps after it."""
    steps: int
    """Steps until the checkpoint was complete."""


def main() -> None:
    """Save in each way alternately; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=15, help="in each way")
    parser.add_argument("--steps", type=int, default=12, help="before a save, and after it")
    parser.add_argument("--processor", action="store_true", help="measure processor time")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        steps = 0 if asked.processor else asked.steps
        lines = _compare(Path(folder), asked.saves, steps)
    name = "checkpoint_processor.md" if asked.processor else "checkpoint_stall.md"
    (_FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))  # noqa: T201


def _compare(folder: Path, saves: int, steps: int) -> list[str]:
    """The lines of the table; without steps that of processor time."""
    recipe = _recipe(folder)
    state, batch = _state(recipe), _batch(recipe)
    session = Session(recipe, RunDirectory(recipe.out), _ALONE, Console(quiet=True), "fp32")

    def step() -> float:
        return _step(session, state, batch)

    baseline = statistics.median([step() for _ in range(_WARM_UP + max(steps, 1))][_WARM_UP:])
    runs = {way: RunDirectory(folder / way) for way in ("waited", "background")}
    section = CheckpointSection()
    with (
        keep_saver(runs["waited"], _ALONE, section, start=0) as waited_for,
        keep_saver(runs["background"], _ALONE, section, start=0) as beside,
    ):
        ways: dict[str, Callable[[], Callable[[], bool]]] = {
            "longtake, waited for": lambda: _save(waited_for, state, waits=True),
            _BESIDE: lambda: _save(beside, state),
            _TORCH: lambda: _torch_save(folder / "torch", state),
        }
        if not steps:
            return _processor_report(_processor_times(ways, state, saves))
        costs: dict[str, list[Cost]] = {way: [] for way in ways}
        for number in range(saves + 1):
            for way, save in ways.items():
                cost = _cost_of(save, step, steps)
                costs[way] += [cost] * (number > 0)  # the first takes the memory that is kept
    size = _size(runs["waited"].checkpoints_path) / section.keep
    return _report(costs, baseline, size, saves, steps)


def _processor_times(
    ways: dict[str, Callable[[], Callable[[], bool]]], state: TrainingState, saves: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds that each save takes of the processor, outside the kernel and in it, by the way."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(saves + 1):
        for way, save in ways.items():
            state.global_step += 1
            before = resource.getrusage(resource.RUSAGE_SELF)
            is_done = save()
            while not is_done():
                time.sleep(0.02)
            after = resource.getrusage(resource.RUSAGE_SELF)
            own, kernel = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            found[way] += [(own, kernel)] * (number > 0)  # the first takes the memory that is kept
    return found


def _processor_report(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    whole = {way: _median([own + kernel for own, kernel in each]) for way, each in found.items()}
    saves = len(found[_BESIDE])
    rows = []
    for way, each in found.items():
        totals = [own + kernel for own, kernel in each]
        rows.append(
            f"| {way} | {1e3 * _median([own for own, _ in each]):.0f} "
            f"| {1e3 * _median([kernel for _, kernel in each]):.0f} | {1e3 * whole[way]:.0f} "
            f"({1e3 * min(totals):.0f} to {1e3 * max(totals):.0f}) |"
        )
    return [
        "# What a save takes of the processor",
        "",
        f"`python benchmarks/checkpoint_stall.py --saves {saves} --processor`: the model and the "
        f"saves of checkpoint_stall, without steps. All threads of the process, medians of {saves} "
        f"saves in each way, which take turns; {platform.machine()}, torch {torch.__version__}, "
        f"load average {os.getloadavg()[1]:.0f} on {process.num_cores()} cores.",
        "",
        "| save | outside the kernel, ms | in the kernel, ms | both, ms |",
        "|---|---|---|---|",
        *rows,
        "",
        f"In the background it is {whole[_BESIDE] / whole[_TORCH]:.2f} of torch's, which has no "
        "checksums. Where all cores are the training's, that is what steps lose, with what they "
        "wait for.",
    ]


def _cost_of(save: Callable[[], Callable[[], bool]], step: Callable[[], float], steps: int) -> Cost:
    """The cost of one save, from the steps before and after it."""
    usual = statistics.median(step() for _ in range(steps))
    begun = time.perf_counter()
    is_done = save()
    waiting = time.perf_counter() - begun
    seconds: list[float] = []
    num_slower = None
    while num_slower is None or len(seconds) < steps:
        if num_slower is None and is_done():
            num_slower = len(seconds)
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return Cost(waiting, sum(seconds) - usual * len(seconds), num_slower)


def _save(saver: Saver, state: TrainingState, *, waits: bool = False) -> Callable[[], bool]:
    saver.save(state.global_step, state_parts(state), {"global_step": state.global_step})
    if waits:
        saver.wait()
    return lambda: bool(saver.finished())


def _torch_save(folder: Path, state: TrainingState) -> Callable[[], bool]:
    """Save all parts as one state dict by torch alone, without checksums and COMMITTED."""
    shutil.rmtree(folder, ignore_errors=True)
    model = state.components.model
    parts = {
        "model": trained_state(model),
        "ema": state.ema.states(),
        "optimizer": get_optimizer_state_dict(model, state.optimizers),
    }
    saving: Any = state_dict_saver.async_save(parts, checkpoint_id=folder, no_dist=True)
    assert isinstance(saving, Future)
    return saving.done


def _step(session: Session, state: TrainingState, batch: Batch) -> float:
    begun = time.perf_counter()
    compute_gradients(session, state, batch)
    for optimizer in state.optimizers:
        optimizer.step()
    state.components.model.zero_grad(set_to_none=True)
    state.global_step += 1
    state.ema.update(state.global_step)
    return time.perf_counter() - begun


def _recipe(folder: Path) -> Recipe:
    captions = write_clips(folder / "clips", num_clips=32, seed=0)
    index([folder / "clips"], captions=captions, out=folder / "catalog.parquet")
    values = {
        "out": str(folder / "run"),
        "data": {
            "catalog": str(folder / "catalog.parquet"),
            "buckets": [{"num_frames": 8, "height": 32, "width": 32}],
            "workers": 0,
        },
        "model": {
            "family": "tubelet",
            "config": {"hidden_size": 336, "num_blocks": 6, "num_heads": 7},
        },
        "training": {"steps": 1, "global_batch_size": 1, "device": "cpu", "precision": "fp32"},
    }
    return config.parse(values, source="the benchmark's recipe")


def _state(recipe: Recipe) -> TrainingState:
    torch.manual_seed(0)
    parts = assemble(recipe, ["a red square moves left"], None)
    blocks = parts.family.blocks(parts.model)
    optimizers = build_optimizers(parts.model, blocks, recipe.optimizer, "fp32")
    averages = Averages(parts.model, recipe.ema.averages())
    return TrainingState(
        parts, optimizers, averages, InputQueue(parts, recipe, torch.device("cpu"))
    )


def _batch(recipe: Recipe) -> Batch:
    loader = Loader(recipe.data, batch_size=recipe.training.global_batch_size, seed=0)
    (batch,) = loader.batches(1)
    return batch


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _report(
    costs: dict[str, list[Cost]], step: float, size: float, saves: int, steps: int
) -> list[str]:
    whole = {way: _median([cost.waiting + cost.slower for cost in costs[way]]) for way in costs}
    reference = whole["longtake, waited for"]
    rows = [
        f"| {way} | {_ms(each, 'waiting')} | {_ms(each, 'slower')} | {1e3 * whole[way]:.0f} "
        f"| {whole[way] / reference:.0%} | {_median([cost.steps for cost in each]):.0f} |"
        for way, each in costs.items()
    ]
    return [
        "# How long saving delays training",
        "",
        f"`python benchmarks/checkpoint_stall.py --saves {saves} --steps {steps}`: "
        f"{size / 1e6:.0f} MB of weights, AdamW's states and an average, in fp32; steps of "
        f"{1e3 * step:.0f} ms on {torch.get_num_threads()} threads of {platform.machine()}, which "
        f"are all the cores there are; torch {torch.__version__}. Medians of {saves} saves in each "
        "way, which take turns.",
        "",
        "| save | training waits, ms | steps are slower by, ms | both, ms | of the first "
        "| steps until it is whole |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"In the background both together are {whole[_BESIDE] / whole[_TORCH]:.2f} of torch's. "
        "longtake's saves have checksums (XXH3) of all files; torch's has none.",
        "",
        "All cores are the training's here, so what the thread computes it takes from the steps. A "
        "training whose work is on a GPU leaves it cores of its own; that was not measured.",
    ]


def _ms(costs: list[Cost], what: str) -> str:
    seconds = [getattr(cost, what) for cost in costs]
    return f"{1e3 * _median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f})"


def _median(numbers: list[float] | list[int]) -> float:
    return statistics.median(numbers)


if __name__ == "__main__":
    main()
