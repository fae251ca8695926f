"""Starts the evaluation server in this process."""

import os
from typing import Any

import torch
from rich.console import Console

from longtake.errors import RunError
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.runs import find_runs
from longtake.evaluation.server.screening import Screening
from longtake.evaluation.server.server import Server, own_name
from longtake.evaluation.server.stop import stopped_by_signals
from longtake.parallel.mesh import pick_device
from longtake.process import num_cores

_NICE = 10
"""On a CPU that trains as well, a process of this niceness gets about a tenth of what another
gets; where nothing else wants the cores, it gets all of them that it asks for."""


def evaluate(options: Options, device: str, console: Console) -> dict[str, Any]:
    """Serve until nothing is due, or somebody ends it.

    Args:
        options: what is wanted.
        device: to sample on: `auto`, `cpu`, `cuda`, or one card, such as `cuda:1`.
        console: where people read.

    Returns:
        `server`, its name; `stopped_by`, a signal or None; `evaluated`, the scores of all that it
        made; `failed`, what it could not; `wrong`, how much was amiss in all.

    Raises:
        RunError: the options do not fit together, or a source cannot be reached or has no run.
        RecipeError: there is no such device.
    """
    options.check()
    if device != "auto":
        pick_device(device)
    report = Report(console)
    with stopped_by_signals() as stop:
        screening = Screening(
            device, own_name(), report, options.recipe_of, _be_modest, trust=options.trust
        )
        server = Server(options, screening, report, stop)
        server.serve()
    if report.untrusted is not None and not (server.evaluated or stop.reason):
        raise report.untrusted
    if not (options.waits or stop.reason or report.num_wrong or find_runs(options.places)):
        raise RunError(
            f"{options.source or options.places[0]} holds no run: expected a folder with "
            "recipe.toml, or a folder of such; with --follow one may come later."
        )
    return {
        "server": server.name,
        "stopped_by": stop.reason,
        "evaluated": server.evaluated,
        "failed": sorted(server.failed),
        "wrong": report.num_wrong,
    }


def _be_modest(device: torch.device) -> None:
    """Leave the cores to a training beside it, which this process must not slow down.

    Half of the cores, because threads of a process of low priority spin while they wait for one
    of them that gets no core: on two cores that a training used as well, eight videos of the demo
    took 1.0 to 2.0 s in one thread, and 0.8 to 39 s in two.
    """
    if device.type == "cpu":
        os.nice(_NICE)
        torch.set_num_threads(min(torch.get_num_threads(), max(1, num_cores() // 2)))
