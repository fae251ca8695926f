"""The memory plan of a training: refuses fatal traps, chooses how blocks run, and is kept.

A restart reads the kept plan from the run directory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata

import torch
from pydantic import TypeAdapter, ValidationError

from longtake import config, fsio
from longtake.errors import CannotBePlannedError, LongtakeError, PlanError, RecipeError
from longtake.formatting import format_size
from longtake.models.codec import kept_tile
from longtake.models.components import Components, Kinds, outline, read_kinds
from longtake.models.numerics import Precision
from longtake.parallel import attention_rules
from longtake.parallel.collectives import from_first, gather_objects
from longtake.parallel.mesh import World
from longtake.planner import attention_check, encoding, plan_cache
from longtake.planner.activation_checkpointing import caller, options_of
from longtake.planner.devices import DeviceBudget, Target, device_budget
from longtake.planner.forecast import (
    Forecast,
    check_gradients,
    encoding_ahead,
    forecast,
    policy_traps,
    suggest_changes,
)
from longtake.planner.memory import (
    MetaStep,
    beside_encoding,
    outline_step,
    policy_forecast,
    static_memory,
)
from longtake.planner.record import KEEP, MemoryPlan, Options, PolicyForecast
from longtake.planner.trace import StepTrace
from longtake.planner.traps import Trap
from longtake.run_dir import RunDirectory
from longtake.trust import training_classes

_LIBRARIES = ("torch", "diffusers", "transformers", "peft")
_FREE_STEP_BYTES = 2**28
"""Multiple of bytes to which free GPU memory is rounded down, so that a restart keeps its plan."""


@dataclass(frozen=True)
class TrainingPlan(MemoryPlan):
    """A run's memory plan, with the attention kernels for which it holds."""

    attention: attention_check.AttentionAnswer | None = None  # None: no GPU here to try kernels on


def plan_for_training(
    recipe: config.Recipe,
    precision: Precision,
    run: RunDirectory,
    world: World,
    free_bytes: int | None = None,
) -> TrainingPlan:
    """Return the memory plan that an earlier launch kept under equal conditions, or make a new one.

    All ranks must call it; they get rank 0's plan.

    Args:
        recipe: recipe to train.
        precision: precision chosen for the training.
        run: directory in which `keep_plan` keeps the plan.
        world: all ranks of the launch.
        free_bytes: free memory of the device, if the recipe names no memory: see `free_memory`.

    Raises:
        PlanError: a trainable parameter would get no gradient, or no policy fits the memory.
    """
    kept = None
    if world.is_first:
        # A new driver or library may refuse a kernel, which changes the memory of attention.
        record = fsio.read_json(run.plan_path)
        if record.get("key") == _plan_key(recipe, precision, world, free_bytes):
            with suppress(ValidationError):
                kept = TypeAdapter(TrainingPlan).validate_python(record.get("plan"))
        if kept is not None and kept.attention is not None:
            again = attention_check.choose_kernels(kept.attention.cases, world.device)
            kept = kept if again == kept.attention else None
    kept = from_first(kept, world)
    if kept is not None:
        return _with_its_kernels(kept)
    if run.exists():  # and goes on to encode as when it began
        recipe = recipe.with_encode_tile(kept_tile(recipe.codec, run.components_path))
    # Blocks of an existing run stay as they were quantised when it began.
    quantized = read_kinds(run.components_path) if recipe.model.quantize == "auto" else None
    return make_plan(recipe, precision, world, free_bytes, quantized)


def make_plan(
    recipe: config.Recipe,
    precision: Precision,
    world: World,
    free_bytes: int | None = None,
    quantized: Kinds | None = None,
) -> TrainingPlan:
    """Make a memory plan, which checks that everything trains and fits; all ranks must call it.

    The arguments are those of `plan_for_training`, and `quantized`: the kinds to which the run's
    blocks are quantised already.

    Raises:
        PlanError: a trainable parameter would get no gradient, or no recompute policy fits the
            memory.
    """
    resolved = recipe.training.model_copy(update={"precision": precision})
    wanted = recipe.model_copy(update={"training": resolved})
    answer = None
    is_on_gpu = world.device.type == "cuda" and torch.cuda.is_available()
    kernels = attention_check.KernelChooser(world.device) if is_on_gpu else None
    # First with the free memory as the limit; a model that cannot be planned is tried without one.
    if world.is_first and free_bytes is not None:
        memory = {"memory": f"{free_bytes // 2**20}MiB"}
        limited = wanted.recompute.model_copy(update=memory)
        limited_recipe = wanted.model_copy(update={"recompute": limited})
        answer = _try_to_plan(limited_recipe, world, quantized, kernels)
    if world.is_first and (answer is None or isinstance(answer, CannotBePlannedError)):
        answer = _try_to_plan(wanted, world, quantized, kernels)
    # An error reaches every rank like this, so that none waits for another.
    answer = from_first(answer, world)
    if isinstance(answer, LongtakeError):
        raise answer
    assert answer is not None
    return _with_its_kernels(answer)


