"""A cache is filled before training, which takes from it what it would have encoded."""

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.build import (
    QUIET,
    TINY_WAN,
    Recipes,
    assert_saved_alike,
    cache_entries,
    copy_clips,
    events,
    losses,
    rows,
    saved,
    wait_until,
)
from tests.data.catalogs import make_catalog
from tests.families import release_qwen_image_edit, release_wan
from torch import Tensor, nn

from longtake import config
from longtake.config import Recipe
from longtake.data import cache_fill
from longtake.data.audit import audit
from longtake.data.cache import Cache
from longtake.data.catalog import Catalog
from longtake.data.index import index
from longtake.data.packs import CACHE_KINDS, PackIndex
from longtake.data.tasks import HERE
from longtake.demo.shapes import write_clips
from longtake.errors import DataError, PlanError, RecipeChangedError, RecipeError
from longtake.models.added_module import BlockCall
from longtake.models.base import BlockInputs
from longtake.models.codec import PixelCodec, keep_tile, kept_tile
from longtake.planner.encoding import TileChoice
from longtake.run_dir import RunDirectory
from longtake.sampling.presets import Request
from longtake.sampling.sampler import load_sampler
from longtake.training import latent_cache
from longtake.training.latent_cache import (
    cache_ahead,
    codec_fingerprint,
    inputs_fingerprint,
    make_parts,
    text_fingerprint,
)
from longtake.training.loop import train_steps
from longtake.training.train import train

# Two windows of each clip of eight frames, half of them mirrored.
_VIDEOS = (
    *TINY_WAN,
    "data.windows=2",
    "data.flip=0.5",
    "data.caption_dropout=0.3",
    "training.steps=6",  # an epoch of 16 clips, and the half of another
)
# Enough to do for a process to be killed while it does it.
_MORE = (*_VIDEOS, "data.windows=4")
# FLUX Kontext, in small, on pictures that it is to make of others.
_PICTURES = (
    "data.buckets=[{num_frames=1, height=32, width=48}]",
    'data.conditioning.reference={kind="picture", path="../before/{stem}.png"}',
    'data.conditioning.pose={kind="picture", path="../pose.png"}',
    "data.windows=1",
    "data.flip=0.5",
    "data.caption_dropout=0.3",
    "trainable.kind=full",
    "trainable.modules.pose.module=examples.modules.pose_adapter:PoseAdapter",
    "trainable.modules.pose.options={hidden_size=16}",
    "model.family=flux_kontext",
    "model.config={num_attention_heads=2, attention_head_dim=16, axes_dims_rope=[4, 6, 6], "
    "num_layers=1, num_single_layers=1, guidance_embeds=true}",
    "codec.kind=autoencoder",
    "codec.config={block_out_channels=[4, 4], down_block_types=['DownEncoderBlock2D', "
    "'DownEncoderBlock2D'], up_block_types=['UpDecoderBlock2D', 'UpDecoderBlock2D'], "
    "layers_per_block=1, latent_channels=4, norm_num_groups=2}",
    "text.kind=transformers",
    "text.config={d_model=12, d_kv=6, d_ff=12, num_layers=1, num_heads=2}",
    "text.max_tokens=8",
    "text.pooled={config={hidden_size=10, intermediate_size=10, num_hidden_layers=1, "
    "num_attention_heads=2}, max_tokens=9}",
)


