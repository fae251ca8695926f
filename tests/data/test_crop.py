"""A picture of any size is scaled to cover a shape, and cut to it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import Bucket
from longtake.data.crop import crop

_side = st.integers(1, 3000)


def _bucket(width: int, height: int, num_frames: int) -> Bucket:
    return Bucket(num_frames=num_frames, height=height, width=width)


@settings(max_examples=300, deadline=None)
@given(width=_side, height=_side, to_width=_side, to_height=_side)
def test_a_crop_covers_its_bucket_from_the_middle(
    width: int, height: int, to_width: int, to_height: int
) -> None:
    """Scaled to at least the bucket, on one side exactly; margins of a side differ by a pixel."""
    cut = crop(height, width, _bucket(to_width, to_height, 1))
    right = cut.scaled_width - to_width - cut.left
    bottom = cut.scaled_height - to_height - cut.top
    assert 0 <= cut.left <= right <= cut.left + 1
    assert 0 <= cut.top <= bottom <= cut.top + 1
    assert 0 in (cut.left + right, cut.top + bottom)
    scale = max(to_width / width, to_height / height)
    assert abs(cut.scaled_width - width * scale) <= 1
    assert abs(cut.scaled_height - height * scale) <= 1


_fraction = st.floats(0, 1, exclude_max=True)


@settings(max_examples=200, deadline=None)
@given(width=_side, height=_side, across=_fraction, down=_fraction)
def test_a_crop_elsewhere_stays_inside(width: int, height: int, across: float, down: float) -> None:
    """Wherever it is cut, the scaled picture covers it, and its scale is that of the middle."""
    shape = _bucket(96, 64, 1)
    middle, cut = crop(height, width, shape), crop(height, width, shape, across, down)
    assert (cut.scaled_height, cut.scaled_width) == (middle.scaled_height, middle.scaled_width)
    assert 0 <= cut.left <= cut.scaled_width - 96
    assert 0 <= cut.top <= cut.scaled_height - 64


def test_a_clip_of_its_buckets_size_is_not_touched() -> None:
    """No scaling and no margins."""
    cut = crop(64, 96, _bucket(96, 64, 1))
    assert (cut.scaled_width, cut.scaled_height, cut.left, cut.top) == (96, 64, 0, 0)
