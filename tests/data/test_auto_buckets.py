"""Buckets by a pixel budget: within it, in multiples, with enough clips, and kept by a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of, encode_plainly, recipe_of, section

from longtake import config
from longtake.config import AutoBucketsSection, Bucket, Recipe
from longtake.data.auto_buckets import choose_buckets, glance, propose_buckets, with_buckets
from longtake.data.catalog import Catalog
from longtake.errors import DataError
from longtake.run_dir import RunDirectory


def _chosen(catalog: Catalog, **values: Any) -> list[Bucket]:
    auto = AutoBucketsSection.model_validate(values)
    return list(choose_buckets({"catalog": catalog}, auto, section()))


def _clips(sizes: dict[tuple[int, int], int], **fields: Any) -> Catalog:
    """So many clips of each width and height."""
    listed = [size for size, count in sizes.items() for _ in range(count)]
    return catalog_of(
        range(len(listed)), width=lambda n: listed[n][0], height=lambda n: listed[n][1], **fields
    )


def test_each_aspect_ratio_with_enough_clips_has_a_bucket() -> None:
    clips = _clips({(1920, 1080): 20, (1080, 1920): 10, (512, 512): 3})
    chosen = _chosen(clips, pixels=832 * 480, frames=[5], min_clips=8)
    assert [(each.width, each.height) for each in chosen] == [(464, 832), (832, 464)]
    with_squares = _chosen(clips, pixels=832 * 480, frames=[5], min_clips=3)
    assert [(each.width, each.height) for each in with_squares][1] == (624, 624)


def test_images_and_videos_have_buckets_of_their_own() -> None:
    clips = _clips(
        {(64, 64): 12},
        num_frames=lambda n: 1 if n < 6 else 20,
        kind=lambda n: "image" if n < 6 else "video",
    )
    chosen = _chosen(clips, pixels=4096, frames=[9, 1], min_clips=6)
    assert chosen == [
        Bucket(num_frames=1, height=64, width=64),
        Bucket(num_frames=9, height=64, width=64),
    ]


def test_without_clips_for_any_it_is_refused() -> None:
    with pytest.raises(DataError, match="of 4 clips not 8 with a caption go to any bucket of 81"):
        _chosen(_clips({(64, 64): 4}), pixels=4096, frames=[81])
    auto = AutoBucketsSection(pixels=512 * 512, frames=(5,))
    clips = {"catalog": _clips({(200, 200): 20})}
    with pytest.raises(DataError, match=r"Or lower pixels, or set data\.upscale = true"):
        choose_buckets(clips, auto, section(upscale=False))


@settings(max_examples=50, deadline=None)
@given(
    pixels=st.integers(32**2, 2048**2),
    aspect=st.floats(0.3, 3),
    multiple_of=st.sampled_from([8, 16, 32]),
)
def test_a_bucket_is_within_the_budget_and_near_its_aspect_ratio(
    pixels: int, aspect: float, multiple_of: int
) -> None:
    clips = _clips({(640, 360): 1})
    [shape] = _chosen(
        clips, pixels=pixels, aspects=[aspect], multiple_of=multiple_of, frames=[2], min_clips=1
    )
    assert shape.height % multiple_of == shape.width % multiple_of == 0
    assert shape.height * shape.width <= pixels
    if pixels > (32 * multiple_of) ** 2:
        assert shape.height * shape.width > 0.85 * pixels
        assert abs(shape.width / shape.height / aspect - 1) < 0.08


def _recipe(folder: Path, catalog: Path, **auto: Any) -> Recipe:
    auto = {"pixels": 4096, "frames": [4], **auto}
    return recipe_of(folder / "run", catalog=catalog, auto_buckets=auto)


def test_a_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    _clips({(64, 64): 8}).save(path)
    recipe = _recipe(tmp_path, path)
    first = with_buckets(recipe)
    assert first.data.buckets == (Bucket(num_frames=4, height=64, width=64),)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.create(first)
    _clips({(64, 64): 8, (128, 64): 30}).save(path)
    assert with_buckets(recipe) == first
    assert config.differences(run.recipe(), with_buckets(recipe)) == []
    elsewhere = config.changed(first, [f"out={tmp_path / 'other'}"])
    assert elsewhere.data.buckets == first.data.buckets
    fresh = recipe.model_copy(update={"out": tmp_path / "other"})
    assert len(with_buckets(fresh).data.buckets) > 1


def test_buckets_are_chosen_from_the_catalog_that_is_shown(tmp_path: Path) -> None:
    tall, wide = tmp_path / "tall.parquet", tmp_path / "wide.parquet"
    _clips({(480, 832): 8}).save(tall)
    _clips({(832, 480): 8}).save(wide)
    recipe = _recipe(tmp_path, tall, min_clips=1)
    own, other = (with_buckets(recipe, shown).data.buckets for shown in (tall, wide))
    assert own != other
    assert all(each.width <= each.height for each in own)
    assert all(each.width >= each.height for each in other)


_WAN = Bucket(num_frames=81, height=480, width=832)
_H3 = Bucket(num_frames=124, height=480, width=832)
_PIXELS = Bucket(num_frames=8, height=32, width=32)


def test_a_glance_takes_the_duration_of_the_file_where_its_video_has_none(tmp_path: Path) -> None:
    """As in Matroska, in whose headers streams have no duration."""
    encode_plainly(tmp_path / "clip.mkv", np.zeros((12, 32, 64, 3), np.uint8))
    frames, aspects = glance(tmp_path, tmp_path / "none.parquet", fps=16.0)
    assert (frames.tolist(), aspects.tolist()) == ([24], [2.0])


@pytest.mark.parametrize(
    ("frames", "aspect", "shape", "added"),
    [
        ([200] * 10, 16 / 9, _WAN, []),
        ([40] * 5 + [200] * 5, 16 / 9, _WAN, [(33, 480, 832)]),
        ([200] * 10, 9 / 16, _WAN, [(81, 832, 480)]),
        ([40] * 10, 9 / 16, _WAN, [(81, 832, 480), (33, 480, 832), (33, 832, 480)]),
        ([1] * 5 + [200] * 5, 16 / 9, _WAN, [(1, 480, 832)]),
        ([5] * 10, 1.0, _PIXELS, [(4, 32, 32)]),
        ([3] * 10, 16 / 9, _WAN, []),
        ([100] * 10, 16 / 9, _H3, [(90, 480, 832)]),
        ([21] * 10, 16 / 9, _H3, []),
    ],
)
def test_buckets_are_proposed_for_clips_that_would_be_lost(
    frames: list[int], aspect: float, shape: Bucket, added: list[tuple[int, int, int]]
) -> None:
    aspects = np.full(len(frames), aspect)
    own, *more = propose_buckets(np.array(frames), aspects, (shape,), 1)
    assert own == shape
    assert [(each.num_frames, each.height, each.width) for each in more] == added