def _with_its_kernels(plan: TrainingPlan) -> TrainingPlan:
    """Let every rank compute attention by the kernels that rank 0 has found."""
    if plan.attention is not None:
        attention_rules.CHOICES.update(plan.attention.choices)
    return plan


def run_blocks(options: Options, components: Components) -> None:
    """Make a model run each block by its option: how its activations are kept or recomputed."""
    if all(option == KEEP for option in options.values()):
        return
    names = dict(components.model.named_modules())
    call = caller({names[name]: option for name, option in options.items()})
    components.family.block.call_by(components.model, call)


def free_memory(recipe: config.Recipe, world: World) -> int | None:
    """Return the least free memory of all ranks' GPUs in bytes; all ranks must call it.

    None on a CPU, or if the recipe names the memory.
    """
    if recipe.recompute.memory is not None or world.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(world.device)
    return min(gather_objects(free, world)) // _FREE_STEP_BYTES * _FREE_STEP_BYTES


def _training_device(recipe: config.Recipe, world: World) -> DeviceBudget:
    target: Target = "cuda" if world.device.type == "cuda" else "cpu"
    return device_budget(recipe, target, world.size)


def _try_to_plan(
    recipe: config.Recipe,
    world: World,
    quantized: Kinds | None,
    kernels: attention_check.KernelChooser | None,
) -> TrainingPlan | LongtakeError:
    """Make a memory plan on rank 0, or return the error, so that it can be sent to every rank."""
    attention_rules.CHOICES.clear()  # attention is traced as by kernels that can be tried
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    device = _training_device(recipe, world)

    def still_holds(plan: TrainingPlan) -> bool:
        if kernels is None or plan.attention is None:
            return kernels is None and plan.attention is None
        kernels.choose(plan.attention.cases)
        if kernels.answer != plan.attention:
            attention_rules.CHOICES.clear()
        return kernels.answer == plan.attention

    try:
        return plan_cache.recalled(
            "training",
            plan_cache.facts_of(recipe, device, ranks=(world.size, per_node), quantized=quantized),
            TypeAdapter(TrainingPlan),
            partial(_find_plan, recipe, device, world.size, per_node, quantized, kernels),
            still_holds,
        )
    except LongtakeError as error:
        return error


def _find_plan(
    recipe: config.Recipe,
    device: DeviceBudget,
    world_size: int,
    per_node: int,
    quantized: Kinds | None,
    kernels: attention_check.KernelChooser | None,
) -> TrainingPlan:
    """Make a memory plan by tracing the training step."""
    if recipe.recompute.chosen() != "best":
        step = outline_step(recipe, device, world_size, per_node, quantized)
        plan = _named_plan(step, kernels)
    else:
        known = forecast(
            recipe,
            device,
            world_size=world_size,
            per_node=per_node,
            quantized=quantized,
            kernels=kernels,
        )
        known.gradients.refuse_fatal()
        if known.best is None:
            raise does_not_fit(known)
        plan = _plan(
            known.step,
            "best",
            known.best.options,
            known.gradients.traps,
            known.best_policy,
            known.best.traced,
            known.policies,
        )
    if kernels is None or kernels.answer is None:
        return plan
    return replace(plan, attention=kernels.answer, notes=[*plan.notes, *kernels.answer.notes])


def _named_plan(step: MetaStep, kernels: attention_check.KernelChooser | None) -> TrainingPlan:
    """Plan a recompute policy that the recipe names, rather than "best".

    Memory is predicted only if the policy recomputes or the memory has a limit.
    """
    policy = step.recipe.recompute.chosen()
    options = options_of(policy, step.block_names, step.base_weights)
    try:
        gradients = check_gradients(step)
    except CannotBePlannedError as error:  # the model may train all the same
        return _plan(step, policy, options, [f"Gradients are unchecked. {error}"])
    gradients.refuse_fatal()
    if kernels is not None:
        kernels.choose(step.tracer.attentions)
    # Nothing is recomputed and nothing limited, so that no trace is needed.
    if policy == "none" and step.device.memory_bytes is None:
        return _plan(step, policy, options, gradients.traps)
    traces = {"none": step.tracer.trace({}), policy: step.tracer.trace(options)}
    memory = policy_forecast(policy, traces[policy], step)
    if memory.fits is False:
        known = forecast(
            step.recipe, step.device, world_size=step.world_size, per_node=step.per_node
        )
        raise does_not_fit(known)
    compared = [
        policy_forecast(name, trace, step, trace.seconds / traces["none"].seconds - 1)
        for name, trace in traces.items()
    ]
    traps = [*gradients.traps, *policy_traps(step, traces)]
    return _plan(step, policy, options, traps, memory, traces[policy], compared)


