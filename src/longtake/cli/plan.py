"""The command `plan`: whether a recipe fits, and whether everything in it trains."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.cli import say
from longtake.cli.plan_json import report_json
from longtake.cli.plan_tables import print_plan
from longtake.progress import phase_lines

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.planner.devices import DeviceBudget

_GB = 1e9


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML); no clips or weights needed.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory of the GPU: 48GiB or 48GB [default: the recipe's].")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The GPU: a100-80gb, a10, l4, l40s, rtx4090, h100, b200, ...; or its memory and "
            "dense bf16 speed: 24GiB,165TFLOPS [default: the recipe's]. Without --memory: all its "
            "memory."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="RAM of the computer, such as 64GiB, of which a run may pin 60 % "
            "[default: recompute.host_memory, this computer's, or 107GiB]."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node [default: all].")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NODE[,NETWORK]",
            help="GB/s that one GPU sends to others of its node, and to other nodes: 450,50 "
            "[default: usual links of the GPU].",
        ),
    ] = None,
    failures_per_day: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=500,
            help="Also predict the cost of the whole run, at this rate of failures of a launch.",
        ),
    ] = None,
    restart_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=86_400,
            help="Time from a failure until training continues [default: 60 s, and the time to "
            "read a save].",
        ),
    ] = None,
    storage: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="GB/S",
            help="Rate at which all ranks together write to the run's disk, or read from it.",
        ),
    ] = 5.0,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine's GPU first, for ten seconds; later plans and trainings "
            "on it use the result, too.",
        ),
    ] = False,
    changes: say.Changes = None,
    trust: say.Trust = False,
    as_json: say.AsJson = False,
) -> None:
    """Tell before the run whether it fits and whether everything trains.

    It runs the model's own code on tensors without values, which takes seconds on any laptop. Exit
    code 1 if no step fits, the recipe's own policy does not, encoding or sampling does not, or
    something would not train; 2 if training would refuse the recipe or its data.
    """
    with phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.planner.cost import run_cost
        from longtake.planner.mesh import links_named, links_of
        from longtake.planner.report import make_report
        from longtake.training.latent_cache import begun_tile

        if calibrate:
            enter("measuring the GPU for ten seconds")
            _calibrate()
        # Imports are not part of the time that is reported.
        begun = time.perf_counter()
        # As changes of the recipe, these options are checked like its keys.
        given = [f'recompute.memory="{memory}"'] if memory else []
        given += [f'recompute.device="{device}"'] if device else []
        loaded = _load(recipe, [*(changes or ()), *given], trust)
        planned = _choose_device(loaded, memory, device, host_memory, processes, per_node)
        links = links_named(link, planned) if link else links_of(planned)
        enter("running a training step on tensors without values")
        tile = begun_tile(loaded)
        report = make_report(loaded, planned, links, processes, per_node, enter, tile)
        if failures_per_day is not None:
            enter("working out what the whole run costs")
            cost = run_cost(
                report.known,
                report.phases,
                links,
                failures_per_day=failures_per_day,
                restart_seconds=restart_seconds,
                storage=storage * _GB,
                epoch_steps={each.batch.name: each.epoch_steps for each in report.stages},
            )
            report = replace(report, cost=cost)
        seconds = time.perf_counter() - begun
    if as_json:
        say.result(report_json(report) | {"seconds": round(seconds, 2)})
    else:
        print_plan(say.stdout_console(), str(recipe), report, seconds)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _calibrate() -> None:
    import torch

    from longtake.errors import PlanError
    from longtake.planner.calibration import calibrate

    if not torch.cuda.is_available():
        raise PlanError(
            "There is no CUDA GPU here to measure: leave out --calibrate, and the plan goes by the "
            "data sheet of the GPU that the recipe or --device names."
        )
    calibrate(torch.device("cuda", 0))


def _load(path: Path, changes: Sequence[str], trust: bool) -> "Recipe":
    """Load a recipe with buckets and batch sizes; refuse presets that training would refuse."""
    from longtake.data.auto_buckets import with_buckets
    from longtake.data.checks import with_steps
    from longtake.planner.batch_sizes import with_batch_sizes
    from longtake.run_dir import RunDirectory
    from longtake.training.samples import refuse_wrong_samples
    from longtake.trust import load_recipe

    loaded = with_steps(with_batch_sizes(with_buckets(load_recipe(path, changes, trust=trust))))
    # What `train` refuses before its first step is refused here: after a plan that accepts a
    # recipe, training must not end at once.
    refuse_wrong_samples(loaded, RunDirectory(loaded.out))
    return loaded


def _choose_device(
    recipe: "Recipe",
    memory: str | None,
    device: str | None,
    host_memory: str | None,
    processes: int,
    per_node: int | None,
) -> "DeviceBudget":
    """Return the device to plan for: the recipe's, with the memory of the options or its own."""
    from torch import cuda

    from longtake.config import memory_bytes
    from longtake.planner.devices import device_budget, with_host_memory
    from longtake.planner.host_memory import usable_ram

    planned = device_budget(recipe, world_size=processes)
    # The recipe's memory belongs to the recipe's GPU: one named by --device has all of its own.
    if memory is None and (device or planned.memory_bytes is None):
        planned = planned.with_own_memory()
    ranks = per_node or processes
    if host_memory is not None:
        return with_host_memory(planned, memory_bytes(host_memory), ranks)
    # This computer is the one that trains if it has a GPU, and no other device is named.
    if not cuda.is_available() or recipe.recompute.device is not None:
        return planned
    ranks = min(ranks, max(1, cuda.device_count()))
    return replace(planned, ram_bytes=usable_ram() // ranks)
