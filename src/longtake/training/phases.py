"""What encoding, sampling and decoding take of a GPU, where each part works by itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.config import Bucket, Recipe
from longtake.models.build import Components, latent_shape, outline
from longtake.models.numerics import autocast
from longtake.models.objective import outline_conditioning
from longtake.planner.devices import Device
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.trace import InferenceTrace, make_fake, trace_inference
from longtake.training.card import Card
from longtake.training.outlined import OutlinedStep
from longtake.training.resident import fixed_of

_FEW_FRAMES, _MORE_FRAMES = 9, 13
"""Autoencoders of videos work in chunks of 4 frames: what longer clips take grows linearly."""


@dataclass(frozen=True)
class Phase:
    """One part at work, on one process."""

    name: str
    """`text`, `encode`, `step` (training, while encoders work), `model` or `decode`."""
    weight_bytes: int
    peak_bytes: int
    """The most, weights included; without workspaces of convolutions."""
    seconds: float
    """For one caption, clip or forward pass; in `step` for all of this process in one update."""
    fits: bool | None
    """None without a budget."""


def phases_of(step: OutlinedStep, card: Card) -> list[Phase]:
    """Each phase of caching, training with encoders in the step, and sampling.

    Clips are of the bucket with the most tokens, one at a time. A part that looks at values is left
    out: it cannot be traced.
    """
    recipe, budget = step.recipe, card.budget_bytes
    parts = outline(recipe)
    shapes = CachedFakeMode(allow_non_fake_inputs=True)
    found: dict[str, InferenceTrace] = {}
    with shapes:
        for module in (*parts.text.modules(), parts.model, *parts.codec.modules()):
            make_fake(module.eval())
        for name, trace in _traces(shapes, step, parts, card.device):
            try:
                found[name] = trace()
            except RuntimeError:
                continue
    if recipe.data.cache is None and (during := _step(step, found)):
        found["step"] = during
    order = [name for name in ("text", "encode", "step", "model", "decode") if name in found]
    return [
        Phase(
            name,
            found[name].weight_bytes,
            found[name].peak_bytes,
            found[name].seconds,
            None if budget is None else found[name].peak_bytes <= budget,
        )
        for name in order
    ]


def _traces(
    shapes: CachedFakeMode, step: OutlinedStep, parts: Components, device: Device
) -> Iterator[tuple[str, Callable[[], InferenceTrace]]]:
    texts, codecs = parts.text.modules(), parts.codec.modules()
    if texts:
        yield (
            "text",
            lambda: trace_inference(
                shapes, texts, lambda: _encode_caption(parts, step.recipe), device
            ),
        )
    if codecs:
        for name, work in (("encode", _encode_clip), ("decode", _decode_video)):
            yield name, _of_long_clips(shapes, parts, step.bucket, work, device)
    yield (
        "model",
        lambda: trace_inference(shapes, [parts.model], lambda: _denoise(parts, step), device),
    )


def _encode_caption(parts: Components, recipe: Recipe) -> None:
    pooled = recipe.text.pooled
    lengths = [parts.text.max_tokens, *([] if pooled is None else [pooled.max_tokens])]
    for module, length in zip(parts.text.modules(), lengths, strict=True):
        tokens = torch.ones(1, length, dtype=torch.long)
        module(input_ids=tokens, attention_mask=torch.ones_like(tokens))


def _encode_clip(parts: Components, bucket: Bucket) -> Tensor:
    shape = (1, 3, bucket.num_frames, bucket.height, bucket.width)
    return parts.codec.encode(torch.empty(shape, dtype=torch.uint8))


def _decode_video(parts: Components, bucket: Bucket) -> Tensor:
    return parts.codec.decode(torch.empty(1, *latent_shape(parts.codec, bucket)))


def _of_long_clips(
    shapes: CachedFakeMode,
    parts: Components,
    bucket: Bucket,
    work: Callable[[Components, Bucket], Tensor],
    device: Device,
) -> Callable[[], InferenceTrace]:
    """Traces a few frames of a long clip, and goes on in a straight line."""

    def of(num_frames: int) -> InferenceTrace:
        part = bucket.model_copy(update={"num_frames": num_frames})
        return trace_inference(shapes, parts.codec.modules(), lambda: work(parts, part), device)

    def trace() -> InferenceTrace:
        if bucket.num_frames <= _MORE_FRAMES:
            return of(bucket.num_frames)
        few, more = of(_FEW_FRAMES), of(_MORE_FRAMES)
        times = (bucket.num_frames - _MORE_FRAMES) / (_MORE_FRAMES - _FEW_FRAMES)
        return InferenceTrace(
            more.weight_bytes,
            more.peak_bytes + round(times * (more.peak_bytes - few.peak_bytes)),
            more.seconds + times * (more.seconds - few.seconds),
        )

    return trace


def _denoise(parts: Components, step: OutlinedStep) -> Tensor:
    """One forward pass over one video, as sampling in two passes makes it."""
    shape = latent_shape(parts.codec, step.bucket)
    told = {
        name: torch.empty(each.shape, dtype=each.dtype)
        for name, each in outline_conditioning(parts, step.recipe, shape).items()
    }
    precision = "fp32" if step.recipe.model.dtype == "bf16" else step.precision
    with autocast(precision, torch.device("cpu")):
        return parts.predict_velocity(torch.empty(1, *shape), torch.empty(1), told)


def _step(step: OutlinedStep, found: dict[str, InferenceTrace]) -> InferenceTrace | None:
    """A training step at the moment in which codec or text encoder works."""
    encoding = [found[name] for name in ("text", "encode") if name in found]
    if not encoding:
        return None
    fixed = fixed_of(step)
    there = fixed.weights + fixed.resident
    if step.num_micro_batches > 1:
        there += fixed.gradients
    more = max(work.peak_bytes - work.weight_bytes for work in encoding)
    num_clips = step.micro_batch_size * step.num_micro_batches
    return InferenceTrace(there, there + more, num_clips * sum(work.seconds for work in encoding))
