"""Which shape a clip is trained in: a pure function of the clip's record and the recipe."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from longtake.config import Bucket
from longtake.data.catalog import Catalog, Clip
from longtake.errors import DataError


@dataclass(frozen=True)
class Crop:
    """How a frame becomes a bucket's size: scaled to cover it, then cut to it."""

    scaled_height: int
    scaled_width: int
    top: int
    left: int


@dataclass(frozen=True)
class Buckets:
    """The catalog's clips, sorted into the recipe's buckets."""

    shapes: tuple[Bucket, ...]
    clips: tuple[tuple[Clip, ...], ...]
    """For each bucket its clips, in the catalog's order."""
    dropped: Counter[str]
    """How many clips no bucket takes, by reason."""


def sort_into_buckets(catalog: Catalog, shapes: Sequence[Bucket], stride: int) -> Buckets:
    """Give every clip with a caption to its best bucket.

    Raises:
        DataError: not one clip can be trained on; says why, by count.
    """
    sorted_clips: list[list[Clip]] = [[] for _ in shapes]
    dropped: Counter[str] = Counter()
    for clip in catalog.clips:
        choice = choose(clip, shapes, stride)
        if not clip.caption:
            dropped["no caption"] += 1
        elif choice is None:
            dropped["too short for every bucket"] += 1
        else:
            sorted_clips[choice].append(clip)
    if not any(sorted_clips):
        raise DataError(_nothing_left(catalog, shapes, dropped))
    return Buckets(tuple(shapes), tuple(map(tuple, sorted_clips)), dropped)


def choose(clip: Clip, shapes: Sequence[Bucket], stride: int) -> int | None:
    """The index of the bucket that keeps most of a clip, or None if it is too short for all.

    The nearest aspect ratio first (least cropped), then the most frames, then the nearest area.
    """
    fits = [i for i, shape in enumerate(shapes) if clip.num_frames >= span(shape, stride)]
    return min(fits, key=lambda i: _distance(clip, shapes[i]), default=None)


def span(shape: Bucket, stride: int) -> int:
    """How many source frames a bucket's window covers."""
    return (shape.num_frames - 1) * stride + 1


def crop(clip: Clip, shape: Bucket) -> Crop:
    """Scale to cover the bucket, cut the middle."""
    scale = max(shape.height / clip.height, shape.width / clip.width)
    height = max(shape.height, round(clip.height * scale))
    width = max(shape.width, round(clip.width * scale))
    return Crop(height, width, (height - shape.height) // 2, (width - shape.width) // 2)


def _distance(clip: Clip, shape: Bucket) -> tuple[float, int, float]:
    aspect = abs(math.log(clip.width / clip.height) - math.log(shape.width / shape.height))
    area = abs(math.log(clip.width * clip.height) - math.log(shape.width * shape.height))
    return round(aspect, 2), -shape.num_frames, area


def _nothing_left(catalog: Catalog, shapes: Sequence[Bucket], dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{count} ({reason})" for reason, count in dropped.most_common())
    longest = max((clip.num_frames for clip in catalog.clips), default=0)
    count = len(catalog.clips)
    return (
        f"None of the catalog's {count} clips can be trained on: {reasons or 'it is empty'}. "
        f"The buckets are {', '.join(map(str, shapes))}; the longest clip has {longest} frames. "
        "Index clips with captions (longtake data index … --captions FILE.jsonl), or lower "
        "data.buckets' num_frames or data.frame_stride."
    )
