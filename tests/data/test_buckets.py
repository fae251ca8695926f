"""Each clip has one bucket, and windows and seeds that depend on clip and recipe only."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of, section

from longtake import config
from longtake.config import Bucket, Stage
from longtake.data import buckets
from longtake.data.buckets import (
    all_windows,
    choose,
    is_only_window,
    num_starts,
    sample_window,
    sort_into_buckets,
    span,
    starts,
)
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Timing
from longtake.data.order import derive
from longtake.data.plan import begin
from longtake.data.stages import select

_Size = tuple[int, int, int]
"""(width, height, number of frames)"""


def _bucket(width: int, height: int, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


def _sized(sizes: Sequence[_Size]) -> Catalog:
    """A catalog whose rows are clips of the given sizes, in the given order."""
    return catalog_of(
        range(len(sizes)),
        identity=lambda number: f"{number:032x}",
        width=lambda number: sizes[number][0],
        height=lambda number: sizes[number][1],
        num_frames=lambda number: sizes[number][2],
    )


_SHAPES = [
    _bucket(64, 64, 9),  # 0
    _bucket(96, 64, 9),  # 1
    _bucket(96, 64, 17),  # 2
    _bucket(192, 128, 17),  # 3
    _bucket(64, 96, 1),  # 4
]


def _rows(catalog: Catalog) -> buckets.Rows:
    return np.arange(len(catalog), dtype=np.uint32)


def _chosen(catalog: Catalog, shapes: Sequence[Bucket], stride: int = 1, **how: bool) -> list[int]:
    found: list[int] = choose(catalog, _rows(catalog), shapes, stride, **how).tolist()
    return found


def test_the_bucket_that_keeps_most_is_chosen() -> None:
    expected = {
        (640, 640, 100): 0,  # the aspect ratio comes first
        (1280, 1280, 9): 0,
        (300, 200, 16): 1,  # as long as it fits
        (120, 80, 17): 2,  # then the most frames, and then the nearest area
        (1920, 1280, 17): 3,
        (400, 600, 1): 4,
        (640, 640, 1): 4,
        (640, 640, 8): -1,  # too short for the square bucket, and no image
    }
    assert _chosen(_sized(list(expected)), _SHAPES) == list(expected.values())


_SHARING = [
    {"num_frames": 17, "height": 64, "width": 96},
    {"num_frames": 9, "height": 64, "width": 96, "share": 0.5},
    {"num_frames": 1, "height": 32, "width": 48, "share": 0.2},
    {"num_frames": 9, "height": 64, "width": 64, "share": 0.8},
]
_STILLS = {"stills_from_videos": True}


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ((192, 128, 17), {}, [0.5, 0.5, 0, 0]),
        ((192, 128, 17), _STILLS, [0.3, 0.5, 0.2, 0]),
        ((90, 60, 17), {}, [1, 0, 0, 0]),  # only its best bucket enlarges it
        ((192, 128, 16), {}, [0, 1, 0, 0]),  # too short for the first
        ((192, 128, 16), _STILLS, [0, 0.8, 0.2, 0]),
        ((128, 128, 17), {}, [0, 0, 0, 1]),  # others would cut a third
        ((124, 100, 17), {"max_crop": 0.18}, [0.5, 0.5, 0, 0]),
        ((124, 100, 17), {}, [0, 0.5 / 1.3, 0, 0.8 / 1.3]),  # cut by 17 % and by 19 %
    ],
)
def test_a_bucket_with_a_share_gets_clips_that_fit_another_better(
    size: _Size, options: dict[str, Any], expected: list[float]
) -> None:
    data = section(buckets=_SHARING, **options)
    members = select(_sized([size] * 1000), Stage(name="a"), data).members
    assert list(members.sizes) == [pytest.approx(1000 * share, abs=1) for share in expected]
    assert len(members) == sum(members.sizes) == len(np.unique(members.all_rows())) == 1000


def test_videos_are_trained_as_stills_only_where_the_recipe_asks() -> None:
    clips = _sized([(400, 600, 100), (640, 640, 8), (640, 640, 2), (400, 600, 1)])
    assert _chosen(clips, _SHAPES) == [0, -1, -1, 4]
    assert _chosen(clips, _SHAPES, stills=True) == [4, 4, 4, 4]
    members, dropped = sort_into_buckets(clips, _rows(clips), _SHAPES, stride=1)
    assert members.sizes == (1, 0, 0, 0, 1)
    assert dropped == {"a video that only buckets of 1 frame could take": 2}


def test_a_few_pixels_are_the_same_aspect_ratio() -> None:
    clips = _sized([(960, 640, 20)])
    assert _chosen(clips, [_bucket(960, 640, 9), _bucket(958, 640, 17)]) == [1]
    assert _chosen(clips, [_bucket(960, 640, 9), _bucket(900, 640, 17)]) == [0]


def test_a_clip_that_is_too_short_has_no_bucket() -> None:
    shapes = [_bucket(64, 64, 9)]
    assert span(shapes[0], stride=3) == 25
    assert _chosen(_sized([(64, 64, 25), (64, 64, 24)]), shapes, stride=3) == [0, -1]
    assert _chosen(_sized([(64, 64, 1)]), [_bucket(64, 64, 1)], stride=3) == [0]


def _reference(
    size: _Size, shapes: Sequence[Bucket], stride: int, *, stills: bool, upscale: bool
) -> int:
    """The rule in plain words, one clip at a time."""
    width, height, num_frames = size

    def distance(shape: Bucket) -> tuple[float, int, float]:
        aspect = abs(math.log(width / height) - math.log(shape.width / shape.height))
        area = abs(math.log(width * height) - math.log(shape.width * shape.height))
        return round(aspect, 2), -shape.num_frames, area

    fitting = [
        i
        for i, shape in enumerate(shapes)
        if num_frames >= span(shape, stride)
        and (stills or min(shape.num_frames, num_frames) > 1 or shape.num_frames == num_frames)
        and (upscale or (width >= shape.width and height >= shape.height))
    ]
    return min(fitting, key=lambda i: distance(shapes[i]), default=-1)


# Few values, so that clips and buckets often tie.
_few_sides = st.sampled_from([64, 90, 96, 128, 192])
_sizes = st.lists(st.tuples(_few_sides, _few_sides, st.integers(1, 20)), min_size=1, max_size=8)
_shapes = st.lists(
    st.builds(_bucket, _few_sides, _few_sides, st.sampled_from([1, 5, 9])), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None)
@given(
    sizes=_sizes,
    shapes=_shapes,
    stride=st.integers(1, 3),
    stills=st.booleans(),
    upscale=st.booleans(),
)
def test_all_clips_at_once_are_as_one_by_one(
    sizes: list[_Size], shapes: list[Bucket], stride: int, stills: bool, upscale: bool
) -> None:
    how = {"stills": stills, "upscale": upscale}
    expected = [_reference(size, shapes, stride, **how) for size in sizes]
    assert _chosen(_sized(sizes), shapes, stride, **how) == expected


def test_clips_are_sorted_and_what_is_left_out_is_counted() -> None:
    clips = _sized([(96, 64, 9), (64, 64, 9), (64, 64, 9), (96, 64, 3), (96, 64, 12)])
    rows = np.array([0, 2, 3, 4], np.uint32)
    members, dropped = sort_into_buckets(clips, rows, _SHAPES[:3], stride=1)
    assert [each.tolist() for each in members.rows] == [[2], [0, 4], []]
    assert members.shapes == tuple(_SHAPES[:3])
    assert (members.sizes, len(members)) == ((1, 2, 0), 3)
    assert sorted(members.all_rows().tolist()) == [0, 2, 4]
    assert dropped == {"too short for every bucket": 1}


def test_sorting_in_chunks_and_mapping_from_disk_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clips = _sized([(64 + 32 * (n % 2), 64, 9) for n in range(50)])
    rows = np.array([*range(16), 17, 40, 48], np.uint32)  # whole, broken and empty chunks
    plain, _ = sort_into_buckets(clips, rows, _SHAPES[:2], stride=1)
    chosen = choose(clips, rows, _SHAPES[:2], stride=1)
    monkeypatch.setattr(buckets, "_CHUNK", 7)
    monkeypatch.setattr(buckets, "_MAX_ROWS_ON_HEAP", 10)
    mapped, _ = sort_into_buckets(clips, rows, _SHAPES[:2], stride=1)
    np.testing.assert_array_equal(choose(clips, rows, _SHAPES[:2], stride=1), chosen)
    for one, other in zip(plain.rows, mapped.rows, strict=True):
        assert isinstance(other, np.memmap)
        assert other.dtype == np.uint32
        np.testing.assert_array_equal(one, other)


_SHAPE = Bucket(num_frames=4, height=16, width=16)
_SEEDS = [derive("sample", number) for number in range(400)]


@pytest.fixture(scope="module")
def clip() -> Clip:
    """Twenty frames of 64x32, ten ticks apart; it can be entered at frames 0, 6 and 12."""
    one = catalog_of([1], num_frames=lambda _: 20, width=lambda _: 64, height=lambda _: 32)
    return replace(one.clip(0), timing=Timing(first=100, step=10), keyframes=(0, 6, 12))


def test_the_window_is_of_its_clip(clip: Clip) -> None:
    turned = replace(clip, rotation=90, stream_index=2)
    window = sample_window(turned, _SHAPE, section(), _SEEDS[0])
    assert (window.identity, window.media, window.kind) == (clip.identity, clip.media, "video")
    assert (window.rotation, window.stream_index) == (90, 2)
    assert (window.source_height, window.source_width) == (32, 64)
    assert window.shape == (3, 4, 16, 16)
    assert not window.is_flipped


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), stride=st.integers(1, 6))
def test_windows_stay_inside_their_clip(clip: Clip, seed: int, stride: int) -> None:
    window = sample_window(clip, _SHAPE, section(frame_stride=stride), seed)
    frames = [window.start + number * stride for number in range(4)]
    assert 0 <= frames[0] <= frames[-1] < 20
    assert window.timestamps == tuple(100 + 10 * frame for frame in frames)
    keyframe = max(each for each in (0, 6, 12) if each <= frames[0])
    assert window.seek_to == (100 + 10 * keyframe if keyframe else None)


def test_without_timestamps_frames_are_counted(clip: Clip) -> None:
    for seed in _SEEDS[:20]:
        window = sample_window(replace(clip, timing=None), _SHAPE, section(), seed)
        assert (window.timestamps, window.seek_to) == ((), None)
        assert window.start == sample_window(clip, _SHAPE, section(), seed).start


def test_frames_are_cut_from_the_middle_unless_asked(clip: Clip) -> None:
    """A random crop lies anywhere on the side that has a margin, by the sample's seed."""
    middle = {sample_window(clip, _SHAPE, section(), seed).left for seed in _SEEDS}
    assert middle == {8}
    windows = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
    assert {each.top for each in windows} == {0}
    assert {each.left for each in windows} == set(range(17))
    assert {(each.scaled_height, each.scaled_width) for each in windows} == {(16, 32)}
    again = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
    assert windows == again


