"""Forecasts the phases of a run other than steps: encoding, sampling, and the model alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from longtake.models.audio import audio_shape
from longtake.models.base import latent_shape
from longtake.models.codec import outline_codec
from longtake.models.components import Components, outline, text_section
from longtake.models.conditioning import outline_conditioning
from longtake.models.numerics import autocast
from longtake.models.text import outline_text
from longtake.planner import encoding, fake_tensors, memory
from longtake.planner.block_weights import blocks_with
from longtake.planner.devices import DeviceBudget
from longtake.planner.fake_tensors import empty_like
from longtake.planner.record import ON_DEVICE, BlockWeights, Options
from longtake.planner.sampling_phase import sampling_phase
from longtake.planner.text_phase import ram_to_read, text_that_fits
from longtake.planner.trace import InferenceTrace, make_fake, trace_inference
from longtake.sampling.sampler import streams_for_sampling


@dataclass(frozen=True, kw_only=True)
class PhaseForecast(InferenceTrace):
    """Predicted memory and time of one phase of a run: encoders, codec, model, or a training step.

    Its seconds are those of one caption, clip or forward pass; for `step`, of all encoding by this
    process in one update; for `sampling`, of all presets on all processes together.
    """

    name: str
    """Name of the phase: `text`, `encode`, `step` (training while encoders work), `model`, `decode`
    or `sampling`."""
    fits: bool | None  # None: no budget
    ram_bytes: int = 0  # host RAM that a process needs to read the weights; 0: little

    def lacks_ram(self, device: DeviceBudget) -> bool:
        """Return whether a process on the device has too little host RAM to read the weights."""
        return device.ram_bytes is not None and self.ram_bytes > device.ram_bytes


def forecast_phases(step: memory.MetaStep, options: Options | None = None) -> list[PhaseForecast]:
    """Forecast memory and time of caching, of training with encoders in the step, and of sampling.

    Clips are of the bucket (clip shape) with the most tokens, one at a time. A part that needs
    tensors' values cannot be traced, and is left out.

    Args:
        step: training step of the recipe.
        options: block options of the training; None: weights as the recipe has them.
    """
    with _evaluated(step) as (mode, components):
        traces = _trace_phases(mode, step, components, options)
    budget = step.device.budget_bytes
    phases = [
        PhaseForecast(
            **vars(trace), name=name, fits=None if budget is None else trace.peak_bytes <= budget
        )
        for name in ("text", "encode", "step", "model", "decode", "sampling")
        if (trace := traces.get(name))
    ]
    if "text" in traces:
        text = replace(phases[0], ram_bytes=ram_to_read(step.recipe, components.text))
        phases[0] = replace(text, fits=False) if text.lacks_ram(step.device) else text
    return phases


@contextmanager
def _evaluated(
    step: memory.MetaStep,
) -> Iterator[tuple[fake_tensors.CachedFakeMode, Components]]:
    """Yield a fake mode and components of a recipe that run without gradients, one process alone.

    The model is that of the step, unless it runs in another way there: with the vocabulary of a
    catalog, or with some of a clip's tokens.
    """
    recipe = step.recipe
    if recipe.text.kind != "words" and recipe.parallel.context == 1:
        own = step.components
        codec = outline_codec(recipe.codec, own.family.frozen.codec)
        text = outline_text(text_section(recipe), own.family)
        with step.tracer.evaluating() as mode:
            yield mode, replace(own, codec=codec, text=text)
        return
    components = outline(recipe)
    memory.quantize_as_given(components, recipe)
    mode = fake_tensors.CachedFakeMode(allow_non_fake_inputs=True)
    with mode:
        make_fake(components.model.eval())
    yield mode, components


def _trace_phases(
    mode: fake_tensors.CachedFakeMode,
    step: memory.MetaStep,
    components: Components,
    options: Options | None,
) -> dict[str, InferenceTrace]:
    """Trace each phase that can be traced, by its name."""
    blocks = components.family.blocks(components.model)
    base = step.base_weights
    held = [base if options is None else options[name].weights for name in step.block_names]
    traces: dict[str, InferenceTrace] = {}
    with mode:
        codec, text, bucket = components.codec, components.text, step.batch.bucket
        encoding.make_encoders_fake(codec, text)
        runs = encoding.encoder_runs(mode, step.recipe, codec, text, bucket, step.device)
        decode = partial(encoding.decoding_that_fits, mode, codec, step.device)
        if codec.modules():
            runs["decode"] = partial(decode, bucket, step.device.budget_bytes)
        for name, run in runs.items():
            with suppress(RuntimeError):
                traces[name] = run()
        if "encode" in traces:
            how = encoding.describe_tile(codec.encode_tile)
            traces["encode"] = replace(traces["encode"], how=how)
        if "text" in traces and step.recipe.data.cache is not None:
            given = (mode, step.recipe, text, bucket, step.device, traces["text"])
            traces["text"] = text_that_fits(*given)
    with suppress(RuntimeError):
        traces["model"] = _model_alone(mode, step, components, held)
    with blocks_with(held, blocks, mode) as streamed, mode:
        weight_bytes = trace_inference(
            mode, [components.model], lambda: None, step.device, streamed
        ).weight_bytes
        with suppress(RuntimeError):
            between = sampling_phase(mode, step, components, decode, weight_bytes, streamed)
            if between is not None:
                traces["sampling"] = between
    if step.recipe.data.cache is None and (during := _encoding_in_step(step, traces, weight_bytes)):
        traces["step"] = during
    return traces


def _model_alone(
    mode: fake_tensors.CachedFakeMode,
    step: memory.MetaStep,
    components: Components,
    held: Sequence[BlockWeights],
) -> InferenceTrace:
    """Trace the model's forward pass in a process that only samples videos.

    Blocks are streamed only if the model does not fit otherwise. Quantised weights are as in
    training.
    """
    blocks, budget = components.family.blocks(components.model), step.device.budget_bytes
    kinds: list[BlockWeights] = [ON_DEVICE.get(each, each) for each in held]

    def denoise() -> None:
        # One forward pass over one video, as sampling in two passes does.
        bucket = step.batch.bucket
        latents = torch.empty(1, *latent_shape(components.codec, bucket))
        audio = audio_shape(step.recipe, components.codec.audio, bucket)
        conditioning = empty_like(outline_conditioning(components, step.recipe, bucket))
        # bf16 weights compute in bf16 without autocast.
        precision = "fp32" if step.recipe.model.dtype == "bf16" else step.precision
        with autocast(precision, torch.device("cpu")):
            if audio is None:
                components.predict_velocity(latents, torch.empty(1), conditioning)
            else:
                noisy = latents, torch.empty(1, *audio)
                components.predict_streams(*noisy, torch.empty(1), conditioning)

    def trace(place: BlockWeights) -> InferenceTrace:
        with (
            blocks_with(kinds, blocks, mode),
            blocks_with([place] * len(blocks), blocks, mode) as streamed,
            mode,
        ):
            return trace_inference(mode, [components.model], denoise, step.device, streamed)

    whole = trace("keep")
    may_stream = step.device.target == "cuda" and streams_for_sampling(step.recipe)
    if budget is None or whole.peak_bytes <= budget or not may_stream:
        return whole
    return replace(trace("stream"), how="weights streamed")


def _encoding_in_step(
    step: memory.MetaStep, traces: Mapping[str, InferenceTrace], weight_bytes: int
) -> InferenceTrace | None:
    """Add up memory and time of a training step while codec or text encoder works in it.

    None if neither works in a step.
    """
    encoders = [traces[name] for name in ("text", "encode") if name in traces]
    if not encoders:
        return None
    there = memory.beside_encoding(step, memory.static_memory(step, weight_bytes=weight_bytes))
    more = max(work.activation_bytes for work in encoders)
    # Ranks that share the tokens of a clip also share out the clips that are encoded.
    mine = -(-step.batch.micro_batch_size // step.recipe.parallel.context)
    num_clips = mine * step.batch.num_micro_batches
    return InferenceTrace(there, there + more, num_clips * sum(work.seconds for work in encoders))
