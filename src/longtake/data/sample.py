"""Which pixels of a clip a sample is made of: a pure function of clip, shape, recipe and seed."""

from bisect import bisect_right
from collections.abc import Sequence

from longtake.config import Bucket, DataSection
from longtake.data.buckets import span
from longtake.data.clip import Clip
from longtake.data.crop import Crop, crop
from longtake.data.order import derive
from longtake.data.window import Window

_MIDDLE = 0.5


def sample_seed(run_seed: int, stage: str, source: str, epoch: int, clip: Clip) -> int:
    """The seed of all that is random about a sample, whichever rank trains it, and in which step.

    A clip in two stages, or in two catalogs of a stage, is not the same sample.
    """
    return derive(run_seed, "sample", f"{stage}/{source}", epoch, clip.identity)


def sample_window(clip: Clip, shape: Bucket, data: DataSection, seed: int) -> Window:
    """The window of a sample: where it begins, how it is cut and whether it is mirrored."""
    begins = starts(clip, shape, data)
    start = begins[seed % len(begins)]
    across, down = (_fraction(seed, axis) if data.random_crop else _MIDDLE for axis in "xy")
    cut = crop(clip.height, clip.width, shape, across, down)
    is_flipped = data.flip > 0 and _fraction(seed, "flip") < data.flip
    return _window(clip, shape, data, start, cut, is_flipped=is_flipped)


def all_windows(clip: Clip, shape: Bucket, data: DataSection) -> list[Window]:
    """Every window that samples of a clip may have, where crops are not random."""
    assert not data.random_crop
    cut = crop(clip.height, clip.width, shape)
    mirrored = [False, True] if 0 < data.flip < 1 else [data.flip == 1]
    return [
        _window(clip, shape, data, start, cut, is_flipped=is_flipped)
        for start in starts(clip, shape, data)
        for is_flipped in mirrored
    ]


def _window(
    clip: Clip, shape: Bucket, data: DataSection, start: int, cut: Crop, *, is_flipped: bool
) -> Window:
    frames = range(start, start + span(shape, data.frame_stride), data.frame_stride)
    return window_of(clip, frames, cut, shape.height, shape.width, is_flipped=is_flipped)


def window_of(
    clip: Clip, frames: range, cut: Crop, height: int, width: int, *, is_flipped: bool = False
) -> Window:
    """Some frames of a clip, scaled and then cut to a size."""
    return Window(
        identity=clip.identity,
        media=clip.media,
        kind=clip.kind,
        stream_index=clip.stream_index,
        rotation=clip.rotation,
        source_height=clip.height,
        source_width=clip.width,
        start=frames.start,
        num_frames=len(frames),
        stride=frames.step,
        timestamps=tuple(map(clip.timing.of, frames)) if clip.timing else (),
        seek_to=_keyframe_before(clip, frames.start),
        scaled_height=cut.scaled_height,
        scaled_width=cut.scaled_width,
        top=cut.top,
        left=cut.left,
        height=height,
        width=width,
        is_flipped=is_flipped,
    )


def starts(clip: Clip, shape: Bucket, data: DataSection) -> Sequence[int]:
    """First frames of the windows of a bucket's length that are used of a clip, ascending.

    All that it holds; with `data.windows` at most so many, from the first to the last at equal
    distances. A single one lies in the middle.
    """
    last = num_starts(clip, shape, data.frame_stride) - 1
    if data.windows is None or data.windows > last:
        return range(last + 1)
    if data.windows == 1:
        return [last // 2]
    gaps = data.windows - 1
    return [(2 * number * last + gaps) // (2 * gaps) for number in range(data.windows)]


def num_starts(clip: Clip, shape: Bucket, stride: int) -> int:
    return clip.num_frames - span(shape, stride) + 1


def is_only_window(clip: Clip, shape: Bucket, data: DataSection) -> bool:
    return len(starts(clip, shape, data)) == 1 and not data.random_crop


def _keyframe_before(clip: Clip, frame: int) -> int | None:
    """The timestamp of the keyframe that decoding may begin at; None: from the beginning."""
    place = bisect_right(clip.keyframes, frame)
    if clip.timing is None or not place or clip.keyframes[place - 1] == 0:
        return None
    return clip.timing.of(clip.keyframes[place - 1])


def _fraction(seed: int, what: str) -> float:
    """A number in [0, 1) that belongs to a sample."""
    return float(derive(seed, what) / 2**63)
