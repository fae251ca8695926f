"""Every clip goes to the bucket that keeps most of it, and is cut to it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import Bucket
from longtake.data import buckets
from longtake.data.buckets import choose, sort_into_buckets, span
from longtake.data.catalog import Catalog

_Size = tuple[int, int, int]
"""(width, height, number of frames)"""
_CatalogOf = Callable[..., Catalog]


def _bucket(width: int, height: int, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


@pytest.fixture(scope="session")
def sized(catalog_of: _CatalogOf) -> Callable[[Sequence[_Size]], Catalog]:
    """Makes catalogs whose rows are clips of the given sizes, in the given order."""

    def make(sizes: Sequence[_Size]) -> Catalog:
        return catalog_of(
            range(len(sizes)),
            identity=lambda number: f"{number:032x}",
            width=lambda number: sizes[number][0],
            height=lambda number: sizes[number][1],
            num_frames=lambda number: sizes[number][2],
        )

    return make


_Sized = Callable[[Sequence[_Size]], Catalog]
_SHAPES = [
    _bucket(64, 64, 9),  # 0
    _bucket(96, 64, 9),  # 1
    _bucket(96, 64, 17),  # 2
    _bucket(192, 128, 17),  # 3
    _bucket(64, 96, 1),  # 4
]


def _rows(catalog: Catalog) -> buckets.Rows:
    return np.arange(len(catalog), dtype=np.uint32)


def _chosen(
    catalog: Catalog, shapes: Sequence[Bucket], stride: int = 1, *, stills: bool = False
) -> list[int]:
    found: list[int] = choose(catalog, _rows(catalog), shapes, stride, stills=stills).tolist()
    return found


def test_the_bucket_that_keeps_most_is_chosen(sized: _Sized) -> None:
    """The nearest aspect ratio, then the most frames, then the nearest area."""
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
    assert _chosen(sized(list(expected)), _SHAPES) == list(expected.values())


def test_videos_are_trained_as_stills_only_where_the_recipe_asks(sized: _Sized) -> None:
    """Also videos of the very shape of a bucket of one frame, and those too short for others."""
    clips = sized([(400, 600, 100), (640, 640, 8), (640, 640, 2), (400, 600, 1)])
    assert _chosen(clips, _SHAPES) == [0, -1, -1, 4]
    assert _chosen(clips, _SHAPES, stills=True) == [4, 4, 4, 4]
    members, dropped = sort_into_buckets(clips, _rows(clips), _SHAPES, stride=1)
    assert members.sizes == (1, 0, 0, 0, 1)
    assert dropped == {"a video that only buckets of 1 frame could take": 2}


def test_a_few_pixels_are_the_same_aspect_ratio(sized: _Sized) -> None:
    """Where ratios differ by less than half a percent, the longer bucket keeps more."""
    clips = sized([(960, 640, 20)])
    assert _chosen(clips, [_bucket(960, 640, 9), _bucket(958, 640, 17)]) == [1]
    assert _chosen(clips, [_bucket(960, 640, 9), _bucket(900, 640, 17)]) == [0]


def test_of_equal_buckets_the_first_is_chosen(sized: _Sized) -> None:
    """So that a bucket that is listed twice is no matter of chance."""
    assert _chosen(sized([(96, 64, 9)]), [_SHAPES[1], _SHAPES[1]]) == [0]


def test_a_clip_that_is_too_short_has_no_bucket(sized: _Sized) -> None:
    """A window of n frames at a stride of s covers (n - 1) s + 1 frames of the clip."""
    shapes = [_bucket(64, 64, 9)]
    assert span(shapes[0], stride=3) == 25
    assert _chosen(sized([(64, 64, 25), (64, 64, 24)]), shapes, stride=3) == [0, -1]
    assert _chosen(sized([(64, 64, 1)]), [_bucket(64, 64, 1)], stride=3) == [0]


def _reference(size: _Size, shapes: Sequence[Bucket], stride: int, *, stills: bool) -> int:
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
    ]
    return min(fitting, key=lambda i: distance(shapes[i]), default=-1)


# Few values, so that clips and buckets often tie.
_few_sides = st.sampled_from([64, 90, 96, 128, 192])
_sizes = st.lists(st.tuples(_few_sides, _few_sides, st.integers(1, 20)), min_size=1, max_size=8)
_shapes = st.lists(
    st.builds(_bucket, _few_sides, _few_sides, st.sampled_from([1, 5, 9])), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None)
@given(sizes=_sizes, shapes=_shapes, stride=st.integers(1, 3), stills=st.booleans())
def test_all_clips_at_once_are_as_one_by_one(
    sized: _Sized, sizes: list[_Size], shapes: list[Bucket], stride: int, stills: bool
) -> None:
    """Against a plain reference."""
    expected = [_reference(size, shapes, stride, stills=stills) for size in sizes]
    assert _chosen(sized(sizes), shapes, stride, stills=stills) == expected


def test_clips_are_sorted_and_what_is_left_out_is_counted(sized: _Sized) -> None:
    """Each bucket keeps the catalog's order; only the rows that are asked for take part."""
    clips = sized([(96, 64, 9), (64, 64, 9), (64, 64, 9), (96, 64, 3), (96, 64, 12)])
    rows = np.array([0, 2, 3, 4], np.uint32)
    members, dropped = sort_into_buckets(clips, rows, _SHAPES[:3], stride=1)
    assert [each.tolist() for each in members.rows] == [[2], [0, 4], []]
    assert members.shapes == tuple(_SHAPES[:3])
    assert (members.sizes, len(members)) == ((1, 2, 0), 3)
    assert sorted(members.all_rows().tolist()) == [0, 2, 4]
    assert dropped == {"too short for every bucket": 1}


def test_sorting_in_chunks_and_mapping_from_disk_change_nothing(
    sized: _Sized, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many clips are sorted by gives the same rows, which are not on the heap."""
    clips = sized([(64 + 32 * (n % 2), 64, 9) for n in range(50)])
    plain, _ = sort_into_buckets(clips, _rows(clips), _SHAPES[:2], stride=1)
    monkeypatch.setattr(buckets, "_CHUNK", 7)
    monkeypatch.setattr(buckets, "_MOST_ON_THE_HEAP", 10)
    mapped, _ = sort_into_buckets(clips, _rows(clips), _SHAPES[:2], stride=1)
    for one, other in zip(plain.rows, mapped.rows, strict=True):
        assert isinstance(other, np.memmap)
        assert other.dtype == np.uint32
        np.testing.assert_array_equal(one, other)
