"""The verb `plan`: will it fit, and will everything train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longtake.cli import say
from longtake.cli.plan_report import print_plan
from longtake.cli.say import AsJson, Changes

if TYPE_CHECKING:
    from longtake.config import Recipe
    from longtake.recompute.devices import Device
    from longtake.training.forecast import Forecast, PolicyForecast
    from longtake.training.relief import Relief

_GIB = 2**30
_DEVICE_HELP = "a6000, h100, h200, rtx4090, or FLOPS,BANDWIDTH; the recipe's, if unset."


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe (TOML); no clips or weights needed.")],
    memory: Annotated[
        str | None, typer.Option(help="Of the card: 48GiB or 48GB; the recipe's, if unset.")
    ] = None,
    device: Annotated[str | None, typer.Option(help=_DEVICE_HELP)] = None,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Tell before the run whether it fits and whether everything trains.

    Runs the model's own code on tensors without values: seconds, on any laptop. Exit code 1 if
    nothing fits or something would not train.
    """
    from longtake import config
    from longtake.training.forecast import forecast
    from longtake.training.relief import find_reliefs

    given = [f'recompute.memory="{memory}"'] if memory else []
    given += [f'recompute.device="{device}"'] if device else []
    loaded = config.load(recipe, [*(changes or ()), *given])
    card, memory_bytes, budget = _card(loaded)
    with say.console().status("Running a step without values …"):
        known = forecast(loaded, card, memory_bytes, budget)
        misses = budget is not None and known.best is None
        reliefs = find_reliefs(loaded, known) if misses else []
    facts = _as_dict(known, reliefs)
    if as_json:
        say.result(facts)
    else:
        print_plan(say.console(), str(recipe), facts)
    if misses or any(trap.stops for trap in known.gradients.traps):
        raise typer.Exit(1)


def _card(recipe: "Recipe") -> tuple["Device", int | None, int | None]:
    """The card that is planned for, its memory, and what tensors may take of it."""
    from longtake import config
    from longtake.recompute.devices import device_at_hand, device_named

    section = recipe.recompute
    card = device_at_hand() if section.device is None else device_named(section.device)
    if section.memory is not None:
        return card, config.memory_bytes(section.memory), section.budget_bytes()
    if card.memory_bytes is None:
        return card, None, None
    budget = config.budget_bytes(f"{card.memory_bytes / 2**20:.0f}MiB", section.reserve)
    return card, card.memory_bytes, budget


def _as_dict(known: "Forecast", reliefs: list["Relief"]) -> dict[str, Any]:
    fixed = known.fixed
    best = known.best
    return {
        "device": known.device.name,
        "memory_gib": _gib(known.memory_bytes),
        "budget_gib": _gib(known.budget_bytes),
        "model": {
            "parameters": known.num_parameters,
            "trainable": known.num_trainable,
            "tokens": known.num_tokens,
        },
        "bucket": known.bucket.model_dump(),
        "micro_batch_size": known.micro_batch_size,
        "num_micro_batches": known.num_micro_batches,
        "fixed_gib": {
            "weights": _gib(fixed.weights),
            "gradients": _gib(fixed.gradients),
            "optimizer": _gib(fixed.optimizer),
            "inputs": _gib(fixed.inputs),
            "ema": _gib(fixed.ema),
            "encoders": _gib(fixed.encoders),
        },
        "foreach_gib": _gib(known.foreach_bytes),
        "policies": [_row(row) for row in known.policies],
        "best": best
        and known.best_policy
        and {
            "per_block": best.per_block(),
            "options": dict(best.options),
            "predicted_gib": _gib(best.predicted_bytes),
            "forward_end_gib": _gib(best.traced.forward_end_bytes),
            "traced_gib": _gib(best.traced.peak_bytes),
            "step_peak_gib": _gib(known.best_policy.step_peak_bytes),
            "overhead": round(best.overhead, 4),
            "overhead_with_another_gib": round(best.overhead_with_another_gib, 4),
        },
        "changes": [
            {
                "what": relief.what,
                "set": list(relief.changes),
                "policy": relief.policy,
                "step_peak_gib": _gib(relief.step_peak_bytes),
                "fits": relief.fits,
            }
            for relief in reliefs
        ],
        "gradients": {
            "trainable": len(known.gradients.reached) + len(known.gradients.unreached),
            "reached": len(known.gradients.reached),
            "unreached": list(known.gradients.unreached),
        },
        "traps": [
            {"block": trap.block, "trap": trap.trap, "fix": trap.fix, "stops": trap.stops}
            for trap in known.gradients.traps
        ],
        "seconds": round(known.seconds, 2),
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


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / _GIB, 4)
