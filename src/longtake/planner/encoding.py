"""Predicts memory and time of the codec and text encoders, alone and while the model trains."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from longtake.config import Bucket, DataSection, Recipe
from longtake.formatting import format_size
from longtake.models.audio import audio_format, audio_shape
from longtake.models.base import Family, family_of, latent_shape
from longtake.models.codec import Codec, outline_codec
from longtake.models.components import Components, text_section
from longtake.models.conditioning import (
    outline_conditioning,
    outline_inputs,
    picture_sizes,
    text_reads_pictures,
)
from longtake.models.streamed import layer_lists, least_bytes
from longtake.models.text import TextEncoder, encodes_by_layer, outline_text
from longtake.planner.batch_sizes import StageBatch
from longtake.planner.block_weights import module_bytes
from longtake.planner.devices import DeviceBudget
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.trace import InferenceTrace, make_fake, trace_inference
from longtake.planner.words import cannot_encode

_FEW_FRAMES, _CHUNK = 9, 4
"""Number of frames of a short clip that is traced through the codec, and of frames added for a
longer one: autoencoders of videos work in chunks of 4 or 8 frames, so that memory and time grow
linearly from there."""
TILES = (4096, 1024, 768, 512, 384, 256, 192, 128)
"""Pixels of the tiles from which the plan chooses, largest first. The first is a whole clip of any
size that is trained here: an autoencoder then saves memory by its chunks of frames alone. Smaller
tiles than the last mostly compute what they read around them, for little memory less."""
_SHARE_AHEAD = 0.25
"""Share of a plan's memory that encoding may take where `training.encode_ahead` = true has the plan
make room for it; the more it takes, the more the model recomputes."""


def make_encoders_fake(codec: Codec, text: TextEncoder) -> None:
    """Turn the weights of codec and text encoders into fake tensors, so that they can be traced.

    It is called inside a fake mode.
    """
    for module in (*text.modules(), *codec.modules()):
        _make_encoder_fake(module)


def _make_encoder_fake(module: nn.Module) -> None:
    make_fake(module.eval())
    for part in module.modules():
        if hasattr(part, "prepare_causal_attention_mask"):
            part.prepare_causal_attention_mask = _mask_without_values  # type: ignore[assignment]


def _mask_without_values(
    num_frames: int, per_frame: int, dtype: torch.dtype, device: torch.device, batch_size: int = 1
) -> Tensor:
    """Return the mask of HunyuanVideo 1.5's autoencoder, which diffusers fills row by row."""
    length = num_frames * per_frame
    mask = torch.empty(length, length, dtype=dtype, device=device)
    return mask.expand(batch_size, -1, -1)


@dataclass(frozen=True)
class TileChoice:
    """The tiles in which clips are encoded, and what is short where even they take too much."""

    pixels: int  # 0: clips as a whole
    bucket: Bucket | None = None  # shape for which the memory is too little; None: all fit
    needed_bytes: int = 0  # for this shape

    def notes(self) -> Iterator[str]:
        """Yield a sentence where the memory is too little to encode whole clips."""
        how = describe_tile(self.pixels)
        if self.bucket is not None:
            yield cannot_encode(str(self.bucket), format_size(self.needed_bytes), how)
        elif how:
            yield f"Clips are encoded {how}: there is no memory for whole ones."


def choose_tile(recipe: Recipe, device: DeviceBudget, beside: int = 0) -> TileChoice:
    """Choose the tiles for `codec.encode_tile` = "auto"; a number in the recipe is taken as it is.

    Clips are encoded as a whole if all shapes fit the device's memory so, or if the memory has no
    limit; else in the largest of `TILES` in which all fit. If none does, it is the one that takes
    the least. While a cache is filled, the codec's weights are beside the activations. For
    `training.encode_ahead` = true the plan makes room, for which it needs to know first what
    encoding takes: a fixed share of the memory.

    Args:
        recipe: any recipe.
        device: device on which clips are encoded.
        beside: bytes that are taken besides the activations if encoders work in line with training
            steps: see `memory.beside_encoding`.
    """
    if recipe.codec.encode_tile != "auto":
        return TileChoice(recipe.codec.encode_tile)
    budget = device.budget_bytes
    if recipe.codec.kind == "pixels" or budget is None:
        return TileChoice(0)
    if recipe.training.encode_ahead is True and device.target == "cuda":
        beside = round((1 - _SHARE_AHEAD) * budget)
    return _largest_that_fits(recipe, device, budget, beside)


def describe_tile(tile: int) -> str:
    """Say how clips are encoded in tiles of so many pixels; "" for clips as a whole."""
    if not tile:
        return ""
    return "in chunks of frames" if tile >= TILES[0] else f"in tiles of {tile} pixels"


