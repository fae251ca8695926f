"""The verb `plan`: will it fit, and will everything train."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longtake.cli import say
from longtake.cli.plan_report import print_plan
from longtake.cli.say import AsJson, Changes, Trust
from longtake.progress import phase_lines

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.planner.forecast import Forecast, PhaseForecast, Suggestion
    from longtake.planner.memory import PolicyForecast, StaticMemory
    from longtake.planner.mesh import MeshForecast

_GIB = 2**30
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
    processes: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node [default: all].")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NODE[,NETWORK]",
            help="GB/s that one GPU sends to others of its node, and to other nodes: 450,50 "
            "[default: what is usual for the GPU].",
        ),
    ] = None,
    changes: Changes = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Tell before the run whether it fits and whether everything trains.

    Runs the model's own code on tensors without values: seconds, on any laptop. Exit code 1 if
    nothing fits or something would not train.
    """
    with phase_lines(say.console(), "importing PyTorch") as enter:
        from longtake.planner.devices import device_budget
        from longtake.planner.forecast import forecast
        from longtake.planner.mesh import links_named, links_of, mesh_forecast
        from longtake.trust import load_recipe

        begun = time.perf_counter()
        given = [f'recompute.memory="{memory}"'] if memory else []
        given += [f'recompute.device="{device}"'] if device else []
        loaded = load_recipe(recipe, [*(changes or ()), *given], trust=trust)
        planned = device_budget(loaded, world_size=processes)
        if memory is None and (device or planned.memory_bytes is None):
            planned = planned.with_own_memory()
        links = links_named(link, planned) if link else links_of(planned)
        enter("running a training step on tensors without values")
        known = forecast(loaded, planned, world_size=processes, per_node=per_node)
        facts = _facts(loaded, known) | {"mesh": mesh_facts(mesh_forecast(known, links))}
        facts["seconds"] = round(time.perf_counter() - begun, 2)
    if as_json:
        say.result(facts)
    else:
        print_plan(say.stdout_console(), str(recipe), facts)
    if known.misses or known.gradients.fatal:
        raise typer.Exit(1)


def _facts(recipe: "Recipe", known: "Forecast") -> dict[str, Any]:
    """What the verb tells of one process, as JSON."""
    from longtake.data.plan import review_catalogs
    from longtake.planner.forecast import forecast_phases, suggest_changes

    suggestions = suggest_changes(known) if known.misses else []
    every, minutes = recipe.checkpoint.every, recipe.checkpoint.minutes
    return _forecast_facts(known) | {
        "changes": [_suggestion(each) for each in suggestions],
        "phases": [_phase(each) for each in forecast_phases(known.step)],
        "checkpoint": {"every": every, "minutes": minutes},
        "data_warnings": review_catalogs(recipe),
    }


def _forecast_facts(known: "Forecast") -> dict[str, Any]:
    device, step, gradients = known.device, known.step, known.gradients
    return {
        "device": device.name,
        "memory_gib": _gib(device.memory_bytes),
        "budget_gib": _gib(device.budget_bytes),
        "model": {
            "parameters": known.num_parameters,
            "trainable": known.num_trainable,
            "tokens": known.step.num_tokens,
        },
        "bucket": step.bucket.model_dump(),
        "micro_batch_size": step.micro_batch_size,
        "num_micro_batches": step.num_micro_batches,
        "precision": step.recipe.model.dtype
        if step.recipe.model.dtype == "bf16"
        else step.precision,
        "processes": step.world_size,
        "per_node": step.per_node,
        "fixed_gib": _static(known.static),
        "host_gib": _gib(known.static.optimizer.host),
        "foreach_gib": _gib(known.foreach_bytes),
        "policies": [_row(row) for row in known.policies],
        "best": _best(known),
        "gradients": {
            "trainable": len(gradients.reached) + len(gradients.unreached),
            "reached": len(gradients.reached),
            "unreached": list(gradients.unreached),
        },
        "traps": [
            {"block": trap.block, "trap": trap.trap, "fix": trap.fix, "stops": trap.stops}
            for trap in gradients.traps
        ],
    }


def _static(static: "StaticMemory") -> dict[str, float | None]:
    return {
        "weights": _gib(static.weights),
        "gradients": _gib(static.gradients),
        "optimizer": _gib(static.optimizer.device),
        "inputs": _gib(static.inputs),
        "ema": _gib(static.ema),
        "encoders": _gib(static.encoders),
    }


def _row(row: "PolicyForecast") -> dict[str, Any]:
    return {
        "name": row.name,
        "forward_end_gib": _gib(row.forward_end_bytes),
        "peak_gib": _gib(row.peak_bytes),
        "step_peak_gib": _gib(row.step_peak_bytes),
        "overhead": None if row.overhead is None else round(row.overhead, 4),
        "fits": row.fits,
    }


def _best(known: "Forecast") -> dict[str, Any] | None:
    best, row = known.best, known.best_policy
    if best is None or row is None:
        return None
    away = known.static.elsewhere
    return {
        **{key: value for key, value in _row(row).items() if key not in ("name", "peak_gib")},
        "per_block": best.per_block(),
        "options": dict(best.options),
        "predicted_gib": _gib(best.predicted_bytes - away),
        "traced_gib": _gib(best.traced.peak_bytes - away),
        "overhead_with_another_gib": round(best.overhead_with_another_gib, 4),
    }


def _suggestion(suggestion: "Suggestion") -> dict[str, Any]:
    return {
        "what": suggestion.what,
        "set": list(suggestion.changes),
        "policy": suggestion.policy,
        "step_peak_gib": _gib(suggestion.step_peak_bytes),
        "fits": suggestion.fits,
    }


def _phase(phase: "PhaseForecast") -> dict[str, Any]:
    return {
        "name": phase.name,
        "weights_gib": _gib(phase.weight_bytes),
        "peak_gib": _gib(phase.peak_bytes),
        "seconds": float(f"{phase.seconds:.3g}"),
        "fits": phase.fits,
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 6)


def mesh_facts(mesh: "MeshForecast | None") -> dict[str, Any] | None:
    """What is sent over which link, and whether it hides; None where one process is alone."""
    if mesh is None:
        return None
    return {
        "link_gb_per_second": {"node": mesh.links.node / _GB, "network": mesh.links.network / _GB},
        "ranks_of_a_copy": mesh.num_shards,
        "copies": mesh.num_copies,
        "sent_bytes": mesh.num_bytes,
        "sent": [
            {
                "what": row.what,
                "ranks": row.ranks,
                "over": row.over,
                "bytes": row.num_bytes,
                "seconds": _rounded(row.seconds),
                "exposed_seconds": _rounded(row.exposed_seconds),
            }
            for row in mesh.sent
        ],
        "compute_seconds": _rounded(mesh.compute_seconds),
        "step_seconds": _rounded(mesh.step_seconds),
        "exposed_share": round(mesh.exposed_share, 4),
        "idle_share": round(mesh.idle_share, 4),
        "advice": [
            {
                "set": list(each.changes),
                "step_seconds": _rounded(each.step_seconds),
                "step_peak_gib": round(each.step_peak_bytes / _GIB, 6),
                "fits": each.fits,
            }
            for each in mesh.advice
        ],
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")
