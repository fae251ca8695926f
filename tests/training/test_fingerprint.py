"""Other encoders have other fingerprints; the same one has the same, wherever it lies."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.config import Recipe
from longtake.models.build import assemble
from longtake.training.latent_cache import codec_fingerprint, make_parts, text_fingerprint

_Make = Callable[..., Recipe]
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
