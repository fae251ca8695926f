"""Which bucket, window and seed a clip is trained with: pure functions of clip, recipe and seed."""

import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.order import derive
from longtake.data.window import Crop, Window, crop

Rows = NDArray[np.uint32]  # of a catalog

TOO_SHORT = "too short for every bucket"
ONLY_STILLS = "a video that only buckets of 1 frame could take"

_SIZES = ("width", "height")
_ROUNDING_FRAMES = 1e-6  # times are floats, and frames begin at exact ones
_CHUNK = 2**20
_MAX_ROWS_ON_HEAP = 2**18  # a megabyte; more are mapped from a file


@dataclass(frozen=True)
class BucketAssignment:
    """Clips of a catalog, sorted into buckets."""

    shapes: tuple[Bucket, ...]
    rows: tuple[Rows, ...]  # for each bucket its clips, as rows of the catalog, ascending

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(rows) for rows in self.rows)

    def __len__(self) -> int:
        return sum(self.sizes)

    def all_rows(self) -> Rows:
        return np.concatenate(self.rows)


def sort_into_buckets(
    catalog: Catalog,
    rows: Rows,
    shapes: Sequence[Bucket],
    stride: int,
    *,
    stills: bool = False,
    fps: float | None = None,
) -> tuple[BucketAssignment, Counter[str]]:
    """Assign every clip to its best bucket, as `choose`; count those that fit none, by reason."""
    columns = [frame_counts(catalog, fps), *(catalog.column(name) for name in _SIZES)]
    taken: list[list[Rows]] = [[] for _ in shapes]
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        choice = _choose([column[chunk] for column in columns], shapes, stride, stills)
        order = np.argsort(choice.astype(np.int16), kind="stable")
        ends = np.searchsorted(choice[order], np.arange(len(shapes) + 1))
        for mine, (begin, end) in zip(taken, pairwise(ends), strict=True):
            mine.append(chunk[order[begin:end]])
    members = BucketAssignment(tuple(shapes), _stored(taken))
    dropped = len(rows) - len(members)
    has_stills = any(shape.num_frames == 1 for shape in shapes)  # long enough for these are all
    return members, Counter({ONLY_STILLS if has_stills else TOO_SHORT: dropped} if dropped else {})


def choose(
    catalog: Catalog,
    rows: Rows,
    shapes: Sequence[Bucket],
    stride: int,
    *,
    stills: bool = False,
    fps: float | None = None,
) -> NDArray[np.int64]:
    """For each clip the index of the bucket that keeps most of it, or -1 if none takes it.

    The nearest aspect ratio first (least cropped), then the most frames, then the nearest area.
    With `stills` a bucket of one frame takes videos too, otherwise only clips of one frame. With
    `fps` videos have as many frames as at that rate.
    """
    columns = [frame_counts(catalog, fps), *(catalog.column(name) for name in _SIZES)]
    return _choose([column[rows] for column in columns], shapes, stride, stills)


def frame_counts(catalog: Catalog, fps: float | None) -> NDArray[np.int64]:
    """[N] how many frames the clips have, at their own frame rates or at `fps`.

    A video that is shorter than two frames there has none: it is no image.
    """
    counts: NDArray[np.int64] = catalog.column("num_frames")
    if fps is None:
        return counts
    at_rate = _frames_in(catalog.column("duration_seconds"), fps)
    is_video = catalog.column("fps") > 0
    return np.where(is_video, np.where(at_rate > 1, at_rate, 0), counts)


def frame_count(clip: Clip, fps: float | None) -> int:
    if fps is None or clip.kind == "image":
        return clip.num_frames
    return int(_frames_in(np.array([clip.duration_seconds]), fps)[0])


def _frames_in(seconds: NDArray[np.float64], fps: float) -> NDArray[np.int64]:
    return np.floor(seconds * fps + _ROUNDING_FRAMES).astype(np.int64)


def frames_at(clip: Clip, numbers: range, fps: float) -> tuple[int, ...]:
    """Which frames of a video are shown when frames with these numbers are due at another rate."""
    due = np.array(numbers) / fps
    if clip.timing is not None and clip.timing.listed:
        ticks = np.array(clip.timing.listed, np.float64) - clip.timing.listed[0]
        # `fps` is the average over the timestamps: (number of frames - 1) / (last - first)
        begins = ticks * ((clip.num_frames - 1) / clip.fps / ticks[-1])
        rounding = _ROUNDING_FRAMES / clip.fps
        shown = np.searchsorted(begins, due + rounding, side="right") - 1
    else:
        shown = np.floor(due * clip.fps + _ROUNDING_FRAMES).astype(np.int64)
    return tuple(np.clip(shown, 0, clip.num_frames - 1).tolist())


