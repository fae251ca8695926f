"""Memory of encoders: in tiles that fit, and one micro-batch ahead of the model."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.build import TINY_WAN, not_none

from longtake import config
from longtake.config import Bucket, CodecSection, Recipe
from longtake.models.base import family
from longtake.models.codec import build_codec, outline_codec
from longtake.models.components import text_section
from longtake.models.text import outline_text
from longtake.planner.devices import CPU, DEVICES, DeviceBudget
from longtake.planner.encoding import (
    TILES,
    CacheForecast,
    CacheRates,
    TileChoice,
    cache_forecast,
    cache_rates,
    choose_tile,
    clip_trace,
    encode_clip,
    make_encoders_fake,
)
from longtake.planner.fake_tensors import CachedFakeMode
from longtake.planner.forecast import Forecast, encoding_ahead, forecast
from longtake.planner.memory import outline_step
from longtake.planner.phases import PhaseForecast, forecast_phases
from longtake.planner.profiler import measured
from longtake.planner.trace import InferenceTrace

_WAN = (*TINY_WAN, "data.buckets=[{num_frames=13, height=64, width=64}]")


def _known(recipe: Recipe, memory_bytes: int) -> Forecast:
    return forecast(recipe, replace(CPU, target="cuda", memory_bytes=memory_bytes))


@pytest.mark.usefixtures("few_words")
def test_encoders_work_ahead_where_there_is_room(small_recipe: Callable[..., Recipe]) -> None:
    """`auto` recomputes nothing for it; for `true` the plan makes room."""
    found = {mode: small_recipe(*_WAN, f"training.encode_ahead={mode}") for mode in
             ("auto", "true", "false")}  # fmt: skip
    ample = _known(found["auto"], 2**30)
    ahead = not_none(encoding_ahead(ample.step, ample.best_policy))
    assert ahead.is_chosen
    num_bytes, best = not_none(ahead.num_bytes), not_none(ample.best_policy)
    (working,) = (
        each.peak_bytes - each.weight_bytes
        for each in forecast_phases(ample.step)
        if each.name == "encode"
    )
    batch = ample.step.batch.micro_batch_size
    assert num_bytes > working + batch * 3 * 13 * 64 * 64  # latents and embeddings, too

    tight = best.step_peak_bytes + num_bytes - 1
    short = _known(found["auto"], tight)
    assert short.best_policy == ample.best_policy
    in_line = encoding_ahead(short.step, short.best_policy)
    assert in_line == replace(ahead, is_chosen=False)

    wanted = _known(found["true"], tight)
    assert encoding_ahead(wanted.step, wanted.best_policy) == ahead
    assert wanted.static.resident == short.static.resident + num_bytes
    assert not_none(wanted.best_policy).step_peak_bytes <= tight
    options = not_none(wanted.best).options.values()
    assert any(each.activations != "keep" for each in options)

    off = outline_step(found["false"], ample.device)
    assert encoding_ahead(off, ample.best_policy) is None
    on_cpu = outline_step(found["true"], CPU)
    assert encoding_ahead(on_cpu, None) is None
    assert on_cpu.encoding_bytes == 0


_GIB = 2**30
_H100 = DEVICES["h100"]
_HUNYUAN = "hunyuan_video15", Bucket(num_frames=121, height=480, width=848)
_WAN_480 = "wan", Bucket(num_frames=81, height=480, width=832)
_WAN_720 = "wan", Bucket(num_frames=81, height=720, width=1280)


def _traced(
    name: str, bucket: Bucket, tile: int, device: DeviceBudget = _H100, **codec: Any
) -> InferenceTrace:
    section = CodecSection(kind="autoencoder", encode_tile=tile, **codec)
    outlined = outline_codec(section, family(name).frozen.codec)
    mode = CachedFakeMode(allow_non_fake_inputs=True)
    with mode:
        make_encoders_fake(outlined, SimpleNamespace(modules=list))
        return clip_trace(mode, outlined, bucket, encode_clip, device)


@pytest.mark.parametrize(
    ("of", "tile", "gib"),
    [(_HUNYUAN, TILES[0], 15.0), (_HUNYUAN, 512, 12.0), (_WAN_480, 256, 2.6), (_WAN_720, 512, 5.2)],
)
def test_released_autoencoders_encode_in_little_memory(
    of: tuple[str, Bucket], tile: int, gib: float
) -> None:
    """In fp32, weights included; as a whole these clips take 146, 6 and 14 GiB."""
    assert _traced(*of, tile).peak_bytes <= gib * _GIB


def _recipe(name: str, bucket: Bucket, *changes: str) -> Recipe:
    values = {
        "out": "run",
        "data": {"catalog": "c", "buckets": [bucket], "cache": "cache", "windows": 1},
        "model": {"family": name},
        "codec": {"kind": "autoencoder"},
        "text": {"kind": "transformers"},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    return config.changed(Recipe.model_validate(values), changes)


def test_the_largest_tile_that_fits_is_chosen() -> None:
    """None where a clip fits as a whole, or where memory has no limit; else one that only fits."""
    short = "wan", Bucket(num_frames=5, height=720, width=1280)  # memory is that of a chunk
    recipe = _recipe(*short)

    def chosen(memory_bytes: int | None, beside: int = 0, recipe: Recipe = recipe) -> int:
        found = choose_tile(recipe, replace(_H100, memory_bytes=memory_bytes), beside)
        assert found.bucket is None
        return found.pixels

    peaks = {tile: _traced(*short, tile) for tile in (0, 1024, 512)}
    assert (chosen(None), chosen(peaks[0].peak_bytes)) == (0, 0)
    assert (chosen(peaks[512].peak_bytes), chosen(peaks[1024].peak_bytes - 1)) == (512, 512)
    beside = 30 * _GIB  # a model, which leaves as little
    uncached = recipe.data.model_copy(update={"cache": None, "windows": None})
    in_line = recipe.model_copy(update={"data": uncached})
    assert chosen(peaks[512].activation_bytes + beside, beside, in_line) == 512
    tight = replace(_H100, memory_bytes=_GIB // 2)
    assert choose_tile(recipe.with_encode_tile(64), tight) == TileChoice(64)
    ahead = config.changed(in_line, ["training.encode_ahead=true"])  # a quarter of the memory
    assert chosen(4 * peaks[512].activation_bytes, 0, ahead) == 512


def test_encoders_of_pictures_are_beside_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a cache is filled; layer by layer where the memory is too little for them whole."""
    short = "wan", Bucket(num_frames=5, height=720, width=1280)
    recipe, whole = _recipe(*short), _traced(*short, 0)
    text = outline_text(text_section(recipe), family("wan")).modules()
    num_bytes = sum(each.nbytes for module in text for each in module.parameters())
    enough = replace(_H100, memory_bytes=whole.peak_bytes + num_bytes + 2**20, reserve=0.0)
    less = replace(enough, memory_bytes=whole.peak_bytes + num_bytes - 2**20)
    assert choose_tile(recipe, less) == TileChoice(0)  # captions are encoded before
    monkeypatch.setattr("longtake.planner.encoding.text_reads_pictures", lambda _: True)
    assert choose_tile(recipe, enough) == TileChoice(0)
    assert choose_tile(recipe, less).pixels > 0
    monkeypatch.setattr("longtake.planner.encoding.encodes_by_layer", lambda *_: True)
    assert choose_tile(recipe, less) == TileChoice(0)


