"""Which shape a clip is trained in: a pure function of the clip's record and the recipe."""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket
from longtake.data.catalog import Catalog

Rows = NDArray[np.uint32]
"""Rows of a catalog."""

TOO_SHORT = "too short for every bucket"
ONLY_STILLS = "a video that only buckets of 1 frame could take"

_CHUNK = 2**20
_MOST_ON_THE_HEAP = 2**18  # rows: a megabyte


@dataclass(frozen=True)
class Members:
    """Clips of a catalog, sorted into buckets."""

    shapes: tuple[Bucket, ...]
    rows: tuple[Rows, ...]
    """For each bucket its clips, as rows of the catalog, ascending."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(rows) for rows in self.rows)

    def __len__(self) -> int:
        return sum(self.sizes)

    def all_rows(self) -> Rows:
        return np.concatenate(self.rows)


def sort_into_buckets(
    catalog: Catalog, rows: Rows, shapes: Sequence[Bucket], stride: int, *, stills: bool = False
) -> tuple[Members, Counter[str]]:
    """Give every clip to its best bucket, as `choose` does.

    Returns:
        The buckets, and how many clips none of them takes, by reason.
    """
    sizes = _Sizes.of(catalog)
    taken: list[list[Rows]] = [[] for _ in shapes]
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        choice = _choose(sizes.at(chunk), shapes, stride, stills)
        for bucket, mine in enumerate(_grouped(chunk, choice, len(shapes))):
            taken[bucket].append(mine)
    members = Members(tuple(shapes), _stored(taken))
    dropped = len(rows) - len(members)
    has_stills = any(shape.num_frames == 1 for shape in shapes)  # long enough for these are all
    return members, Counter({ONLY_STILLS if has_stills else TOO_SHORT: dropped} if dropped else {})


def choose(
    catalog: Catalog, rows: Rows, shapes: Sequence[Bucket], stride: int, *, stills: bool = False
) -> NDArray[np.int64]:
    """For each clip the index of the bucket that keeps most of it, or -1 if none takes it.

    The nearest aspect ratio first (least cropped), then the most frames, then the nearest area.
    With `stills` a bucket of one frame takes videos too, otherwise only clips of one frame.
    """
    return _choose(_Sizes.of(catalog).at(rows), shapes, stride, stills)


class _Sizes(NamedTuple):
    """What decides the bucket of each of some clips."""

    frames: NDArray[Any]
    widths: NDArray[Any]
    heights: NDArray[Any]

    @classmethod
    def of(cls, catalog: Catalog) -> Self:
        return cls(*(catalog.column(name) for name in ("num_frames", "width", "height")))

    def at(self, rows: Rows) -> "_Sizes":
        return _Sizes(*(column[rows].astype(np.int64) for column in self))


def _choose(
    sizes: _Sizes, shapes: Sequence[Bucket], stride: int, stills: bool
) -> NDArray[np.int64]:
    """As `choose`. Millions of clips have few sizes, and each of these is judged once."""
    spans = np.unique([1, 2, *(span(shape, stride) for shape in shapes)])  # 2: it is a video
    fits = np.searchsorted(spans, sizes.frames, side="right")  # how many spans are short enough
    key = (fits << 40) | (sizes.widths << 20) | sizes.heights
    kinds, which = np.unique(key, return_inverse=True)
    frames, side = np.concatenate([[0], spans])[kinds >> 40], 2**20 - 1
    different = _Sizes(frames, (kinds >> 20) & side, kinds & side)
    return _judge(different, shapes, stride, stills)[which]


def _judge(sizes: _Sizes, shapes: Sequence[Bucket], stride: int, stills: bool) -> NDArray[np.int64]:
    frames, widths, heights = sizes
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
    return best


def _grouped(rows: Rows, choice: NDArray[np.int64], num_buckets: int) -> list[Rows]:
    order = np.argsort(choice.astype(np.int16), kind="stable")
    ends = np.searchsorted(choice[order], np.arange(num_buckets + 1))
    return [rows[order[start:end]] for start, end in pairwise(ends)]


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
    if ends[-1] > _MOST_ON_THE_HEAP:
        with tempfile.TemporaryFile() as file:
            for chunk in everything:
                chunk.tofile(file)
            file.flush()
            rows: Rows = np.memmap(file, np.uint32, mode="r")
    else:
        rows = np.concatenate([np.empty(0, np.uint32), *everything])
    return tuple(rows[start:end] for start, end in pairwise(ends))