def _choose(
    sizes: Sequence[NDArray[Any]], shapes: Sequence[Bucket], stride: int, stills: bool
) -> NDArray[np.int64]:
    # Millions of clips have few different sizes; each is compared with the buckets once.
    num_frames, widths, heights = (column.astype(np.int64) for column in sizes)
    spans = np.unique([1, 2, *(span(shape, stride) for shape in shapes)])  # 2: it is a video
    fits = np.searchsorted(spans, num_frames, side="right")  # how many spans are short enough
    key = (fits << 40) | (widths << 20) | heights
    kinds, which = np.unique(key, return_inverse=True)
    frames, side = np.concatenate([[0], spans])[kinds >> 40], 2**20 - 1
    widths, heights = (kinds >> 20) & side, kinds & side
    best = np.full(len(frames), -1)
    distance = np.full((3, len(frames)), np.inf)
    aspects, areas = np.log(widths / heights), np.log(widths * heights)
    for index, shape in enumerate(shapes):
        aspect = np.round(np.abs(aspects - np.log(shape.width / shape.height)), 2)
        area = np.abs(areas - np.log(shape.width * shape.height))
        here = np.stack([aspect, np.full(len(frames), -shape.num_frames), area])
        fits = frames >= span(shape, stride)
        if shape.num_frames == 1 and not stills:
            fits = frames == 1
        is_better = fits & _is_less(here, distance)
        best[is_better] = index
        distance[:, is_better] = here[:, is_better]
    return best[which]


def span(shape: Bucket, stride: int) -> int:
    return (shape.num_frames - 1) * stride + 1


def _is_less(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Compare the columns of two [3, N] arrays, the first row first."""
    first, second, third = one < other
    equal_first, equal_second, _ = one == other
    is_less: NDArray[np.bool_] = first | (equal_first & (second | (equal_second & third)))
    return is_less


def _stored(taken: Sequence[Sequence[Rows]]) -> tuple[Rows, ...]:
    """One array for each bucket; many rows are mapped from a file without a name, off the heap."""
    ends = np.cumsum([0, *(sum(map(len, chunks)) for chunks in taken)])
    everything = [chunk.astype(np.uint32, copy=False) for chunks in taken for chunk in chunks]
    if ends[-1] > _MAX_ROWS_ON_HEAP:
        with tempfile.TemporaryFile() as file:
            for chunk in everything:
                chunk.tofile(file)
            file.flush()
            rows: Rows = np.memmap(file, np.uint32, mode="r")
    else:
        rows = np.concatenate([np.empty(0, np.uint32), *everything])
    return tuple(rows[start:end] for start, end in pairwise(ends))


def sample_seed(run_seed: int, stage: str, source: str, epoch: int, clip: Clip) -> int:
    return derive(run_seed, "sample", f"{stage}/{source}", epoch, clip.identity)


def sample_window(clip: Clip, shape: Bucket, data: DataSection, seed: int) -> Window:
    """The window of a sample: where it begins, how it is cut and whether it is mirrored."""
    begins = starts(clip, shape, data)
    start = begins[seed % len(begins)]
    across, down = (_fraction(seed, axis) if data.random_crop else 0.5 for axis in "xy")
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
    frames: range | tuple[int, ...]
    frames = range(start, start + span(shape, data.frame_stride), data.frame_stride)
    if data.fps is not None and clip.kind == "video":
        frames = frames_at(clip, frames, data.fps)
    return window_of(clip, frames, cut, shape.height, shape.width, is_flipped=is_flipped)


def window_of(
    clip: Clip,
    frames: range | tuple[int, ...],
    cut: Crop,
    height: int,
    width: int,
    *,
    is_flipped: bool = False,
) -> Window:
    """Some frames of a clip, ascending, scaled and then cut to a size."""
    return Window(
        identity=clip.identity,
        media=clip.media,
        kind=clip.kind,
        stream_index=clip.stream_index,
        rotation=clip.rotation,
        source_height=clip.height,
        source_width=clip.width,
        start=frames[0],
        num_frames=len(frames),
        stride=frames.step if isinstance(frames, range) else 1,
        frames=() if isinstance(frames, range) else frames,
        timestamps=tuple(map(clip.timing.of, frames)) if clip.timing else (),
        seek_to=_keyframe_before(clip, frames[0]),
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
    last = num_starts(clip, shape, data.frame_stride, data.fps) - 1
    if data.windows is None or data.windows > last:
        return range(last + 1)
    if data.windows == 1:
        return [last // 2]
    gaps = data.windows - 1
    return [(2 * number * last + gaps) // (2 * gaps) for number in range(data.windows)]


def num_starts(clip: Clip, shape: Bucket, stride: int, fps: float | None = None) -> int:
    return frame_count(clip, fps) - span(shape, stride) + 1


def is_only_window(clip: Clip, shape: Bucket, data: DataSection) -> bool:
    return len(starts(clip, shape, data)) == 1 and not data.random_crop


def _keyframe_before(clip: Clip, frame: int) -> int | None:
    """The timestamp of the keyframe that decoding may begin at; None: from the beginning."""
    place = bisect_right(clip.keyframes, frame)
    if clip.timing is None or not place or clip.keyframes[place - 1] == 0:
        return None
    return clip.timing.of(clip.keyframes[place - 1])


def _fraction(seed: int, what: str) -> float:
    return float(derive(seed, what) / 2**63)