@pytest.fixture(scope="module")
def shapes_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of 16 clips, for every small recipe here: all of them are encoded, by each test."""
    folder = tmp_path_factory.mktemp("few_shapes")
    captions = write_clips(folder / "clips", num_clips=16, seed=0)
    out = folder / "catalog.parquet"
    index([folder / "clips"], captions=captions, out=out, work=HERE)
    return out


@pytest.fixture(scope="module")
def pictures(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of real pictures of several sizes, each with one to begin with, and one pose."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("before", "after"):
        (folder / name).mkdir()
    names = ("astronaut", "cell", "chelsea", "coffee", "grass", "motorcycle_left")
    for name in names:
        with Image.open(material / "images/skimage" / f"{name}.png") as picture:
            small = picture.convert("RGB").resize((picture.width // 4, picture.height // 4))
        small.save(folder / "after" / f"{name}.png")
        size = (50, 40) if name == "coffee" else small.size
        small.rotate(180).resize(size).save(folder / "before" / f"{name}.png")
        (folder / "after" / f"{name}.txt").write_text(f"a picture of {name}")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(folder / "pose.png")
    out = folder / "catalog.parquet"
    index([folder / "after"], captions=None, out=out, work=HERE)
    return out


def _assert_same_run(one: Recipe, other: Recipe) -> None:
    """Losses, all that is saved, the ledger and what was rejected are bitwise equal."""
    keys = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    assert rows(one, *keys) == rows(other, *keys) != []
    run = RunDirectory(one.out)
    step = run.checkpoint_steps()[-1]
    assert_saved_alike(one, other, step)
    files = (RunDirectory(each.out).checkpoint_path(step) / "trainer.json" for each in (one, other))
    trainers = [json.loads(path.read_text()) for path in files]
    assert all(trainer.pop("recipe") for trainer in trainers)  # one names a cache
    assert trainers[0] == trainers[1]
    ledgers = [sorted((recipe.out / "ledger").rglob("*.bin")) for recipe in (one, other)]
    assert [path.read_bytes() for path in ledgers[0]] == [p.read_bytes() for p in ledgers[1]]
    assert _rejected(one) == _rejected(other)


def _rejected(recipe: Recipe) -> list[tuple[int, str, str]]:
    found = events(recipe, "sample_rejected")
    return [(event["step"], event["identity"], event["reason"]) for event in found]


def _packs(recipe: Recipe, kind: str = "[!i]*") -> list[Path]:
    """All packs but the index."""
    assert recipe.data.cache is not None
    return sorted(recipe.data.cache.glob(f"{kind}/[!.]*.safetensors"))


def _entries(recipe: Recipe, kind: str = "") -> dict[tuple[str, str], bytes]:
    assert recipe.data.cache is not None
    found = cache_entries(recipe.data.cache)
    return {each: entry for each, entry in found.items() if kind in ("", each[0])}


def _cache_of(tmp_path: Path) -> str:
    return f"data.cache={tmp_path / 'cache'}"


def test_videos_train_from_a_cache_as_from_pixels(
    small_recipe: Recipes, shapes_catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, mirrored or not, with captions dropped, bitwise; damaged entries are made again.

    Filled ahead, a cache needs neither clips nor encoders.
    """
    catalog = copy_clips(shapes_catalog, tmp_path / "shapes")
    changes = (
        *_VIDEOS, f"data.catalog={catalog}", "training.global_batch_size=6",
        "training.micro_batch_size=3", "training.precision=bf16", "model.dtype=bf16",
    )  # fmt: skip
    plain = small_recipe.trained(*changes, name="plain")
    cached = small_recipe(*changes, _cache_of(tmp_path))
    facts = cache_ahead(cached, QUIET)
    latents, prompts = _entries(cached, "latents"), _entries(cached, "prompts")
    assert facts["latents"] == {"present": 0, "computed": len(latents)} == {
        "present": 0, "computed": 16 * 2 * 2,
    }  # fmt: skip
    assert facts["prompts"]["present"] == 0
    assert 1 < len(prompts) <= 17
    assert facts["bytes"] == sum(path.stat().st_size for path in _packs(cached))
    assert (facts["failed"], facts["damaged"]) == ([], [])
    whole, (cut,) = _entries(cached), _packs(cached, "latents")
    os.truncate(cut, cut.stat().st_size // 2)
    again = cache_ahead(cached, QUIET)
    assert again["latents"] == {"present": 0, "computed": 64}
    assert again["prompts"] == {"present": len(prompts), "computed": 0}
    assert [each["path"] for each in again["damaged"]] == [str(cut)]
    assert _entries(cached) == whole
    for clip in (catalog.parent / "clips").glob("*.mp4"):
        clip.unlink()

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is missing")

    monkeypatch.setattr("longtake.training.latent_cache.build_codec", never)
    monkeypatch.setattr("longtake.training.latent_cache.build_text", never)
    train(cached, QUIET)
    _assert_same_run(plain, cached)
    assert audit(RunDirectory(cached.out)).ok


def test_a_cache_has_the_tiles_that_the_run_without_one_chooses(
    small_recipe: Recipes, shapes_catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto`, chosen once: bitwise the same run, and a cache that was filled ahead is used.

    It keeps the choice of who began it.
    """
    monkeypatch.setattr("longtake.planner.encoding._largest_that_fits", lambda *_: TileChoice(8))
    changes = (
        *_VIDEOS, f"data.catalog={shapes_catalog}", "recompute.memory=1GiB", "training.steps=3",
        "optimizer.schedule=constant",
    )  # fmt: skip
    begun = small_recipe.trained(*changes, "training.steps=2", name="plain")
    assert kept_tile(begun.codec, RunDirectory(begun.out).components_path) == 8
    # The run goes on as it began, whatever would be chosen now.
    monkeypatch.setattr("longtake.planner.encoding._largest_that_fits", lambda *_: TileChoice(0))
    plain = small_recipe.trained(*changes, name="plain")
    monkeypatch.setattr("longtake.planner.encoding._largest_that_fits", lambda *_: TileChoice(8))
    cached = small_recipe(*changes, _cache_of(tmp_path), name="cached")
    assert cache_ahead(cached, QUIET)["encode_tile"] == 8
    ahead = _entries(cached)
    # Another device, or more processes.
    monkeypatch.setattr("longtake.planner.encoding._largest_that_fits", lambda *_: TileChoice(0))
    train(cached, QUIET)
    assert _entries(cached) == ahead
    (planned,) = events(cached, "memory_planned")
    assert planned["encode_tile"] == 8
    assert rows(plain, "step", "loss", "grad_norm") == rows(cached, "step", "loss", "grad_norm")
    assert_saved_alike(plain, cached, 3)
    whole = small_recipe(*changes, _cache_of(tmp_path), "codec.encode_tile=0", name="whole")
    assert cache_ahead(whole, QUIET)["latents"]["present"] == 0


def test_a_run_goes_on_with_the_tiles_that_its_recipe_named(
    small_recipe: Recipes, shapes_catalog: Path
) -> None:
    """If the recipe leaves them to `auto` when it is resumed."""
    changes = (*_VIDEOS, f"data.catalog={shapes_catalog}", "training.steps=1")
    named = small_recipe.trained(*changes, "codec.encode_tile=8")
    left = named.codec.model_copy(update={"encode_tile": "auto"})
    assert kept_tile(left, RunDirectory(named.out).components_path) == 8


def test_pictures_and_further_ones_train_from_a_cache_as_from_pixels(
    small_recipe: Recipes, pictures: Path, tmp_path: Path
) -> None:
    """A clip whose reference is damaged is left out, and named both times."""
    folder = tmp_path / "pairs"
    shutil.copytree(pictures.parent, folder)
    catalog = folder / "catalog.parquet"
    index([folder / "after"], captions=None, out=catalog, work=HERE)
    cut = folder / "before/chelsea.png"
    cut.write_bytes(cut.read_bytes()[:500])
    changes = (*_PICTURES, f"data.catalog={catalog}", "training.steps=8")
    plain = small_recipe.trained(*changes, name="plain")
    cached = small_recipe.trained(*changes, _cache_of(tmp_path))
    _assert_same_run(plain, cached)
    reasons = " ".join(reason for _, _, reason in _rejected(cached))
    assert f"after/chelsea.png: its reference, {cut}: not a" in reasons
    assert len(_entries(cached, "latents")) == 6 * 2
    # One pose for all: its cut depends on a clip's size only, and all but mirrored ones are alike.
    assert 5 * 2 < len(_entries(cached, "conditioning")) <= (5 + 6) * 2
    pose = 'data.conditioning.reference={kind="picture", path="../pose.png"}'
    undamaged = (*changes, f"data.catalog={pictures}", "training.steps=3")
    before = small_recipe.trained(*undamaged, name="undamaged")
    other = small_recipe.trained(*undamaged, pose, name="other")
    assert losses(other) != losses(before)


class AddsDepth(nn.Module):
    """Adds to all tokens what it makes of a video's latents."""

    def __init__(
        self, width: int, blocks: Sequence[str], latent_channels: int, num_others: int = 0
    ) -> None:
        super().__init__()
        self.read = nn.Linear(latent_channels + num_others, width)

    def prepare(self, conditioning: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"added": self.read(conditioning["depth_latents"].mean((2, 3, 4)))[:, None]}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        after = call(inputs)
        return replace(after, tokens=after.tokens + inputs.prepared["added"])


class AddsInputs(AddsDepth):
    """Adds to all tokens what it makes of videos, a mask and numbers."""

    def __init__(self, width: int, blocks: Sequence[str], latent_channels: int) -> None:
        super().__init__(width, blocks, latent_channels, num_others=14)

    def prepare(self, conditioning: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert "face" not in "".join(conditioning)  # which is the loss's
        means = [conditioning[name].mean((2, 3, 4)) for name in ("depth_latents", "person")]
        means.append(conditioning["raw"].mean((1, 2, 3, 4))[:, None])
        means.append(conditioning["camera"].mean(1))
        return {"added": self.read(torch.cat(means, 1))[:, None]}


def test_videos_masks_and_numbers_train_from_a_cache_as_from_pixels(
    small_recipe: Recipes, shapes_catalog: Path, tmp_path: Path
) -> None:
    """And the loss inside a mask, which one of all white does not change by a bit."""
    folder, clips = tmp_path / "inputs", sorted(shapes_catalog.parent.glob("clips/*.mp4"))
    folder.mkdir()
    generator = np.random.default_rng(0)
    for clip, other in zip(clips, [*clips[1:], clips[0]], strict=True):
        shutil.copy(other, folder / f"{clip.stem}.mp4")
        np.save(folder / f"{clip.stem}.npy", generator.normal(size=(8, 12)))
        mask = np.full((32, 32), 255, np.uint8)
        Image.fromarray(mask).save(folder / f"{clip.stem}_white.png")
        mask[:, :16] = 0
        Image.fromarray(mask).save(folder / f"{clip.stem}.png")

    def given(name: str, ending: str, keys: str) -> str:
        return f'data.conditioning.{name}={{path="{folder}/{{stem}}{ending}", {keys}}}'

    changes = (
        *_VIDEOS,
        given("depth", ".mp4", 'kind="video"'),
        given("raw", ".mp4", 'kind="video", encode=false'),
        given("person", ".mp4", 'kind="mask"'),
        given("camera", ".npy", 'kind="numbers", width=12, per_frame=true'),
        "trainable.kind=full",
        f"trainable.modules.own.module={__name__}:AddsInputs",
        "training.micro_batch_size=2",
        "training.steps=4",
    )
    half = (*changes, given("face", ".png", 'kind="mask"'), "flow.loss_mask=face")
    plain = small_recipe.trained(*half, name="plain")
    cached = small_recipe.trained(*half, _cache_of(tmp_path))
    _assert_same_run(plain, cached)
    sampler = load_sampler(plain.out, step=4, ema=False, device="cpu")
    bucket, inputs = plain.data.buckets[0], {}
    for number, clip in enumerate(clips[:2]):
        names = {"depth": ".mp4", "raw": ".mp4", "person": ".mp4", "camera": ".npy"}
        files = {name: folder / f"{clip.stem}{ending}" for name, ending in names.items()}
        inputs[number] = Request("a red disk", 0, files)
    settings = plain.sampling.model_copy(update={"num_inference_steps": 2})
    one, other = sampler.sample([inputs[0], inputs[1]], settings, bucket)
    assert (one != other).any()
    mixed = Request("a red disk", 0, {**inputs[0].conditioning, "camera": files["camera"]})
    assert (sampler.sample([mixed], settings, bucket)[0] != one).any()
    with pytest.raises(
        DataError, match="gives depth, but this model takes the inputs depth, raw, person, camera"
    ):
        sampler.sample([Request("", 0, {"depth": files["depth"]})], settings, bucket)
    white = (given("face", "_white.png", 'kind="mask"'), "flow.loss_mask=face")
    masked = small_recipe.trained(*changes, *white, "training.steps=2", name="white")
    unmasked = small_recipe.trained(*changes, "training.steps=2", name="unmasked")
    assert losses(masked) == losses(unmasked) != losses(plain)[:2]


def _released(folder: Path) -> tuple[str, ...]:
    """A recipe's changes for a release of model, autoencoder and text encoder."""
    return (
        *(f"{part}.pretrained={folder}" for part in ("model", "codec", "text")),
        "model.config={}",
        "codec.kind=autoencoder",
        "text.kind=transformers",
        "text.dtype=fp32",
        "data.flip=0.5",
    )


def test_text_that_is_read_with_pictures_trains_from_a_cache_as_from_pixels(
    small_recipe: Recipes, pictures: Path, tmp_path: Path
) -> None:
    """Of each clip, window and prefix; and without a caption, which is dropped for some samples."""
    torch.manual_seed(0)
    release_qwen_image_edit.make_plus(tmp_path / "release")
    changes = (
        f"data.catalog={pictures}",
        "data.buckets=[{num_frames=1, height=32, width=48}]",
        'data.conditioning.reference={kind="picture", path="../before/{stem}.png"}',
        'data.conditioning.reference_2={kind="picture", path="../pose.png"}',
        "data.windows=1",
        "data.caption_dropout=0.5",
        'data.captions.catalog={prefixes=["make", "draw"]}',
        "training.steps=3",
        "training.micro_batch_size=2",
        "model.family=qwen_image_edit_plus",
        "text.max_tokens=16",
        *_released(tmp_path / "release"),
    )
    with release_qwen_image_edit.smaller_references():
        plain = small_recipe.trained(*changes, name="plain")
        cached = small_recipe(*changes, _cache_of(tmp_path))
        shares = [cache_ahead(cached, QUIET, part=(number, 2)) for number in range(2)]
        windows = len(_entries(cached, "latents"))
        # two prefixes, and no caption
        assert sum(each["prompts"]["computed"] for each in shares) == 3 * windows
        assert cache_ahead(cached, QUIET)["prompts"] == {"present": 3 * windows, "computed": 0}
        train(cached, QUIET)
        _assert_same_run(plain, cached)
    before = text_fingerprint(plain, tmp_path)
    settings = tmp_path / "release/processor/preprocessor_config.json"
    settings.write_text(settings.read_text() + "\n")
    assert text_fingerprint(plain, tmp_path) != before


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (release_wan.make_i2v_clip, 32),
        pytest.param(release_wan.make_ti2v, 64, marks=pytest.mark.drill),
    ],
)
def test_given_frames_train_from_a_cache_as_from_pixels(
    small_recipe: Recipes, tmp_path: Path, make: Callable[[Path], None], size: int
) -> None:
    """Wan from the first frame of each window, with a video beside each clip for a module.

    What a family makes of frames itself (masks, latents, CLIP's embeddings) is one entry.
    """
    torch.manual_seed(0)
    make(tmp_path / "release")
    changes = (
        f"data.buckets=[{{num_frames=5, height={size}, width={size}}}]",
        'data.conditioning.first={kind="picture", frame="first"}',
        'data.conditioning.depth={kind="video", path="{stem}.mp4"}',
        f"trainable.modules.own.module={__name__}:AddsDepth",
        "data.windows=2",
        "training.steps=3",
        "model.family=wan",
        "text.max_tokens=32",
        *_released(tmp_path / "release"),
    )
    plain = small_recipe.trained(*changes, name="plain")
    cached = small_recipe(*changes, _cache_of(tmp_path))
    shares = [cache_ahead(cached, QUIET, part=(number, 2)) for number in range(2)]
    windows = len(_entries(cached, "latents"))
    assert [sum(each[kind]["computed"] for each in shares) for kind in CACHE_KINDS[:2]] == (
        [windows, windows]
    )
    assert cache_ahead(cached, QUIET)["conditioning"] == {"present": windows, "computed": 0}
    train(cached, QUIET)
    _assert_same_run(plain, cached)
    found = load_file(_packs(cached, "conditioning")[0])
    names = {name.rpartition(".")[2] for name in found}
    before = inputs_fingerprint(plain, tmp_path)
    config = tmp_path / "release/vae/config.json"
    if make is release_wan.make_i2v_clip:
        config = tmp_path / "release/image_processor/preprocessor_config.json"
    config.write_text(config.read_text() + "\n")
    assert inputs_fingerprint(plain, tmp_path) != before
    embeds = {"first_embeds"} if make is release_wan.make_i2v_clip else set()
    assert names == {"first_latents", "depth_latents", *embeds}


def test_a_run_goes_on_with_a_cache_and_back(small_recipe: Recipes, tmp_path: Path) -> None:
    """Begun without, continued with, ended without: the run that never had one.

    Each clip goes to either of two buckets, each epoch to another.
    """
    shapes = "{num_frames=5, height=32, width=32}, {num_frames=1, height=32, width=32, share=0.5}"
    both = (f"data.buckets=[{shapes}]", "data.stills_from_videos=true")
    changes = (*_VIDEOS, *both, "optimizer.schedule=constant")
    plain = small_recipe.trained(*changes, name="plain")
    for steps, cache in ((2, []), (4, [_cache_of(tmp_path)]), (6, [])):
        train(small_recipe(*changes, *cache, f"training.steps={steps}"), QUIET)
    mixed = small_recipe(*changes)
    assert losses(mixed) == losses(plain)
    weights = (saved(each, 6, "model") for each in (mixed, plain))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_neither_codec_nor_text_encoder_is_in_memory_while_training(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only outlines without values are, also right after they have filled the cache."""
    seen: list[list[str]] = []
    of_other_tests = _frozen_modules()

    def look(*arguments: Any, **named: Any) -> Any:
        there = _frozen_modules()
        mine = [each for each in there if not any(each is other for other in of_other_tests)]
        seen.append([type(each).__name__ for each in mine])
        return original(*arguments, **named)

    original = train_steps
    monkeypatch.setattr("longtake.training.train.train_steps", look)
    changes = (*_VIDEOS, "training.steps=1")
    train(small_recipe(*changes, name="plain"), QUIET)
    train(small_recipe(*changes, _cache_of(tmp_path)), QUIET)
    plain, cached = seen
    assert set(plain) == set(_FROZEN)
    assert cached == []


_FROZEN = ("AutoencoderKLWan", "UMT5EncoderModel")


def _frozen_modules() -> list[nn.Module]:
    """Those alive that have values."""
    gc.collect()
    frozen = [each for each in gc.get_objects() if type(each).__name__ in _FROZEN]
    return [each for each in frozen if not all(part.is_meta for part in each.parameters())]


def test_new_clips_cost_only_themselves(
    small_recipe: Recipes, shapes_catalog: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    captions = {}
    for line in (shapes_catalog.parent / "clips/captions.jsonl").read_text().splitlines():
        captions[json.loads(line)["video"]] = json.loads(line)["caption"]
    names = sorted(captions)
    # Encoders with random weights follow from the captions' words: here a run keeps them.
    recipe = small_recipe(*_VIDEOS, _cache_of(tmp_path), f"data.catalog={tmp_path / 'c.parquet'}")

    def take(some: Sequence[str]) -> None:
        for name in some:
            shutil.copy(shapes_catalog.parent / "clips" / name, folder)
            (folder / name).with_suffix(".txt").write_text(captions[name])
        index([folder], captions=None, out=tmp_path / "c.parquet", work=HERE)

    take(names[:10])
    train(recipe, QUIET)
    before = {path: path.stat().st_mtime_ns for path in _packs(recipe)}
    take(names[10:13])
    more = small_recipe(
        *_VIDEOS,
        _cache_of(tmp_path),
        f"data.catalog={tmp_path / 'c.parquet'}",
        "data.on_change=merge",
        "training.steps=8",
    )
    facts = cache_ahead(more, QUIET)
    assert facts["latents"] == {"present": 40, "computed": 12}
    after = {path: path.stat().st_mtime_ns for path in _packs(recipe)}
    assert {path: after[path] for path in before} == before
    train(more, QUIET)
    assert {path: path.stat().st_mtime_ns for path in _packs(recipe)} == after


def test_the_index_of_a_filled_cache_has_what_others_filled_too(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank saves it for all, so that the next start reads no pack's header."""
    fill = cache_fill.fill_latents

    def fill_elsewhere(cache: Cache, *others: Any, **named: Any) -> None:
        fill(replace(cache), *others, **named)  # with an index of its own, as another process has

    monkeypatch.setattr(cache_fill, "fill_latents", fill_elsewhere)
    recipe = small_recipe(*TINY_WAN, "data.windows=1", _cache_of(tmp_path))
    cache_ahead(recipe, QUIET)
    monkeypatch.setattr(PackIndex, "_header", None)
    assert len(PackIndex(tmp_path / "cache")) == len(_entries(recipe)) > 16


def test_other_encoders_have_entries_of_their_own(small_recipe: Recipes, tmp_path: Path) -> None:
    recipe = (*_VIDEOS, "data.windows=1", "data.flip=0.0", _cache_of(tmp_path))
    cache_ahead(small_recipe(*recipe), QUIET)
    model = "{num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}"
    facts = cache_ahead(small_recipe(*recipe, f"model.config={model}"), QUIET)
    assert facts["latents"]["computed"] == facts["prompts"]["computed"] == 0
    facts = cache_ahead(small_recipe(*recipe, "text.max_tokens=9"), QUIET)
    assert facts["latents"] == {"present": 16, "computed": 0}
    assert facts["prompts"]["computed"] > 0
    codec = "codec.config={base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    other = small_recipe(*recipe, f"{codec}temperal_downsample=[true]}}")
    assert cache_ahead(other, QUIET)["latents"] == {"present": 0, "computed": 16}


def test_a_cache_in_bf16_takes_half_and_is_trained_as_such(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    """A run does not change between the two; the inputs are the rounded ones of the other."""
    one_batch = (*_VIDEOS, "data.windows=1", "data.flip=0.0", "training.steps=1")
    whole = small_recipe.trained(*one_batch, _cache_of(tmp_path), name="whole")
    half = small_recipe(*one_batch, f"data.cache={tmp_path / 'half'}", "data.cache_dtype=bf16")
    facts = cache_ahead(half, QUIET)
    assert facts["latents"]["computed"] == 16
    sizes = [sum(map(len, _entries(each, "latents").values())) for each in (half, whole)]
    assert sizes[0] < 0.6 * sizes[1]
    train(half, QUIET)
    assert losses(half) == pytest.approx(losses(whole), rel=0.01)
    assert losses(half) != losses(whole)
    with pytest.raises(RecipeChangedError, match=r"data\.cache_dtype"):
        train(small_recipe(*one_batch, f"data.cache={tmp_path / 'half'}"), QUIET)


def test_an_entry_that_rots_is_never_trained_on(small_recipe: Recipes, tmp_path: Path) -> None:
    changes = (*_VIDEOS, "data.flip=0.0", "data.windows=1", "training.global_batch_size=8")
    # One epoch: whoever reads the entry a second time finds that it was removed.
    cached = small_recipe(*changes, _cache_of(tmp_path), "training.steps=2")
    cache_ahead(cached, QUIET)
    (rotten,) = _packs(cached, "latents")
    data = bytearray(rotten.read_bytes())
    data[-5] ^= 1
    rotten.write_bytes(data)
    train(cached, QUIET)
    ((_, _, reason),) = _rejected(cached)
    assert f"{rotten}: the latents of " in reason
    assert "is damaged in the cache: its content is not what was written" in reason
    found = audit(RunDirectory(cached.out))
    assert found.ok
    assert (found.epochs[0].seen, found.epochs[0].rejected) == (15, 1)
    again = cache_ahead(cached, QUIET)["latents"]  # as would the next launch
    assert again == {"present": 15, "computed": 1}


@pytest.fixture
def damaged(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of which three clips are damaged behind its back, and one is gone."""
    catalog = copy_clips(shapes_catalog, tmp_path / "shapes")
    gone, *damaged = sorted((catalog.parent / "clips").glob("*.mp4"))[::4]
    gone.unlink()
    for number, clip in enumerate(damaged, start=1):
        clip.write_bytes(clip.read_bytes()[: 300 * number])
    return catalog


def test_a_decoder_that_hangs_while_the_cache_is_filled_is_written_down(
    small_recipe: Recipes, damaged: Path, tmp_path: Path
) -> None:
    hanging = sorted((damaged.parent / "clips").glob("*.mp4"))[-1]
    hanging.unlink()
    os.mkfifo(hanging)
    # A catalog without the files' sizes: it is opened, and not known to have changed before.
    make_catalog(Catalog.load(damaged).clips()).save(damaged)
    recipe = small_recipe.trained(
        *_VIDEOS,
        f"data.catalog={damaged}",
        _cache_of(tmp_path),
        "data.workers=1",
        "data.sample_timeout_seconds=4",
        "data.windows=1",
        "data.flip=0.0",
        "training.global_batch_size=16",
        "training.steps=1",
    )
    stalled = events(recipe, "decoder_stalled")
    assert [event["path"] for event in stalled] == [str(hanging)] * 2
    assert all((recipe.out / event["stacks"]).is_file() for event in stalled)
    reasons = [reason for _, _, reason in _rejected(recipe)]
    assert len(reasons) == 5
    assert any(f"{hanging}: decoding made no progress for 4 s" in each for each in reasons)


def test_too_many_damaged_clips_are_refused_before_the_first_step(
    small_recipe: Recipes, damaged: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(
        *_VIDEOS, f"data.catalog={damaged}", _cache_of(tmp_path), "data.max_quarantined_clips=3"
    )
    with pytest.raises(DataError, match=r"4 clips could not be decoded for the cache, more .* = 3"):
        train(recipe, QUIET)
    assert losses(recipe) == []
    facts = cache_ahead(
        small_recipe(*_VIDEOS, f"data.catalog={damaged}", _cache_of(tmp_path)), QUIET
    )
    assert len(facts["failed"]) == 4
    assert all(".mp4" in each["path"] and each["reason"] for each in facts["failed"])


def test_a_broken_recipe_leaves_no_run_and_no_cache(small_recipe: Recipes, tmp_path: Path) -> None:
    """What is wrong is said before anything is encoded."""
    cache = tmp_path / "cache"
    with pytest.raises(RecipeError, match="names no folder for a cache"):
        cache_ahead(small_recipe(*_VIDEOS), QUIET)
    wrong = "data.buckets=[{num_frames=6, height=32, width=32}]"
    for fill in (train, cache_ahead):
        for memory in ([], ["recompute.memory=1GiB"]):
            with pytest.raises(RecipeError, match="cannot be encoded"):
                fill(small_recipe(*_VIDEOS, _cache_of(tmp_path), wrong, *memory), QUIET)
    (tmp_path / "file").touch()
    blocked = small_recipe(*_VIDEOS, f"data.cache={tmp_path / 'file'}")
    with pytest.raises(DataError, match="The cache cannot be written"):
        cache_ahead(blocked, QUIET)
    assert not cache.exists()
    assert not (small_recipe().out / "recipe.toml").exists()


# Hangs at the ninth clip that it encodes.
_PROGRAM = """
import itertools, sys, time
from pathlib import Path
from longtake import cli
from longtake.data import cache_fill

fill, counted = cache_fill.fill_latents, itertools.count()


def fill_in_part(cache, clips, encode, *others, **named):
    def encode_or_hang(*part):
        if next(counted) == 8:
            Path(__file__).with_name("hangs").touch()
            time.sleep(3600)
        return encode(*part)

    fill(cache, clips, encode_or_hang, *others, **named)


cache_fill.fill_latents = fill_in_part
cli.main()
"""


@pytest.mark.slow
def test_killed_and_shared_by_two_processes_a_cache_is_that_of_one(
    small_recipe: Recipes, warm: list[str], tmp_path: Path
) -> None:
    straight = small_recipe(*_MORE, f"data.cache={tmp_path / 'straight'}")
    cache_ahead(straight, QUIET)
    recipe = small_recipe(*_MORE, _cache_of(tmp_path))
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    hanging = tmp_path / "hanging.py"
    hanging.write_text(_PROGRAM)

    def start(*command: str) -> subprocess.Popen[str]:
        called = [*warm, "1", *command[:-1], "data", "cache", str(path), "--json", command[-1]]
        return subprocess.Popen(called, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    process = start(str(hanging), "--shard=1/1")
    wait_until(lambda: (tmp_path / "hangs").exists() or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert _entries(recipe, "prompts")
    assert _entries(recipe, "latents") == {}
    computed = Counter[str]()
    ours = ("-m", "longtake")
    for process in [start(*ours, "--shard=1/2"), start(*ours, "--shard=2/2")]:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        facts = json.loads(out)
        computed.update({kind: facts[kind]["computed"] for kind in ("latents", "prompts")})
    assert computed == {"latents": 128, "prompts": 0}
    assert _entries(recipe) == _entries(straight)


Prints = Callable[..., tuple[str, str]]
_WORDS = ["a red circle moving up", "a blue square"]


@pytest.fixture
def pipeline(small_recipe: Recipes, tmp_path: Path) -> Path:
    """A codec and a text encoder with tokenizer, in a pipeline's layout."""
    folder = tmp_path / "pipeline"
    make_parts(small_recipe(*TINY_WAN), _WORDS, folder)
    return folder


@pytest.fixture
def prints(small_recipe: Recipes, tmp_path: Path) -> Prints:
    """Fingerprints of a pipeline's codec and text encoder."""

    def of(folder: Path, *changes: str) -> tuple[str, str]:
        recipe = small_recipe(
            "data.buckets=[{num_frames=5, height=32, width=32}]",
            "codec.kind=autoencoder",
            f"codec.pretrained={folder}",
            "text.kind=transformers",
            f"text.pretrained={folder}",
            *changes,
        )
        return codec_fingerprint(recipe, tmp_path), text_fingerprint(recipe, tmp_path)

    return of


def test_a_cache_keeps_its_tiles_for_each_codec(small_recipe: Recipes, tmp_path: Path) -> None:
    first = small_recipe(*_VIDEOS, _cache_of(tmp_path))
    made = tmp_path / "made"
    make_parts(first, _WORDS, made)
    numbers = iter([64, 0])

    def choose() -> int:
        return next(numbers)

    other = small_recipe(*_VIDEOS, _cache_of(tmp_path), "codec.dtype=bf16")
    for recipe, tile in ((first, 64), (first, 64), (other, 0), (other, 0), (first, 64)):
        assert latent_cache.settle_tile(recipe, made, choose) == tile
    named = small_recipe(*_VIDEOS, _cache_of(tmp_path), "codec.encode_tile=16")
    assert latent_cache.settle_tile(named, made, choose) == 16


def test_tiles_of_a_cache_or_a_run_are_known_before_training(
    small_recipe: Recipes, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights of the codec being downloaded for it."""
    downloaded = list[str]()

    def download(repository: str, patterns: Sequence[str]) -> Path:
        downloaded.extend(patterns)
        return pipeline

    monkeypatch.setattr("longtake.models.pretrained._download", download)
    of_cache = (_cache_of(tmp_path), "codec.pretrained=some/release", "codec.config={}")
    recipe = small_recipe(*_VIDEOS, *of_cache)
    assert latent_cache.begun_tile(recipe) is None
    latent_cache.settle_tile(recipe, tmp_path, lambda: 64)
    downloaded.clear()
    assert latent_cache.begun_tile(recipe) == TileChoice(64)
    assert not {"vae/*", "vae/*.safetensors"}.intersection(downloaded)
    assert "vae/config.json" in downloaded
    for change in ("codec.dtype=bf16", "codec.encode_tile=16"):  # another codec, and a named tile
        assert latent_cache.begun_tile(small_recipe(*_VIDEOS, *of_cache, change)) is None
    keep_tile(32, RunDirectory(recipe.out).components_path)
    monkeypatch.setattr(RunDirectory, "exists", lambda _: True)
    assert latent_cache.begun_tile(recipe) == TileChoice(32)


def test_a_clip_for_which_memory_is_short_is_named(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(PixelCodec):
        encode_tile = 128

        def encode(self, videos: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(latent_cache, "build_codec", lambda *_: Short())
    encode = latent_cache._load_part_encoder(small_recipe(), tmp_path, torch.device("cpu"))
    part: Any = SimpleNamespace(made="latents", bucket="5 frames of 64x64")
    match = r"no memory left to encode a clip of 5 frames of 64x64 in tiles of 128 pixels, as"
    with pytest.raises(PlanError, match=match):
        encode(part, {"pixels": np.zeros((3, 5, 64, 64), np.uint8)})


def test_captions_for_which_memory_is_short_are_encoded_in_smaller_batches(
    small_recipe: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embeddings are in the captions' order, and what fitted is the size that is tried next."""
    calls = list[int]()

    class Short:
        def encode(self, captions: Sequence[str]) -> dict[str, Tensor]:
            calls.append(len(captions))
            if len(captions) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"lengths": torch.tensor([[len(each)] for each in captions])}

    monkeypatch.setattr(latent_cache, "_text", lambda *_: Short())
    monkeypatch.setattr(latent_cache, "place_text", lambda *_: None)
    most = 2
    load = latent_cache._load_caption_encoder
    encode = load(small_recipe(), tmp_path, torch.device("cuda"))
    captions = ["a" * number for number in range(1, 8)]
    assert [int(each["lengths"]) for each in encode(captions)] == list(range(1, 8))
    assert calls == [7, 3, 1, 1, 1, 1, 1, 1, 1]
    assert [int(each["lengths"]) for each in encode(["ab", "c"])] == [2, 1]
    most = 0
    with pytest.raises(PlanError, match=r"cuda has no memory left .* text\.max_tokens"):
        encode(["a"])


def test_parts_that_a_run_makes_are_known_by_their_content(
    small_recipe: Recipes, tmp_path: Path
) -> None:
    recipe = small_recipe(*TINY_WAN)

    def made(name: str, recipe: Recipe, captions: list[str]) -> tuple[str, str]:
        make_parts(recipe, captions, tmp_path / name)
        folder = tmp_path / name
        return codec_fingerprint(recipe, folder), text_fingerprint(recipe, folder)

    first = made("first", recipe, _WORDS)
    assert made("again", recipe, _WORDS) == first
    codec, text = made("words", recipe, [*_WORDS, "a green cross"])
    assert codec == first[0]
    assert text != first[1]
    other = small_recipe(*TINY_WAN, "seed=1")
    assert set(made("seed", other, _WORDS)).isdisjoint(first)
    words = small_recipe()
    make_parts(words, _WORDS, tmp_path / "ids")
    longer = small_recipe("text.max_tokens=9")
    prints: list[Any] = [text_fingerprint(each, tmp_path / "ids") for each in (words, longer)]
    assert len({*prints, *first}) == 4


@pytest.mark.parametrize(
    ("changes", "codec_is_same", "text_is_same"),
    [
        (["training.steps=99", "data.caption_dropout=0.7"], True, True),
        (["text.max_tokens=7"], True, False),
        (["codec.dtype=bf16"], False, True),
        (["codec.encode_tile=0"], True, True),  # as clips were encoded before there were tiles
        (["codec.encode_tile=16"], False, True),
        (["text.dtype=bf16"], True, True),  # as a pretrained one is anyway
        (["text.dtype=fp32"], True, False),
        (["text.quantize=int8"], True, False),
    ],
)
def test_settings_of_an_encoder_are_part_of_its_fingerprint(
    pipeline: Path, prints: Prints, changes: list[str], codec_is_same: bool, text_is_same: bool
) -> None:
    found = zip(prints(pipeline), prints(pipeline, *changes), strict=True)
    assert [before == after for before, after in found] == [codec_is_same, text_is_same]


def test_a_folder_and_hidden_files_are_not_part_of_a_fingerprint(
    pipeline: Path, prints: Prints, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(pipeline, moved, copy_function=shutil.copyfile)
    (moved / "vae" / ".cache").mkdir()
    (moved / "vae" / ".cache" / "note").write_text("x")
    assert prints(moved) == prints(pipeline)


@pytest.mark.parametrize(
    ("file", "is_of_codec"),
    [
        ("vae/config.json", True),
        ("vae/diffusion_pytorch_model.safetensors", True),
        ("vae/large.safetensors", True),
        ("vae/more.safetensors", True),
        ("text_encoder/model.safetensors", False),
        ("tokenizer/tokenizer.json", False),
    ],
)
def test_every_byte_of_every_file_is_part_of_a_fingerprint(
    pipeline: Path, prints: Prints, tmp_path: Path, file: str, is_of_codec: bool
) -> None:
    (pipeline / "vae/large.safetensors").write_bytes(bytes(24_000_000))
    kept = [f"data.cache={tmp_path / 'cache'}", "data.windows=1"]
    before = prints(pipeline, *kept)
    assert prints(pipeline) == before
    data = bytearray((pipeline / file).read_bytes() if (pipeline / file).exists() else b"x")
    data[len(data) // 2] ^= 1
    (pipeline / file).write_bytes(data)
    changed = [a != b for a, b in zip(prints(pipeline, *kept), before, strict=True)]
    assert changed == [is_of_codec, not is_of_codec]


def test_a_large_file_is_read_once_or_never(pipeline: Path, prints: Prints, tmp_path: Path) -> None:
    file = pipeline / "vae" / "large.safetensors"
    file.write_bytes(bytes(24_000_000))
    kept = [f"data.cache={tmp_path / 'cache'}", "data.windows=1"]
    before, stamp = prints(pipeline, *kept), file.stat()
    name = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_bytes(b"\1" + bytes(23_999_999))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert prints(pipeline, *kept) == before
    assert prints(pipeline) != before
    file.unlink()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).touch()  # what it links to is not read
    file.symlink_to(tmp_path / "blobs" / name)
    assert prints(pipeline) == before