def _largest_that_fits(
    recipe: Recipe, device: DeviceBudget, budget: int, beside: int
) -> TileChoice:
    chosen = family_of(recipe.model)
    codec = outline_codec(recipe.codec, chosen.frozen.codec)
    if not codec.can_tile:
        return TileChoice(0)
    shapes = _encoded_shapes(chosen, recipe)
    widest = max(max(shape.height, shape.width) for shape in shapes)
    if fills_cache := not recipe.encodes_in_steps():
        beside = _beside_codec(recipe, codec, budget)
    mode = CachedFakeMode(allow_non_fake_inputs=True)
    failed: list[TileChoice] = []
    with mode:
        for module in codec.modules():
            _make_encoder_fake(module)
        # One after another: a smaller tile may take more memory, if its neighbours' pixels that it
        # reads are more.
        for tile in (0, TILES[0], *(tile for tile in TILES[1:] if tile < widest)):
            codec.encode_tile = tile
            for shape in list(shapes):
                trace = clip_trace(mode, codec, shape, encode_clip, device)
                taken = trace.peak_bytes if fills_cache else trace.activation_bytes
                if beside + taken > budget:
                    failed.append(TileChoice(tile, shape, beside + taken))
                    # First for the next tile, since each trace takes up to seconds.
                    shapes.remove(shape)
                    shapes.insert(0, shape)
                    break
            else:
                return TileChoice(tile)
    return min(failed, key=lambda each: each.needed_bytes)


def _beside_codec(recipe: Recipe, codec: Codec, budget: int) -> int:
    """Return the bytes of text encoders that read pictures, and so are there for a cache's clips.

    `place_text` places them beside the codec, whole or layer by layer.
    """
    if not text_reads_pictures(recipe):
        return 0
    modules = outline_text(text_section(recipe), family_of(recipe.model)).modules()
    num_bytes = sum(map(module_bytes, modules))
    if encodes_by_layer(num_bytes, budget - sum(map(module_bytes, codec.modules()))):
        return sum(least_bytes(each, *layer_lists(each)) for each in modules)
    return num_bytes


def _encoded_shapes(chosen: Family, recipe: Recipe) -> list[Bucket]:
    """List the shapes that are encoded, those with the largest pictures first.

    All count: rows and columns are divided into tiles of equal size, so that the tiles of a smaller
    picture may be the larger ones.
    """
    given = (encoded_bucket(chosen, recipe, shape) for shape in recipe.data.shapes())
    shapes = {(each.height * each.width, each.num_frames, each.width): each for each in given}
    return [shapes[size] for size in sorted(shapes, reverse=True)]


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
    chosen = family_of(recipe.model)
    runs: dict[str, Callable[[], InferenceTrace]] = {}
    if text.modules():
        run = partial(text.run_longest, picture_sizes(chosen, recipe, bucket))
        runs["text"] = partial(trace_inference, mode, text.modules(), run, device)
    if codec.modules():
        largest = encoded_bucket(chosen, recipe, bucket)
        runs["encode"] = partial(_encode_both, mode, recipe, codec, largest, bucket, device)
    return runs


