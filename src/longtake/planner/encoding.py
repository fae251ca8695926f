"""Predicts memory and time of the codec and text encoders, alone and while the model trains."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from longtake.config import Bucket, Recipe
from longtake.models.base import Family, family, latent_shape
from longtake.models.codec import Codec, outline_codec
from longtake.models.components import Components, text_section
from longtake.models.conditioning import outline_conditioning, picture_sizes
from longtake.models.text import TextEncoder, outline_text
from longtake.planner.batch_sizes import StageBatch
from longtake.planner.devices import DeviceBudget
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.trace import InferenceTrace, make_fake, trace_inference

_FEW_FRAMES, _CHUNK = 9, 4
"""Number of frames of a short clip that is traced through the codec, and of frames added for a
longer one: autoencoders of videos work in chunks of 4 or 8 frames, so that memory and time grow
linearly from there."""


def make_encoders_fake(codec: Codec, text: TextEncoder) -> None:
    """Turn the weights of codec and text encoders into fake tensors, so that they can be traced.

    It is called inside a fake mode.
    """
    for module in (*text.modules(), *codec.modules()):
        make_fake(module.eval())


def encoder_runs(
    mode: CachedFakeMode,
    recipe: Recipe,
    codec: Codec,
    text: TextEncoder,
    bucket: Bucket,
    device: DeviceBudget,
) -> dict[str, Callable[[], InferenceTrace]]:
    """Return functions that trace the memory and time of a recipe's encoders: `text` and `encode`.

    The weights of codec and text encoder must be fake tensors. A text encoder encodes a caption of
    the greatest length.
    """
    chosen = family(recipe.model.family)
    runs: dict[str, Callable[[], InferenceTrace]] = {}
    if text.modules():
        run = partial(text.run_longest, picture_sizes(chosen, recipe, bucket))
        runs["text"] = partial(trace_inference, mode, text.modules(), run, device)
    if codec.modules():
        largest = encoded_bucket(chosen, recipe, bucket)
        runs["encode"] = partial(clip_trace, mode, codec, largest, encode_clip, device)
    return runs


def encoded_bucket(chosen: Family, recipe: Recipe, bucket: Bucket) -> Bucket:
    """Return the larger shape for the codec to encode: the clip's, or that of a reference image."""
    height, width = chosen.inputs.size(bucket)
    taken = chosen.inputs.names(recipe.model)[1]
    has_references = any(name in taken for name in recipe.model_inputs())
    if not has_references or height * width <= bucket.num_pixels:
        return bucket
    return bucket.model_copy(update={"num_frames": 1, "height": height, "width": width})


def clip_trace(
    mode: CachedFakeMode,
    codec: Codec,
    bucket: Bucket,
    work: Callable[[Codec, Bucket], Tensor],
    device: DeviceBudget,
) -> InferenceTrace:
    """Trace the codec in `encode_clip` or `decode_video`; long clips are extrapolated."""
    modules: Sequence[nn.Module] = codec.modules()

    def of(num_frames: int) -> InferenceTrace:
        part = bucket.model_copy(update={"num_frames": num_frames})
        return trace_inference(mode, modules, lambda: work(codec, part), device)

    # At least one chunk more, so that the difference is that of whole chunks.
    more_frames = _FEW_FRAMES + max(_CHUNK, codec.chunk)
    if bucket.num_frames <= more_frames:
        return of(bucket.num_frames)
    few, more = of(_FEW_FRAMES), of(more_frames)
    times = (bucket.num_frames - more_frames) / (more_frames - _FEW_FRAMES)
    return InferenceTrace(
        more.weight_bytes,
        more.peak_bytes + round(times * (more.peak_bytes - few.peak_bytes)),
        more.seconds + times * (more.seconds - few.seconds),
    )


def encode_clip(codec: Codec, bucket: Bucket) -> Tensor:
    shape = (1, 3, bucket.num_frames, bucket.height, bucket.width)
    return codec.encode(torch.empty(shape, dtype=torch.uint8))


def decode_video(codec: Codec, bucket: Bucket) -> Tensor:
    return codec.decode(torch.empty(1, *latent_shape(codec, bucket)))


def ahead_bytes(
    recipe: Recipe, components: Components, batch: StageBatch, device: DeviceBudget
) -> int | None:
    """Return the bytes that a step takes in addition if the next micro-batch is encoded meanwhile.

    They are the micro-batch's pixels and results, and the activations of an encoder for one clip or
    caption, as these are encoded one by one. None if an encoder needs tensors' values, and so
    cannot be traced.
    """
    bucket, chosen = batch.bucket, family(recipe.model.family)
    codec = outline_codec(recipe.codec, chosen.frozen.codec)  # those of `components` stay real
    text = outline_text(text_section(recipe), chosen)
    mode = CachedFakeMode(allow_non_fake_inputs=True)
    with mode:
        make_encoders_fake(codec, text)
        runs = encoder_runs(mode, recipe, codec, text, bucket, device)
        try:
            working = max((run().activation_bytes for run in runs.values()), default=0)
        except RuntimeError:
            return None
    # References that the codec encodes come as pixels, too.
    num_clips = 1 + sum(each.is_encoded for each in recipe.model_inputs().values())
    results = outline_conditioning(components, recipe, bucket)
    latents = torch.empty(latent_shape(components.codec, bucket), device="meta")
    size = (
        num_clips * 3 * bucket.num_pixels
        + sum(each.nbytes for each in results.values())
        + 2 * latents.nbytes
    )
    return working + batch.micro_batch_size * size
