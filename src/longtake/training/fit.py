"""What `train` makes of the plan: stops on a trap, picks the policy, runs the blocks by it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longtake.config import Recipe
from longtake.errors import LongtakeError, PlanError
from longtake.models.assemble import Components
from longtake.models.precision import Precision
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World
from longtake.recompute.apply import caller
from longtake.recompute.devices import Device, device_at_hand, device_named
from longtake.recompute.policies import Options, options_of
from longtake.training.forecast import (
    Forecast,
    Gradients,
    PolicyForecast,
    check_gradients,
    forecast,
    memory_of,
)
from longtake.training.outlined import outlined_step
from longtake.training.relief import find_reliefs

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """How the blocks of a run are run, and what a step takes then."""

    policy: str
    options: Options
    memory: PolicyForecast | None
    """None where nothing is recomputed and no budget is given: then nobody asked."""
    activation_bytes: int | None
    """The predicted peak of forward and backward pass beside the weights."""
    notes: Sequence[str]
    """Traps that cost memory or time, but do not keep anything from training."""


def fit(recipe: Recipe, precision: Precision, world: World) -> Fit:
    """Check that everything trains and fits; rank 0 looks, and all get its answer.

    Raises:
        PlanError: a trainable parameter would get no gradient, or no policy fits the memory.
    """
    device = _device(recipe, world)
    resolved = recipe.training.model_copy(update={"precision": precision})
    wanted = recipe.model_copy(update={"training": resolved})
    answer = _try_to_fit(wanted, device, world.size) if world.is_first else None
    answer = from_first(answer, world)
    if isinstance(answer, LongtakeError):
        raise answer
    assert answer is not None
    return answer


def run_blocks_by(options: Options, parts: Components) -> None:
    """Have a model run its blocks as they are told, from now on."""
    if all(option == "keep" for option in options.values()):
        return
    names = dict(parts.model.named_modules())
    parts.family.call_blocks_by(
        parts.model, caller({names[name]: option for name, option in options.items()})
    )


def refuse_traps(gradients: Gradients) -> None:
    """Stop where something that should be trained would not be.

    Raises:
        PlanError: names it, and what to do.
    """
    fatal = [trap for trap in gradients.traps if trap.stops]
    if fatal:
        raise PlanError("\n".join(["Not everything would train.", *map(str, fatal)]))


def does_not_fit(recipe: Recipe, known: Forecast, world_size: int) -> PlanError:
    """What is missing, and what to change."""
    assert known.budget_bytes is not None
    if known.best_policy is not None:
        return _another_fits(recipe.recompute.chosen(), known.best_policy, known)
    least = min(known.policies, key=lambda row: row.step_peak_bytes)
    lines = [
        f"No recompute policy fits {known.budget_bytes / GIB:.2f} GiB: the least, {least.name}, "
        f"takes {least.step_peak_bytes / GIB:.2f} GiB. Take a card with more memory."
    ]
    reliefs = find_reliefs(recipe, known, world_size)
    if reliefs:
        lines[0] += " Or, each by itself:"
    for relief in reliefs:
        verdict = "fits" if relief.fits else "not enough by itself"
        settings = " ".join(f"--set '{change}'" for change in relief.changes)
        lines.append(
            f"  {relief.what}: {relief.step_peak_bytes / GIB:.2f} GiB, {verdict} ({settings})"
        )
    return PlanError("\n".join(lines))


def _another_fits(policy: str, best: PolicyForecast, known: Forecast) -> PlanError:
    assert known.budget_bytes is not None
    assert best.overhead is not None
    return PlanError(
        f'recompute.policy = "{policy}" takes {known.policy(policy).step_peak_bytes / GIB:.2f} '
        f"GiB, but the budget for all tensors is {known.budget_bytes / GIB:.2f} GiB. Set "
        f'recompute.policy = "best": {best.step_peak_bytes / GIB:.2f} GiB, and a step takes '
        f"{best.overhead:.0%} longer than without recompute."
    )


def _device(recipe: Recipe, world: World) -> Device:
    named = recipe.recompute.device
    device = device_at_hand() if named is None else device_named(named)
    return replace(device, target="cuda" if world.device.type == "cuda" else "cpu")


def _try_to_fit(recipe: Recipe, device: Device, world_size: int) -> Fit | LongtakeError:
    """Errors are handed on, so that they can reach every rank."""
    try:
        return _fit(recipe, device, world_size)
    except LongtakeError as error:
        return error


def _fit(recipe: Recipe, device: Device, world_size: int) -> Fit:
    policy, budget = recipe.recompute.chosen(), recipe.recompute.budget_bytes()
    if policy == "best":
        return _best(recipe, device, budget, world_size)
    step = outlined_step(recipe, device, world_size)
    gradients = check_gradients(step)
    refuse_traps(gradients)
    options = options_of(policy, tuple(step.tracer.subject.blocks))
    notes = [str(trap) for trap in gradients.traps]
    if policy == "none" and budget is None:
        return Fit(policy, options, None, None, notes)
    trace = step.tracer.trace(options)
    memory = memory_of(policy, trace, step, budget_bytes=budget)
    if memory.fits is False:
        known = forecast(recipe, device, None, budget, world_size=world_size)
        raise does_not_fit(recipe, known, world_size)
    return Fit(policy, options, memory, trace.peak_bytes - trace.weight_bytes, notes)


def _best(recipe: Recipe, device: Device, budget: int | None, world_size: int) -> Fit:
    known = forecast(recipe, device, None, budget, world_size=world_size)
    refuse_traps(known.gradients)
    if known.best is None:
        raise does_not_fit(recipe, known, world_size)
    trace = known.best.traced
    notes = [str(trap) for trap in known.gradients.traps]
    activations = trace.peak_bytes - trace.weight_bytes
    return Fit("best", known.best.options, known.best_policy, activations, notes)