def test_a_share_of_samples_is_mirrored(clip: Clip) -> None:
    for share in (0.0, 0.25, 1.0):
        data = section(flip=share, random_crop=True)
        windows = [sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS]
        flipped = [each.is_flipped for each in windows]
        assert sum(flipped) / len(flipped) == pytest.approx(share, abs=0.07 if share % 1 else 0)
        plain = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
        assert [replace(each, is_flipped=False) for each in windows] == plain


def test_what_is_random_is_independent(clip: Clip) -> None:
    data = section(flip=0.5, random_crop=True)
    windows = [sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS]
    for value in ("start", "left"):
        means = []
        for is_flipped in (False, True):
            mine = [getattr(each, value) for each in windows if each.is_flipped == is_flipped]
            means.append(sum(mine) / len(mine))
        assert means == pytest.approx([8, 8], abs=1.2)


def test_an_image_is_one_frame(clip: Clip) -> None:
    image = replace(clip, kind="image", num_frames=1, timing=None, keyframes=())
    shape = Bucket(num_frames=1, height=16, width=16)
    window = sample_window(image, shape, section(frame_stride=3), 5)
    assert (window.kind, window.start, window.num_frames) == ("image", 0, 1)


def test_a_clip_of_one_windows_length_has_only_that(clip: Clip) -> None:
    exact = Bucket(num_frames=20, height=16, width=16)
    assert num_starts(clip, exact, 1) == 1
    assert num_starts(clip, _SHAPE, 5) == 5
    assert is_only_window(clip, exact, section(flip=0.5))
    assert not is_only_window(clip, exact, section(random_crop=True))
    assert not is_only_window(clip, _SHAPE, section())


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        (None, list(range(17))),
        *((1, [8]), (2, [0, 16]), (3, [0, 8, 16]), (4, [0, 5, 11, 16]), (5, [0, 4, 8, 12, 16])),
    ],
)
def test_windows_are_spread_over_the_clip_and_equally_likely(
    clip: Clip, windows: int | None, expected: list[int]
) -> None:
    data = section(windows=windows)
    assert list(starts(clip, _SHAPE, data)) == expected
    chosen = Counter(sample_window(clip, _SHAPE, data, seed).start for seed in _SEEDS)
    assert sorted(chosen) == expected
    share, limit = 400 / len(expected), 18.5 if windows else 39.3  # p > 0.001
    assert sum((n - share) ** 2 / share for n in chosen.values()) < limit
    assert is_only_window(clip, _SHAPE, data) == (windows == 1)


