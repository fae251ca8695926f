"""The verb `plan`: will it fit, and will everything train."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longtake.cli import say
from longtake.cli.plan_mesh import mesh_facts
from longtake.cli.plan_report import print_plan
from longtake.cli.say import AsJson, Changes, Trust
from longtake.progress import phase_lines

if TYPE_CHECKING:
    from longtake.training.forecast import Forecast
    from longtake.training.phases import Phase
    from longtake.training.relief import Relief
    from longtake.training.resident import Fixed, PolicyForecast

_GIB = 2**30


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
        from longtake.data.review import review_catalogs
        from longtake.training.card import card_of
        from longtake.training.forecast import forecast
        from longtake.training.links import links_named, links_of
        from longtake.training.mesh_forecast import mesh_forecast
        from longtake.training.phases import phases_of
        from longtake.training.relief import find_reliefs
        from longtake.trust import load_recipe

        begun = time.perf_counter()
        given = [f'recompute.memory="{memory}"'] if memory else []
        given += [f'recompute.device="{device}"'] if device else []
        loaded = load_recipe(recipe, [*(changes or ()), *given], trust=trust)
        card = card_of(loaded, world_size=processes)
        if memory is None and (device or card.memory_bytes is None):
            card = card.with_its_own_memory()
        links = links_named(link, card.device) if link else links_of(card.device)
        enter("running a training step on tensors without values")
        known = forecast(loaded, card, world_size=processes, per_node=per_node)
        reliefs = find_reliefs(loaded, known, processes) if known.misses else []
        mesh = mesh_forecast(known, links)
        phases = phases_of(known.step, card)
        seconds = round(time.perf_counter() - begun, 2)
        facts = _as_dict(known, reliefs) | {
            "phases": [_phase(each) for each in phases],
            "checkpoint": {"every": loaded.checkpoint.every, "minutes": loaded.checkpoint.minutes},
            "mesh": mesh_facts(mesh),
            "data_warnings": review_catalogs(loaded),
            "seconds": seconds,
        }
    if as_json:
        say.result(facts)
    else:
        print_plan(say.stdout_console(), str(recipe), facts)
    if known.misses or known.gradients.fatal:
        raise typer.Exit(1)


def _as_dict(known: "Forecast", reliefs: list["Relief"]) -> dict[str, Any]:
    card, step, gradients = known.card, known.step, known.gradients
    return {
        "device": card.device.name,
        "memory_gib": _gib(card.memory_bytes),
        "budget_gib": _gib(card.budget_bytes),
        "model": {
            "parameters": known.num_parameters,
            "trainable": known.num_trainable,
            "tokens": known.num_tokens,
        },
        "bucket": step.bucket.model_dump(),
        "micro_batch_size": step.micro_batch_size,
        "num_micro_batches": step.num_micro_batches,
        "precision": step.recipe.model.dtype
        if step.recipe.model.dtype == "bf16"
        else step.precision,
        "processes": step.world_size,
        "per_node": step.per_node,
        "fixed_gib": _fixed(known.fixed),
        "host_gib": _gib(known.fixed.optimizer.host),
        "foreach_gib": _gib(known.foreach_bytes),
        "policies": [_row(row) for row in known.policies],
        "best": _best(known),
        "changes": [_change(relief) for relief in reliefs],
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


def _fixed(fixed: "Fixed") -> dict[str, float | None]:
    return {
        "weights": _gib(fixed.weights),
        "gradients": _gib(fixed.gradients),
        "optimizer": _gib(fixed.optimizer.device),
        "inputs": _gib(fixed.inputs),
        "ema": _gib(fixed.ema),
        "encoders": _gib(fixed.encoders),
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
    away = known.fixed.elsewhere
    return {
        **{key: value for key, value in _row(row).items() if key not in ("name", "peak_gib")},
        "per_block": best.per_block(),
        "options": dict(best.options),
        "predicted_gib": _gib(best.predicted_bytes - away),
        "traced_gib": _gib(best.traced.peak_bytes - away),
        "overhead_with_another_gib": round(best.overhead_with_another_gib, 4),
    }


def _change(relief: "Relief") -> dict[str, Any]:
    return {
        "what": relief.what,
        "set": list(relief.changes),
        "policy": relief.policy,
        "step_peak_gib": _gib(relief.step_peak_bytes),
        "fits": relief.fits,
    }


def _phase(phase: "Phase") -> dict[str, Any]:
    return {
        "name": phase.name,
        "weights_gib": _gib(phase.weight_bytes),
        "peak_gib": _gib(phase.peak_bytes),
        "seconds": float(f"{phase.seconds:.3g}"),
        "fits": phase.fits,
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 6)