def _plan(
    step: MetaStep,
    policy: str,
    options: Options,
    notes: Sequence[Trap | str],
    memory: PolicyForecast | None = None,
    trace: StepTrace | None = None,
    compared: Sequence[PolicyForecast] = (),
) -> TrainingPlan:
    fixed = None if trace is None else static_memory(step, trace.input_bytes, trace.weight_bytes)
    beside = beside_encoding(step, fixed)
    tile = encoding.choose_tile(step.recipe, step.device, beside)
    # A cache may have been filled in other tiles, on another device, and need no encoding.
    if step.recipe.codec.encode_tile == "auto" and step.recipe.encodes_in_steps():
        notes = [*notes, *tile.notes()]
    step = replace(step, recipe=step.recipe.with_encode_tile(tile.pixels))
    ahead = encoding_ahead(step, memory)
    return TrainingPlan(
        policy=policy,
        options=options,
        memory=memory,
        activation_bytes=None if trace is None else trace.peak_bytes - trace.weight_bytes,
        bucket=step.batch.bucket,
        notes=[str(note) for note in notes],
        budget_bytes=None if trace is None else step.device.budget_bytes,
        encodes_ahead=ahead is not None and ahead.is_chosen,
        encode_tile=tile.pixels,
        compared=tuple(compared),
        fixed=fixed,
    )


def does_not_fit(known: Forecast) -> PlanError:
    """Build the error of a training that does not fit: missing memory, and changes that help."""
    device, policy = known.device, known.step.recipe.recompute.chosen()
    assert device.budget_bytes is not None
    budget = format_size(device.budget_bytes)
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
        f"{format_size(least)}. Take a GPU of {format_size(device.memory_for(least))}."
    )
    suggestions = [f"  {suggestion}" for suggestion in suggest_changes(known)]
    return PlanError("\n".join([f"{text} Or:" if suggestions else text, *suggestions]))


def tile_to_fill(
    recipe: config.Recipe, world: World, *, elsewhere: bool = False
) -> Callable[[], int]:
    """Return a function that chooses in which tiles a cache is filled before its run exists.

    All ranks must call this; the function is for rank 0.

    Args:
        recipe: recipe with a cache.
        world: all ranks that fill the cache.
        elsewhere: a cluster's workers encode, of whose devices only the recipe is known here. The
            function raises RecipeError if it names neither tiles nor the memory.
    """
    free = free_memory(recipe, world)
    device = device_budget(recipe) if elsewhere else _training_device(recipe, world)
    if free is not None:
        device = replace(device, memory_bytes=free)

    def choose() -> int:
        is_unknown = elsewhere and device.memory_bytes is None and recipe.training.device != "cpu"
        if is_unknown and recipe.codec.encode_tile == "auto" and outline(recipe).codec.can_tile:
            raise RecipeError(
                "The tiles in which clips are encoded depend on the workers' memory, which is not "
                "known here. Set it, such as --set recompute.memory=24GiB, or name the tiles, such "
                "as --set codec.encode_tile=512, or 0 for whole clips."
            )
        return encoding.choose_tile(recipe, device).pixels

    return choose


def keep_plan(
    plan: TrainingPlan,
    recipe: config.Recipe,
    precision: Precision,
    run: RunDirectory,
    world: World,
    free_bytes: int | None = None,
) -> None:
    """Write the memory plan to the run directory, so that a restart need not plan again (rank 0).

    With model classes of the user's own nothing is kept, since changes of their code are not
    detected.
    """
    if not training_classes(recipe):
        key = _plan_key(recipe, precision, world, free_bytes)
        if fsio.read_json(run.plan_path).get("key") == key:
            return
        plan_as_json = TypeAdapter(TrainingPlan).dump_python(plan, mode="json")
        with suppress(OSError):  # the next launch plans again
            fsio.write_json(run.plan_path, {"key": key, "plan": plan_as_json})


def _plan_key(
    recipe: config.Recipe, precision: Precision, world: World, free_bytes: int | None
) -> str:
    """Return a checksum of everything that a memory plan depends on."""
    facts = {
        "recipe": config.dump(config.kept(recipe)),
        "precision": precision,
        "world": [world.size, os.environ.get("LOCAL_WORLD_SIZE")],
        "device": asdict(_training_device(recipe, world)),
        "free_bytes": free_bytes,
        # Other versions may save other tensors.
        "versions": {name: metadata.version(name) for name in _LIBRARIES},
        # Another version of the planner may plan otherwise.
        "code": plan_cache.code_checksum(),
    }
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
