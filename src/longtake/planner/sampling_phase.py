"""Memory and time of sampling presets between two training steps, traced without values."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from longtake.config import Bucket
from longtake.errors import PlanError
from longtake.flow.solver import SolverName, integrate, num_evaluations
from longtake.formatting import plural
from longtake.models.components import Components
from longtake.models.conditioning import outline_conditioning
from longtake.planner.block_weights import module_bytes
from longtake.planner.fake_tensors import CachedFakeMode, empty_like
from longtake.planner.memory import MetaStep, static_memory
from longtake.planner.trace import InferenceTrace, trace_inference
from longtake.run_dir import RunDirectory
from longtake.sampling.other_expert import other_bytes, refuse_wrong_other
from longtake.sampling.presets import Preset, training_presets
from longtake.sampling.sampler import (
    ONE_BY_ONE,
    Guidance,
    MemoryStrategy,
    Sampler,
    fitting_shape,
    refuse_unfitting,
)

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
    there += other_bytes(recipe, components, step.device.target)
    # With a cache, the codec is on the device only while it decodes.
    codec_weights = sum(map(module_bytes, components.codec.modules()))
    codec_bytes = codec_weights if recipe.data.cache is not None else 0
    peak, seconds, how = there, 0.0, list[str]()
    for preset in training_presets(recipe, RunDirectory(recipe.out)):
        refuse_unfitting(components, recipe, preset)
        budget = None if step.device.budget_bytes is None else step.device.budget_bytes - there
        # Rounded up, as each rank samples the same number of videos.
        share = -(-len(preset.requests()) // (step.world_size // recipe.parallel.context))
        strategy, denoising = _denoising(mode, step, components, preset, share, budget, streamed)
        room = None if budget is None else budget - codec_bytes + codec_weights
        decoding = decoding_of(preset.bucket, room)
        activations = denoising.activation_bytes, codec_bytes + decoding.activation_bytes
        peak = max(peak, there + max(activations))
        count = _at_once(strategy, preset, share)
        solver = preset.settings.solver
        num_steps = preset.settings.num_inference_steps or components.defaults.num_inference_steps
        per_call = denoising.seconds / num_evaluations(solver, len(_SIGMAS) - 1)
        calls = math.ceil(share / count) * num_evaluations(solver, num_steps)
        seconds += calls * per_call + share * decoding.seconds
        how.append(f"{preset.name}: {plural(len(preset.requests()), 'video')}, {strategy}")
    if not how:
        return None
    if components.experts is not None:
        how.append(
            f"the {components.experts.other}-noise expert serves its sigmas, copied by block"
        )
    return InferenceTrace(there, peak, seconds, "; ".join(how))


def _at_once(strategy: MemoryStrategy, preset: Preset, share: int) -> int:
    return min(share, preset.batch_size, strategy.at_once or share)


def _denoising(
    mode: CachedFakeMode,
    step: MetaStep,
    components: Components,
    preset: Preset,
    share: int,
    budget: int | None,
    streamed: Mapping[nn.Module, int],
) -> tuple[MemoryStrategy, InferenceTrace]:
    """Return the first way to save memory in sampling that fits, with a trace of two steps."""
    strategy = ONE_BY_ONE if step.world_size > 1 else MemoryStrategy()
    while True:
        count = _at_once(strategy, preset, share)

        def run(count: int = count, two_passes: bool = strategy.two_passes) -> None:
            _denoise(step, components, preset, count, two_passes=two_passes)

        trace = trace_inference(mode, [components.model], run, step.device, streamed)
        if budget is None or trace.activation_bytes <= budget:
            return strategy, trace
        try:
            is_guided = _scale(components, preset) > 1
            strategy = strategy.next_cheaper(count, preset.bucket, may_split=is_guided)
        except PlanError:
            return strategy, trace


def _scale(components: Components, preset: Preset) -> float:
    """Return a preset's classifier-free guidance scale; 1 for a model that has distilled it."""
    if components.family.distils_guidance(components.model):
        return 1.0
    scale = preset.settings.guidance_scale
    return components.defaults.guidance_scale if scale is None else scale


def _denoise(
    step: MetaStep, components: Components, preset: Preset, count: int, *, two_passes: bool
) -> None:
    """Run two steps of the sampling solver on fake tensors, as `Sampler.sample` does."""
    sampler = Sampler(components, step.recipe, 0, torch.device("cpu"), step.precision)
    shape = fitting_shape(components, step.recipe, preset.bucket)

    def conditioning() -> dict[str, torch.Tensor]:
        return empty_like(outline_conditioning(components, step.recipe, preset.bucket, count))

    scale, solver = _scale(components, preset), preset.settings.solver
    unconditional = conditioning() if scale > 1 else None
    guide = Guidance(sampler.predict, conditioning(), unconditional, scale)
    velocity = guide.velocity(slice(0, count), two_passes=two_passes)
    # UniPC computes with values of sigmas, which do not exist here. Compared with an Euler step it
    # also keeps the last two predictions, the last latents and the corrected ones.
    kept = [torch.empty(4, count, *shape)] if solver == "unipc" else []
    traced: SolverName = "heun" if solver == "heun" else "euler"
    integrate(velocity, torch.empty(count, *shape), _SIGMAS, traced)
    del kept