def _encode_both(
    mode: CachedFakeMode,
    recipe: Recipe,
    codec: Codec,
    largest: Bucket,
    bucket: Bucket,
    device: DeviceBudget,
) -> InferenceTrace:
    """Trace the encoding of a clip of the largest shape, and then of the sound of a bucket."""
    clip, audio = clip_trace(mode, codec, largest, encode_clip, device), codec.audio
    if audio is None or (wanted := audio_format(recipe, audio)) is None:
        return clip
    size = 1, wanted.channels, wanted.num_samples(bucket.num_frames)
    modules: Sequence[nn.Module] = codec.modules()
    sound = trace_inference(mode, modules, lambda: audio.encode(torch.empty(size)), device)
    peak = max(clip.peak_bytes, sound.peak_bytes)
    return replace(clip, peak_bytes=peak, seconds=clip.seconds + sound.seconds)


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

    # A number that the codec takes, of at least as many.
    few_frames = codec.shortest + -(-(_FEW_FRAMES - codec.shortest) // codec.chunk) * codec.chunk
    # At least one chunk more, so that the difference is that of whole chunks.
    more_frames = few_frames + max(_CHUNK, codec.chunk)
    if bucket.num_frames <= more_frames:
        return of(bucket.num_frames)
    few, more = of(few_frames), of(more_frames)
    times = (bucket.num_frames - more_frames) / (more_frames - few_frames)
    return InferenceTrace(
        more.weight_bytes,
        more.peak_bytes + round(times * (more.peak_bytes - few.peak_bytes)),
        more.seconds + times * (more.seconds - few.seconds),
    )


def encode_clip(codec: Codec, bucket: Bucket) -> Tensor:
    shape = (1, 3, bucket.num_frames, bucket.height, bucket.width)
    return codec.encode(torch.empty(shape, dtype=torch.uint8))


def decode_video(codec: Codec, bucket: Bucket, *, tiles: bool = False) -> Tensor:
    return codec.decode(torch.empty(1, *latent_shape(codec, bucket)), tiles=tiles)


def decoding_that_fits(
    mode: CachedFakeMode, codec: Codec, device: DeviceBudget, bucket: Bucket, room: int | None
) -> InferenceTrace:
    """Trace the decoding of a video as a sampler does it: in tiles if it does not fit as a whole.

    `room` is the greatest peak in bytes, with the codec's weights; None: no limit.
    """
    whole = clip_trace(mode, codec, bucket, decode_video, device)
    if room is None or whole.peak_bytes <= room:
        return whole
    tiled = clip_trace(mode, codec, bucket, partial(decode_video, tiles=True), device)
    # Not every codec has tiles.
    return replace(tiled, how="in tiles") if tiled.peak_bytes < whole.peak_bytes else whole


@dataclass(frozen=True)
class CacheRates:
    """Predicted seconds and bytes of what a cache holds of one clip of the largest shape."""

    num_pixels: int  # of the shape, with which both grow
    window_seconds: float  # of one window, its further inputs, and texts encoded with its pictures
    window_bytes: int
    caption_seconds: float
    caption_bytes: int  # of a caption of the greatest length, if it is encoded alone


@dataclass(frozen=True)
class CacheForecast:
    """Predicted time and size of a recipe's cache, for the clips of its catalogs."""

    num_windows: int  # at most: shorter clips have fewer
    num_clips: int
    num_captions: int  # distinct ones that are encoded alone
    seconds: float  # of all processes together
    num_bytes: int


def cache_rates(
    recipe: Recipe, components: Components, bucket: Bucket, seconds: Mapping[str, float]
) -> CacheRates | None:
    """Predict what a cache holds of a clip; None for a recipe without a cache.

    Args:
        recipe: recipe to train.
        components: its parts on the meta device.
        bucket: largest shape of its clips.
        seconds: predicted seconds of the phases `text` and `encode`, where they are known.
    """
    if recipe.data.cache is None:
        return None
    chosen, in_bf16 = components.family, recipe.data.cache_dtype == "bf16"
    width = 2 if in_bf16 else 4
    # Packs hold numbers in bf16 where that is exact.
    of_text = 2 if recipe.text.kept_in() == "bf16" else width
    inputs = outline_inputs(components, recipe.step_inputs(), bucket)
    texts = components.text.outline(picture_sizes(chosen, recipe, bucket))
    text_bytes = sum(each.numel() * min(of_text, each.itemsize) for each in texts.values())
    num_encoded = 1 + sum(each.is_encoded for each in recipe.step_inputs().values())
    encode, text = seconds.get("encode", 0.0), seconds.get("text", 0.0)
    # With pictures, the caption and the empty one are encoded again for each window.
    num_texts = 2 if chosen.text.seen_pictures(recipe.model_inputs()) else 0
    return CacheRates(
        bucket.num_pixels,
        num_encoded * encode + num_texts * text,
        math.prod(latent_shape(components.codec, bucket)) * width
        + math.prod(audio_shape(recipe, components.codec.audio, bucket) or (0,)) * width
        + sum(each.numel() * min(width, each.itemsize) for each in inputs.values())
        + num_texts * text_bytes,
        0.0 if num_texts else text,
        0 if num_texts else text_bytes,
    )


def cache_forecast(
    rates: CacheRates,
    counts: Mapping[Bucket, int],
    num_captions: int,
    data: DataSection,
    num_ranks: int,
) -> CacheForecast:
    """Predict time and size of a cache with so many clips of each shape, filled by all ranks."""
    per_clip = (data.windows or 1) * (2 if 0 < data.flip < 1 else 1)
    num_clips = sum(counts.values())
    # In clips of the largest shape.
    windows = sum(
        per_clip * count * bucket.num_pixels / rates.num_pixels for bucket, count in counts.items()
    )
    return CacheForecast(
        per_clip * num_clips,
        num_clips,
        num_captions,
        (windows * rates.window_seconds + num_captions * rates.caption_seconds) / num_ranks,
        round(windows * rates.window_bytes) + num_captions * rates.caption_bytes,
    )


def ahead_bytes(
    recipe: Recipe, components: Components, batch: StageBatch, device: DeviceBudget
) -> int | None:
    """Return the bytes that a step takes in addition if the next micro-batch is encoded meanwhile.

    They are the micro-batch's pixels and results, and the activations of an encoder for one clip or
    caption, as these are encoded one by one. None if an encoder needs tensors' values, and so
    cannot be traced.
    """
    if recipe.training.encode_ahead is True:
        recipe = recipe.with_encode_tile(choose_tile(recipe, device).pixels)
    bucket, chosen = batch.bucket, family_of(recipe.model)
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
    num_clips = 1 + sum(each.is_encoded for each in recipe.step_inputs().values())
    results = outline_conditioning(components, recipe, bucket)
    latents = torch.empty(latent_shape(components.codec, bucket), device="meta")
    size = (
        num_clips * 3 * bucket.num_pixels
        + sum(each.nbytes for each in results.values())
        + 2 * latents.nbytes
    )
    return working + batch.micro_batch_size * size
