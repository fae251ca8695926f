"""A sample's window is a pure function of its clip, its shape, the recipe and its seed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import Bucket, DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip, Timing
from longtake.data.order import derive
from longtake.data.sample import (
    all_windows,
    is_only_window,
    num_starts,
    sample_window,
    starts,
)

_Section = Callable[..., DataSection]
_SHAPE = Bucket(num_frames=4, height=16, width=16)
_SEEDS = [derive("sample", number) for number in range(400)]


@pytest.fixture(scope="module")
def clip(catalog_of: Callable[..., Catalog]) -> Clip:
    """Twenty frames of 64x32, ten ticks apart; it can be entered at frames 0, 6 and 12."""
    one = catalog_of([1], num_frames=lambda _: 20, width=lambda _: 64, height=lambda _: 32)
    return replace(one.clip(0), timing=Timing(first=100, step=10), keyframes=(0, 6, 12))


def test_the_window_is_of_its_clip(clip: Clip, section: _Section) -> None:
    """All that a decoder has to know is taken from the record."""
    turned = replace(clip, rotation=90, stream_index=2)
    window = sample_window(turned, _SHAPE, section(), _SEEDS[0])
    assert (window.identity, window.media, window.kind) == (clip.identity, clip.media, "video")
    assert (window.rotation, window.stream_index) == (90, 2)
    assert (window.source_height, window.source_width) == (32, 64)
    assert window.shape == (3, 4, 16, 16)
    assert not window.is_flipped


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), stride=st.integers(1, 6))
def test_windows_stay_inside_their_clip(
    clip: Clip, section: _Section, seed: int, stride: int
) -> None:
    """With the timestamps of just their frames, entered at the nearest keyframe before them."""
    window = sample_window(clip, _SHAPE, section(frame_stride=stride), seed)
    frames = [window.start + number * stride for number in range(4)]
    assert 0 <= frames[0] <= frames[-1] < 20
    assert window.timestamps == tuple(100 + 10 * frame for frame in frames)
    keyframe = max(each for each in (0, 6, 12) if each <= frames[0])
    assert window.seek_to == (100 + 10 * keyframe if keyframe else None)


def test_every_start_is_equally_likely(clip: Clip, section: _Section) -> None:
    """From the first frame to the last that a window fits after."""
    starts = Counter(sample_window(clip, _SHAPE, section(), seed).start for seed in _SEEDS)
    assert set(starts) == set(range(17))
    assert sum((n - 400 / 17) ** 2 / (400 / 17) for n in starts.values()) < 39.3  # p > 0.001


def test_without_timestamps_frames_are_counted(clip: Clip, section: _Section) -> None:
    """There is nowhere to enter a file whose timestamps cannot be relied on."""
    for seed in _SEEDS[:20]:
        window = sample_window(replace(clip, timing=None), _SHAPE, section(), seed)
        assert (window.timestamps, window.seek_to) == ((), None)
        assert window.start == sample_window(clip, _SHAPE, section(), seed).start


def test_frames_are_cut_from_the_middle_unless_asked(clip: Clip, section: _Section) -> None:
    """Else anywhere: on the side that has a margin, all over it, by the sample's seed."""
    middle = {sample_window(clip, _SHAPE, section(), seed).left for seed in _SEEDS}
    assert middle == {8}
    windows = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
    assert {each.top for each in windows} == {0}
    assert {each.left for each in windows} == set(range(17))
    assert {(each.scaled_height, each.scaled_width) for each in windows} == {(16, 32)}
    again = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
    assert windows == again


def test_a_share_of_samples_is_mirrored(clip: Clip, section: _Section) -> None:
    """None, all, or about as many as asked; neither crop nor start depends on it."""
    for share in (0.0, 0.25, 1.0):
        data = section(flip=share, random_crop=True)
        windows = [sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS]
        flipped = [each.is_flipped for each in windows]
        assert sum(flipped) / len(flipped) == pytest.approx(share, abs=0.07 if share % 1 else 0)
        plain = [sample_window(clip, _SHAPE, section(random_crop=True), seed) for seed in _SEEDS]
        assert [replace(each, is_flipped=False) for each in windows] == plain


def test_what_is_random_is_independent(clip: Clip, section: _Section) -> None:
    """Mirrored samples begin and are cut where others are, on average."""
    data = section(flip=0.5, random_crop=True)
    windows = [sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS]
    for value in ("start", "left"):
        means = []
        for is_flipped in (False, True):
            mine = [getattr(each, value) for each in windows if each.is_flipped == is_flipped]
            means.append(sum(mine) / len(mine))
        assert means == pytest.approx([8, 8], abs=1.2)


def test_an_image_is_one_frame(clip: Clip, section: _Section) -> None:
    """Whatever the stride."""
    image = replace(clip, kind="image", num_frames=1, timing=None, keyframes=())
    shape = Bucket(num_frames=1, height=16, width=16)
    window = sample_window(image, shape, section(frame_stride=3), 5)
    assert (window.kind, window.start, window.num_frames) == ("image", 0, 1)


def test_a_clip_of_one_windows_length_has_only_that(clip: Clip, section: _Section) -> None:
    """Unless it is cut anywhere: then each epoch wants other pixels."""
    exact = Bucket(num_frames=20, height=16, width=16)
    assert num_starts(clip, exact, 1) == 1
    assert num_starts(clip, _SHAPE, 5) == 5
    assert is_only_window(clip, exact, section(flip=0.5))
    assert not is_only_window(clip, exact, section(random_crop=True))
    assert not is_only_window(clip, _SHAPE, section())


@pytest.mark.parametrize(
    ("windows", "expected"),
    [(1, [8]), (2, [0, 16]), (3, [0, 8, 16]), (4, [0, 5, 11, 16]), (5, [0, 4, 8, 12, 16])],
)
def test_a_fixed_number_of_windows_is_spread_over_the_clip(
    clip: Clip, section: _Section, windows: int, expected: list[int]
) -> None:
    """From its first frame to its last, one in the middle; seeds choose among them evenly."""
    data = section(windows=windows)
    assert list(starts(clip, _SHAPE, data)) == expected
    chosen = Counter(sample_window(clip, _SHAPE, data, seed).start for seed in _SEEDS)
    assert sorted(chosen) == expected
    share = 400 / windows
    assert sum((n - share) ** 2 / share for n in chosen.values()) < 18.5  # p > 0.001
    assert is_only_window(clip, _SHAPE, data) == (windows == 1)


@given(windows=st.integers(1, 40), frames=st.integers(4, 30), stride=st.integers(1, 3))
def test_windows_are_distinct_and_as_many_as_there_are(
    clip: Clip, section: _Section, windows: int, frames: int, stride: int
) -> None:
    """A clip that holds fewer gives all it holds, as without a number."""
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
def test_all_windows_are_those_that_samples_have(
    clip: Clip, section: _Section, flip: float
) -> None:
    """No more and no fewer, mirrored ones where there are any."""
    data = section(windows=3, flip=flip)
    listed = all_windows(clip, _SHAPE, data)
    assert len(listed) == len(set(listed)) == (6 if flip == 0.3 else 3)
    assert set(listed) == {sample_window(clip, _SHAPE, data, seed) for seed in _SEEDS}
