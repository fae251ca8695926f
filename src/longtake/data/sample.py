"""Which pixels of a clip a sample is made of: a pure function of clip, shape, recipe and seed."""

from bisect import bisect_right

from longtake.config import Bucket, DataSection
from longtake.data.buckets import Crop, crop, span
from longtake.data.clip import Clip
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
    start = seed % num_starts(clip, shape, data.frame_stride)
    frames = range(start, start + span(shape, data.frame_stride), data.frame_stride)
    across, down = (_fraction(seed, axis) if data.random_crop else _MIDDLE for axis in "xy")
    cut = crop(clip.height, clip.width, shape, across, down)
    is_flipped = data.flip > 0 and _fraction(seed, "flip") < data.flip
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


def num_starts(clip: Clip, shape: Bucket, stride: int) -> int:
    """How many windows of a bucket's length a clip holds."""
    return clip.num_frames - span(shape, stride) + 1


def is_only_window(clip: Clip, shape: Bucket, data: DataSection) -> bool:
    """Whether every epoch wants the same pixels of a clip, mirrored or not."""
    return num_starts(clip, shape, data.frame_stride) == 1 and not data.random_crop


def _keyframe_before(clip: Clip, frame: int) -> int | None:
    """The timestamp of the keyframe that decoding may begin at; None: from the beginning."""
    place = bisect_right(clip.keyframes, frame)
    if clip.timing is None or not place or clip.keyframes[place - 1] == 0:
        return None
    return clip.timing.of(clip.keyframes[place - 1])


def _fraction(seed: int, what: str) -> float:
    """A number in [0, 1) that belongs to a sample."""
    return float(derive(seed, what) / 2**63)