@pytest.mark.parametrize(("place", "start"), [("head", 0), ("middle", 8)])
def test_one_window_lies_where_it_is_wanted(clip: Clip, place: str, start: int) -> None:
    data = section(window=place)
    assert {sample_window(clip, _SHAPE, data, seed).start for seed in range(9)} == {start}
    assert [window.start for window in all_windows(clip, _SHAPE, data)] == [start]
    assert is_only_window(clip, _SHAPE, data)


@given(windows=st.integers(1, 40), frames=st.integers(4, 30), stride=st.integers(1, 3))
def test_windows_are_distinct_and_as_many_as_there_are(
    clip: Clip, windows: int, frames: int, stride: int
) -> None:
    frames += 3 * (stride - 1)
    some, all_of_them = section(windows=windows, frame_stride=stride), section(frame_stride=stride)
    longer = replace(clip, num_frames=frames)
    possible = list(starts(longer, _SHAPE, all_of_them))
    assert possible == list(range(num_starts(longer, _SHAPE, stride)))
    found = list(starts(longer, _SHAPE, some))
    assert found == sorted(set(found) & set(possible))
    assert len(found) == min(windows, len(possible))
    if windows > 1:
        assert {found[0], found[-1]} == {possible[0], possible[-1]}
        gaps = [after - before for before, after in pairwise(found)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_all_windows_are_those_that_samples_have(clip: Clip, flip: float) -> None:
    data = section(windows=3, flip=flip)
    listed = all_windows(clip, _SHAPE, data)
    assert len(listed) == len(set(listed)) == (6 if flip == 0.3 else 3)
    assert set(listed) == {sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS}


_ROOT = Path(__file__).resolve().parents[2]
_DEMO = Path(str(resources.files("longtake.demo"))) / "recipe.toml"
_RECIPES = [*sorted((_ROOT / "examples").glob("*.toml")), _DEMO]
# 1080p, 720p, 480p, portrait, 4:3 (also portrait) and square.
_SIZES = [
    (1920, 1080), (1280, 720), (854, 480), (1080, 1920), (720, 1280), (1440, 1080), (640, 480),
    (1080, 1440), (1024, 1024),
]  # fmt: skip
_FRAMES = [1, 24, 48, 90, 120, 300]
_CLIPS = list(product(_SIZES, _FRAMES))


@pytest.mark.parametrize("path", _RECIPES, ids=lambda path: path.stem)
def test_every_bucket_of_every_stage_gets_clips(path: Path) -> None:

    def of(index: int) -> Callable[[int], Any]:
        return lambda number: _CLIPS[number][0][index]

    recipe = config.load(path)
    catalog = catalog_of(
        range(len(_CLIPS)),
        width=of(0),
        height=of(1),
        num_frames=lambda number: _CLIPS[number][1],
        fps=lambda number: 30.0,
        duration_seconds=lambda number: _CLIPS[number][1] / 30,
        kind=lambda number: "image" if _CLIPS[number][1] == 1 else "video",
        attributes=lambda number: {"nouns": float(number % 10)},
    )
    plan = begin(dict.fromkeys(recipe.data.sources(), catalog), recipe.data, 4, seed=0)
    for stage in plan.stages:
        members = stage.streams[0].parts[-1].members
        for bucket, rows in zip(members.shapes, members.rows, strict=True):
            frames = catalog.column("num_frames")[rows]
            assert len(rows), f"{path.name}, stage {stage.name}: no clip for {bucket}"
            assert (bucket.num_frames > 1) == all(frames > 1)
