"""Every clip goes to the bucket that keeps most of it, and is cut to it from the middle."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import Bucket
from longtake.data.buckets import choose, crop, sort_into_buckets, span
from longtake.data.catalog import Catalog, Clip
from longtake.errors import DataError

_side = st.integers(1, 3000)


def _clip(
    width: int, height: int, num_frames: int, caption: str = "x", identity: str = "0"
) -> Clip:
    return Clip(
        identity=identity,
        path=f"/clips/{identity}.mp4",
        caption=caption,
        num_frames=num_frames,
        width=width,
        height=height,
        fps=8.0,
        duration_seconds=num_frames / 8,
        stream_index=0,
        rotation=0,
        codec="h264",
        pix_fmt="yuv420p",
    )


def _bucket(width: int, height: int, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


def _catalog(clips: Sequence[Clip]) -> Catalog:
    return Catalog(tuple(clips))


_SHAPES = [
    _bucket(64, 64, 9),  # 0
    _bucket(96, 64, 9),  # 1
    _bucket(96, 64, 17),  # 2
    _bucket(192, 128, 17),  # 3
    _bucket(64, 96, 1),  # 4
]


@pytest.mark.parametrize(
    ("clip", "index"),
    [
        (_clip(640, 640, 100), 0),  # the aspect ratio comes first
        (_clip(1280, 1280, 9), 0),
        (_clip(300, 200, 16), 1),  # as long as it fits
        (_clip(120, 80, 17), 2),  # then the most frames, and then the nearest area
        (_clip(1920, 1280, 17), 3),
        (_clip(400, 600, 100), 4),
        (_clip(640, 640, 8), 4),  # too short for the square bucket: the only one left
    ],
)
def test_the_bucket_that_keeps_most_is_chosen(clip: Clip, index: int) -> None:
    """The nearest aspect ratio, then the most frames, then the nearest area."""
    assert choose(clip, _SHAPES, stride=1) == index


def test_a_few_pixels_are_the_same_aspect_ratio() -> None:
    """Where ratios differ by less than half a percent, the longer bucket keeps more."""
    assert choose(_clip(960, 640, 20), [_bucket(960, 640, 9), _bucket(958, 640, 17)], 1) == 1
    assert choose(_clip(960, 640, 20), [_bucket(960, 640, 9), _bucket(900, 640, 17)], 1) == 0


def test_of_equal_buckets_the_first_is_chosen() -> None:
    """So that a bucket that is listed twice is no matter of chance."""
    assert choose(_clip(96, 64, 9), [_SHAPES[1], _SHAPES[1]], stride=1) == 0


def test_a_clip_that_is_too_short_has_no_bucket() -> None:
    """A window of n frames at a stride of s covers (n - 1) s + 1 frames of the clip."""
    shapes = [_bucket(64, 64, 9)]
    assert span(shapes[0], stride=3) == 25
    assert choose(_clip(64, 64, 25), shapes, stride=3) == 0
    assert choose(_clip(64, 64, 24), shapes, stride=3) is None
    assert choose(_clip(64, 64, 1), [_bucket(64, 64, 1)], stride=3) == 0


@settings(max_examples=300, deadline=None)
@given(width=_side, height=_side, to_width=_side, to_height=_side)
def test_a_crop_covers_its_bucket_from_the_middle(
    width: int, height: int, to_width: int, to_height: int
) -> None:
    """Scaled to at least the bucket, on one side exactly; margins of a side differ by a pixel."""
    cut = crop(_clip(width, height, 1), _bucket(to_width, to_height, 1))
    right = cut.scaled_width - to_width - cut.left
    bottom = cut.scaled_height - to_height - cut.top
    assert 0 <= cut.left <= right <= cut.left + 1
    assert 0 <= cut.top <= bottom <= cut.top + 1
    assert 0 in (cut.left + right, cut.top + bottom)
    scale = max(to_width / width, to_height / height)
    assert abs(cut.scaled_width - width * scale) <= 1
    assert abs(cut.scaled_height - height * scale) <= 1


def test_a_clip_of_its_buckets_size_is_not_touched() -> None:
    """No scaling and no margins."""
    cut = crop(_clip(96, 64, 1), _bucket(96, 64, 1))
    assert (cut.scaled_width, cut.scaled_height, cut.left, cut.top) == (96, 64, 0, 0)


def test_clips_are_sorted_and_what_is_left_out_is_counted() -> None:
    """Each bucket keeps the catalog's order; every clip is in one bucket or counted once."""
    clips = [
        _clip(96, 64, 9, identity="a"),
        _clip(96, 64, 9, caption="", identity="b"),
        _clip(64, 64, 9, identity="c"),
        _clip(96, 64, 3, identity="d"),
        _clip(96, 64, 3, caption="", identity="e"),
        _clip(96, 64, 12, identity="f"),
    ]
    buckets = sort_into_buckets(_catalog(clips), _SHAPES[:3], stride=1)
    found = [[clip.identity for clip in members] for members in buckets.clips]
    assert found == [["c"], ["a", "f"], []]
    assert buckets.shapes == tuple(_SHAPES[:3])
    assert buckets.dropped == {"no caption": 2, "too short for every bucket": 1}


def test_when_nothing_is_left_the_reasons_are_given() -> None:
    """Counts, the buckets, the longest clip, and what to do."""
    clips = [
        _clip(96, 64, 3, identity="a"),
        _clip(96, 64, 5, identity="b"),
        _clip(96, 64, 9, caption="", identity="c"),
    ]
    with pytest.raises(DataError) as caught:
        sort_into_buckets(_catalog(clips), _SHAPES[:2], stride=1)
    assert str(caught.value).startswith(
        "None of the catalog's 3 clips can be trained on: 2 (too short for every bucket), "
        "1 (no caption). The buckets are 9 frames of 64x64, 9 frames of 96x64; "
        "the longest clip has 9 frames. Index clips with captions"
    )


def test_an_empty_catalog_is_refused() -> None:
    """As it may be that every file was rejected."""
    with pytest.raises(DataError, match="it is empty"):
        sort_into_buckets(_catalog([]), _SHAPES, stride=1)