def test_a_tile_fits_every_shape() -> None:
    """Sides are divided evenly, so that the smaller picture may have the larger tiles."""
    square, wide = (Bucket(num_frames=5, height=h, width=w) for h, w in ((1024, 1024), (704, 1472)))
    both = _recipe("wan", square, f"data.buckets=[{square.toml()}, {wide.toml()}]")
    of_wide, of_square = (_traced("wan", shape, 768).peak_bytes for shape in (wide, square))
    assert of_wide > of_square + _GIB
    device = replace(_H100, memory_bytes=(of_wide + of_square) // 2)
    assert choose_tile(_recipe("wan", square), device) == TileChoice(768)
    assert choose_tile(both, device) == TileChoice(512)


def test_where_no_tile_fits_it_is_the_one_that_takes_the_least() -> None:
    """A smaller one may take more, for the pixels that it reads around it."""
    short = "hunyuan_video15", Bucket(num_frames=9, height=480, width=480)
    least = min((_traced(*short, tile).peak_bytes, -tile) for tile in (384, 256, 192))
    found = choose_tile(_recipe(*short), replace(_H100, memory_bytes=_GIB))
    assert found == TileChoice(-least[1], short[1], least[0])
    (sentence,) = found.notes()
    assert "Clips of 9 frames of 480x480 cannot be encoded in this memory even in tiles of 384" in (
        sentence
    )
    assert list(TileChoice(512).notes()) == [
        "Clips are encoded in tiles of 512 pixels: there is no memory for whole ones."
    ]
    assert not list(TileChoice(0).notes())


@pytest.mark.parametrize("name", ["wan", "hunyuan_video15"])
def test_tiles_take_the_memory_that_is_predicted(name: str) -> None:
    """Two blocks of the real width, on the CPU's allocator."""
    sizes: dict[str, dict[str, Any]] = {
        "wan": {"dim_mult": [1, 2], "temperal_downsample": [False], "num_res_blocks": 1},
        "hunyuan_video15": {
            "block_out_channels": (128, 256),
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "temporal_compression_ratio": 1,
        },
    }
    bucket = Bucket(num_frames=5, height=64, width=96)
    section = CodecSection(kind="autoencoder", encode_tile=32, config=sizes[name])
    expected = _traced(name, bucket, 32, config=sizes[name])
    codec = build_codec(section, family(name).frozen.codec)
    video = torch.zeros(1, 3, 5, 64, 96, dtype=torch.uint8)
    with measured(torch.device("cpu")) as memory:
        codec.encode(video)
    predicted = expected.activation_bytes - video.nbytes
    assert memory.peak_bytes == pytest.approx(predicted, rel=1e-3)


def test_a_cache_holds_further_inputs_of_each_window() -> None:
    """And so captions that are encoded with pictures, each with and without its words."""
    bucket = Bucket(num_frames=5, height=64, width=64)
    plain = _recipe("wan", bucket, "text.kind=words")
    pose = 'data.conditioning.pose={kind="numbers", path="{stem}.npy", width=7, per_frame=true}'
    posed = config.changed(plain, [pose])
    codec = outline_codec(plain.codec, family("wan").frozen.codec)
    text = outline_text(plain.text, family("wan"))
    parts: Any = SimpleNamespace(family=family("wan"), codec=codec, text=text)
    seconds = {"text": 0.5, "encode": 2.0}
    of_plain, of_posed = (
        not_none(cache_rates(recipe, parts, bucket, seconds)) for recipe in (plain, posed)
    )
    latents = 16 * 2 * 8 * 8 * 4
    assert (of_plain.window_bytes, of_posed.window_bytes) == (latents, latents + 5 * 7 * 4)
    assert of_posed == replace(of_plain, window_bytes=of_posed.window_bytes)
    assert (of_plain.window_seconds, of_plain.caption_seconds) == (2.0, 0.5)

    parts.family = SimpleNamespace(
        text=SimpleNamespace(seen_pictures=dict), inputs=parts.family.inputs
    )
    seen = not_none(cache_rates(posed, parts, bucket, seconds))
    assert seen == replace(
        of_posed,
        window_seconds=2.0 + 2 * 0.5,
        window_bytes=of_posed.window_bytes + 2 * of_posed.caption_bytes,
        caption_seconds=0.0,
        caption_bytes=0,
    )


def test_a_cache_grows_with_clips_windows_pixels_and_captions() -> None:
    recipe = _recipe(*_WAN_480, "data.windows=3", "data.flip=0.5")
    rates = CacheRates(81 * 480 * 832, 2.0, 1000, 0.5, 100)
    whole, half = _WAN_480[1], Bucket(num_frames=81, height=240, width=832)
    found = cache_forecast(rates, {whole: 10, half: 4}, 3, recipe.data, num_ranks=2)
    assert found == CacheForecast(
        num_windows=6 * 14,
        num_clips=14,
        num_captions=3,
        seconds=(6 * 12 * 2.0 + 3 * 0.5) / 2,
        num_bytes=6 * 12 * 1000 + 3 * 100,
    )


@pytest.mark.usefixtures("few_words")
def test_a_video_without_room_is_decoded_in_tiles(small_recipe: Callable[..., Recipe]) -> None:
    """As a sampler does it; what it then takes is less."""
    bucket = "data.buckets=[{num_frames=5, height=512, width=512}]"
    recipe = small_recipe(*TINY_WAN, bucket, "data.cache=cache", "data.windows=1")

    def decoding(memory_bytes: int | None) -> PhaseForecast:
        step = outline_step(recipe, replace(CPU, target="cuda", memory_bytes=memory_bytes))
        return next(each for each in forecast_phases(step) if each.name == "decode")

    whole = decoding(None)
    assert decoding(whole.peak_bytes) == replace(whole, fits=True)
    tiled = decoding(whole.peak_bytes - 1)
    assert (tiled.how, tiled.fits) == ("in tiles", True)
    assert tiled.peak_bytes < whole.peak_bytes
