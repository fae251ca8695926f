"""Memory and time of sampling presets between two training steps, traced without values."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from longtake.config import Bucket
from longtake.errors import PlanError
from longtake.flow.solver import SolverName, integrate, num_evaluations
from longtake.formatting import plural
from longtake.models.components import Components
from longtake.models.conditioning import outline_conditioning, without_text
from longtake.models.frozen_adapter import sampled_with
from longtake.planner.block_weights import module_bytes
from longtake.planner.fake_tensors import CachedFakeMode, empty_like
from longtake.planner.memory import MetaStep, static_memory
from longtake.planner.trace import InferenceTrace, trace_inference
from longtake.run_dir import RunDirectory
from longtake.sampling.guidance import Guidance, guidance_scale, uses_other
from longtake.sampling.memory_strategy import ONE_BY_ONE, MemoryStrategy
from longtake.sampling.other_expert import other_bytes, refuse_wrong_other, role_of_other
from longtake.sampling.presets import RequestGroup, training_presets
from longtake.sampling.sampler import Sampler, fitting_shape, refuse_unfitting

_SIGMAS = (1.0, 0.5, 0.0)


def sampling_phase(
    mode: CachedFakeMode,
    step: MetaStep,
    components: Components,
    decoding_of: Callable[[Bucket, int | None], InferenceTrace],
    weight_bytes: int,
    streamed: Mapping[nn.Module, int],
) -> InferenceTrace | None:
    """Trace memory and time of sampling between training steps; None if nothing is sampled then.

    Weights, optimizer states and averages stay on the device, as do encoders without a cache;
    gradients are freed. The peak is that of one process, the time that of all of them. The strategy
    is the first that fits in the order of `MemoryFallback`, or else the last.

    Args:
        mode: active fake mode, in which the model's weights are held as in training.
        step: training step of the recipe.
        components: parts with the model; another transformer of the release is streamed in two
            blocks.
        decoding_of: traces the decoding of one video, with the greatest peak that it may have.
        weight_bytes: bytes of the model on the device.
        streamed: bytes of streamed blocks, as for `trace_inference`.

    Raises:
        RecipeError: the model cannot sample a preset's size, a setting of it has no effect, or
            `sampling.other_expert` has trained another transformer.
    """
    recipe, static = step.recipe, static_memory(step, weight_bytes=weight_bytes)
    there = static.weights + static.resident
    refuse_wrong_other(recipe)
    presets = training_presets(recipe, RunDirectory(recipe.out))
    groups = [(preset, group) for preset in presets for group in preset.groups()]
    has_other = any(uses_other(components, group.settings) for _, group in groups)
    there += other_bytes(recipe, components, step.device.target) if has_other else 0
    # With a cache, the codec is on the device only while it decodes.
    codec_weights = sum(map(module_bytes, components.codec.modules()))
    codec_bytes = codec_weights if recipe.data.cache is not None else 0
    peak, seconds, how = there, 0.0, list[str]()
    budget = None if step.device.budget_bytes is None else step.device.budget_bytes - there
    for preset, group in groups:
        refuse_unfitting(components, recipe, preset)
        # Rounded up, as each rank samples the same number of videos.
        share = -(-len(group.requests) // (step.world_size // recipe.parallel.context))
        most = min(share, preset.batch_size)
        strategy, denoising = _denoising(mode, step, components, group, most, budget, streamed)
        room = None if budget is None else budget - codec_bytes + codec_weights
        decoding = decoding_of(group.bucket, room)
        activations = denoising.activation_bytes, codec_bytes + decoding.activation_bytes
        peak = max(peak, there + max(activations))
        count = strategy.at_once or most
        settings = group.settings
        num_steps = settings.num_inference_steps or components.defaults.num_inference_steps
        per_call = denoising.seconds / num_evaluations(settings.solver, len(_SIGMAS) - 1)
        calls = math.ceil(share / count) * num_evaluations(settings.solver, num_steps)
        seconds += calls * per_call + share * decoding.seconds
        size = f" of {group.bucket}" if preset.own else ""
        how.append(f"{preset.name}: {plural(len(group.requests), 'video')}{size}, {strategy}")
    if not how:
        return None
    if has_other:
        how.append(f"{role_of_other(components)}, copied by block")
    return InferenceTrace(there, peak, seconds, "; ".join(how))


def _denoising(
    mode: CachedFakeMode,
    step: MetaStep,
    components: Components,
    group: RequestGroup,
    most: int,
    budget: int | None,
    streamed: Mapping[nn.Module, int],
) -> tuple[MemoryStrategy, InferenceTrace]:
    """Return the first way to save memory in sampling that fits, with a trace of two steps.

    At most `most` videos are sampled at the same time.
    """
    strategy = ONE_BY_ONE if step.world_size > 1 else MemoryStrategy()
    while True:
        count = strategy.at_once or most

        def run(count: int = count, two_passes: bool = strategy.two_passes) -> None:
            _denoise(step, components, group, count, two_passes=two_passes)

        trace = trace_inference(mode, [components.model], run, step.device, streamed)
        if budget is None or trace.activation_bytes <= budget:
            return strategy, trace
        try:
            # Two transformers take two passes anyway.
            may_split = components.unconditional is None and _scale(components, group) > 1
            strategy = strategy.next_cheaper(count, group.bucket, may_split=may_split)
        except PlanError:
            return strategy, trace


def _scale(components: Components, group: RequestGroup) -> float:
    """Return the videos' classifier-free guidance scale; 1 for a model that has distilled it."""
    is_distilled = components.family.distils_guidance(components.model)
    return 1.0 if is_distilled else guidance_scale(components, group.settings)


def _denoise(
    step: MetaStep, components: Components, group: RequestGroup, count: int, *, two_passes: bool
) -> None:
    """Run two steps of the sampling solver on fake tensors, as `Sampler.sample` does."""
    sampler = Sampler(components, step.recipe, 0, torch.device("cpu"), step.precision)
    shape: tuple[int, ...] = fitting_shape(components, step.recipe, group.bucket)
    if (streams := sampler.streams(group.bucket)) is not None:
        shape = (sum(map(math.prod, streams)),)

    def conditioning() -> dict[str, torch.Tensor]:
        return empty_like(outline_conditioning(components, step.recipe, group.bucket, count))

    scale, solver = _scale(components, group), group.settings.solver
    predict = partial(sampler.predict, streams=streams)
    told = conditioning()
    unconditional, second = conditioning() if scale > 1 else None, None
    if scale > 1 and components.unconditional is not None:
        # The trained transformer stands for the other one, which has the same architecture.
        unconditional, second = without_text(told), predict
    guide = Guidance(predict, told, unconditional, scale, second=second)
    velocity = guide.velocity(slice(0, count), two_passes=two_passes)
    # UniPC computes with values of sigmas, which do not exist here. Compared with an Euler step it
    # also keeps the last two predictions, the last latents and the corrected ones.
    kept = [torch.empty(4, count, *shape)] if solver == "unipc" else []
    traced: SolverName = "heun" if solver == "heun" else "euler"
    with sampled_with(group.settings.adapter_strength):
        integrate(velocity, torch.empty(count, *shape), _SIGMAS, traced)
    del kept
