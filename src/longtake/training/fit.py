"""What `train` makes of the plan: stops on a trap, picks the policy, runs the blocks by it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from longtake.config import Bucket, Recipe
from longtake.errors import CannotBePlannedError, LongtakeError, PlanError
from longtake.formatting import format_size
from longtake.models.build import Components
from longtake.models.numerics import Precision
from longtake.parallel.collectives import from_first
from longtake.parallel.mesh import World
from longtake.planner.activation_checkpointing import Options, caller, options_of
from longtake.planner.devices import Target
from longtake.training.card import Card, card_of
from longtake.training.forecast import Forecast, forecast, wasteful
from longtake.training.gradients import check_gradients, refuse_traps
from longtake.training.outlined import OutlinedStep, outlined_step
from longtake.training.relief import as_lines, find_reliefs
from longtake.training.resident import PolicyForecast, memory_of


@dataclass(frozen=True)
class Fit:
    """How the blocks of a run are run, and what a step takes then."""

    policy: str
    options: Options
    memory: PolicyForecast | None
    """None where nothing is recomputed and no budget is given: then nobody asked."""
    activation_bytes: int | None
    """The predicted peak of forward and backward pass beside the weights."""
    bucket: Bucket
    """The shape of clips that was planned for."""
    notes: Sequence[str]
    """Traps that cost memory or time, but do not keep anything from training."""
    budget_bytes: int | None = None
    """What tensors may take of the device."""


def fit(recipe: Recipe, precision: Precision, world: World, free_bytes: int | None = None) -> Fit:
    """Check that everything trains and fits; rank 0 looks, and all get its answer.

    Raises:
        PlanError: a trainable parameter would get no gradient, or no policy fits the memory.
    """
    resolved = recipe.training.model_copy(update={"precision": precision})
    wanted = recipe.model_copy(update={"training": resolved})
    answer = None
    if world.is_first and free_bytes is not None:
        answer = _try_to_fit(_with_memory(wanted, free_bytes), world)
    if world.is_first and (answer is None or isinstance(answer, CannotBePlannedError)):
        answer = _try_to_fit(wanted, world)
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


def does_not_fit(recipe: Recipe, known: Forecast, world_size: int) -> PlanError:
    """What is missing, and what to change."""
    assert known.card.budget_bytes is not None
    policy, budget = recipe.recompute.chosen(), format_size(known.card.budget_bytes)
    if (best := known.best_policy) is not None:
        return PlanError(
            f'recompute.policy = "{policy}" takes '
            f"{format_size(known.policy(policy).step_peak_bytes)}, but the budget for all tensors "
            f'is {budget}. Set recompute.policy = "best": {format_size(best.step_peak_bytes)}, and '
            f"a step takes {best.overhead:.0%} longer than without recompute."
        )
    least = known.least.step_peak_bytes
    text = (
        f"No recompute policy fits {budget}: the least, {known.least.name}, takes "
        f"{format_size(least)}. Take a card of {format_size(known.card.memory_for(least))}."
    )
    reliefs = find_reliefs(recipe, known, world_size)
    return PlanError("\n".join([f"{text} Or:" if reliefs else text, *as_lines(reliefs)]))


def _with_memory(recipe: Recipe, memory_bytes: int) -> Recipe:
    section = recipe.recompute.model_copy(update={"memory": f"{memory_bytes // 2**20}MiB"})
    return recipe.model_copy(update={"recompute": section})


def _try_to_fit(recipe: Recipe, world: World) -> Fit | LongtakeError:
    """Errors are handed on, so that they can reach every rank."""
    world_size = world.size
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    target: Target = "cuda" if world.device.type == "cuda" else "cpu"
    card = card_of(recipe, target, world_size)
    try:
        if recipe.recompute.chosen() == "best":
            return _best(recipe, card, world_size, per_node)
        return _named(outlined_step(recipe, card.device, world_size, per_node), card)
    except LongtakeError as error:
        return error


def _best(recipe: Recipe, card: Card, world_size: int, per_node: int) -> Fit:
    known = forecast(recipe, card, world_size=world_size, per_node=per_node)
    refuse_traps(known.gradients)
    if known.best is None:
        raise does_not_fit(recipe, known, world_size)
    trace = known.best.traced
    return Fit(
        policy="best",
        options=known.best.options,
        memory=known.best_policy,
        activation_bytes=trace.peak_bytes - trace.weight_bytes,
        bucket=known.step.bucket,
        notes=[str(trap) for trap in known.gradients.traps],
        budget_bytes=card.budget_bytes,
    )


def _named(step: OutlinedStep, card: Card) -> Fit:
    """A policy that the recipe names; memory is looked at if something is recomputed or limited."""
    policy = step.recipe.recompute.chosen()
    options = options_of(policy, tuple(step.tracer.subject.blocks))
    try:
        gradients = check_gradients(step)
    except CannotBePlannedError as error:  # it may train all the same
        return Fit(policy, options, None, None, step.bucket, [f"Gradients are unchecked. {error}"])
    refuse_traps(gradients)
    notes = [str(trap) for trap in gradients.traps]
    if policy == "none" and card.memory_bytes is None:
        return Fit(policy, options, None, None, step.bucket, notes)
    traces = {"none": step.tracer.trace({}), policy: step.tracer.trace(options)}
    trace = traces[policy]
    memory = memory_of(policy, trace, step, budget_bytes=card.budget_bytes)
    if memory.fits is False:
        known = forecast(step.recipe, card, world_size=step.world_size, per_node=step.per_node)
        raise does_not_fit(step.recipe, known, step.world_size)
    return Fit(
        policy=policy,
        options=options,
        memory=memory,
        activation_bytes=trace.peak_bytes - trace.weight_bytes,
        bucket=step.bucket,
        notes=[*notes, *(str(trap) for trap in wasteful(step, traces))],
        budget_bytes=card.budget_bytes,
    )
