"""For each clip of a catalog: the bucket that a stage trains it in, or why it does not."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection, Stage
from longtake.data.buckets import Rows, sort_into_buckets
from longtake.data.catalog import Catalog
from longtake.data.stages import select

_ANY_CLIP = Bucket(num_frames=1, height=16, width=16)


@dataclass(frozen=True)
class Sieve:
    """Where each clip of a catalog stays in one stage; every clip has one bucket and one code.

    Attributes:
        shapes: the stage's buckets.
        reasons: why clips are dropped, in the order in which reasons are tried.
        home: [N] index of each clip's bucket: the one it is trained in, or would be were it not
            dropped. A clip that no bucket takes belongs to the one of the nearest aspect ratio,
            then of the nearest size, then of the fewest frames.
        code: [N] index of the reason for which a clip is dropped; -1: it is trained on.
        is_displaced: [N] whether a clip is trained in a bucket that crops more of it than another
            would for which it is too short.
    """

    shapes: tuple[Bucket, ...]
    reasons: tuple[str, ...]
    home: NDArray[np.int16]
    code: NDArray[np.int16]
    is_displaced: NDArray[np.bool_]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """[buckets, 1 + reasons] clips of each bucket: trained on, then dropped by reason."""
        shape = (len(self.shapes), 1 + len(self.reasons))
        flat = self.home.astype(np.int64) * shape[1] + self.code + 1
        return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)

    def kept(self, bucket: int) -> Rows:
        return np.flatnonzero((self.home == bucket) & (self.code < 0)).astype(np.uint32)

    def dropped(self, reason: int) -> Rows:
        return np.flatnonzero(self.code == reason).astype(np.uint32)


def sift(catalog: Catalog, stage: Stage, data: DataSection) -> Sieve:
    """Find out for each clip of a catalog what a stage does with it.

    Raises:
        DataError: as `longtake.data.stages.select`.
    """
    shapes = stage.buckets or data.buckets
    code = np.full(len(catalog), -1, np.int16)
    reasons: list[str] = []
    known: Counter[str] = Counter()
    is_left = np.ones(len(catalog), bool)
    for rows, dropped in _step_by_step(catalog, stage, data):
        still = np.zeros(len(catalog), bool)
        still[rows] = True
        for reason in dropped - known:  # one, or none if this step drops nobody
            code[is_left & ~still] = len(reasons)
            reasons.append(reason)
        is_left, known = still, dropped
    stills = data.stills_from_videos
    best = _best(catalog, dict(enumerate(shapes)), data.frame_stride, stills=stills)
    nearest = _nearest(catalog, shapes, stills)
    home = np.where(best < 0, nearest, best)
    is_closer = _off(catalog, shapes, nearest) < _off(catalog, shapes, home)
    return Sieve(shapes, tuple(reasons), home, code, is_closer & is_left)


def _step_by_step(
    catalog: Catalog, stage: Stage, data: DataSection
) -> Iterator[tuple[Rows, Counter[str]]]:
    """What is left, and what was dropped by reason, after each further thing that a stage asks.

    By the very function that training selects by, with fewer conditions: nothing is told here that
    does not happen there.
    """
    anything: dict[str, Any] = {"buckets": (_ANY_CLIP,), "drop_hardest": 0.0}
    steps = [anything | {"where": stage.where[:n]} for n in range(len(stage.where) + 1)]
    lenient = data.model_copy(update={"stills_from_videos": True})
    asked = [*((step, lenient) for step in [*steps, {"buckets": (_ANY_CLIP,)}]), ({}, data)]
    for step, section in asked:
        selection = select(catalog, stage.model_copy(update=step), section)
        yield selection.members.all_rows(), selection.dropped


def _nearest(catalog: Catalog, shapes: Sequence[Bucket], stills: bool) -> NDArray[np.int16]:
    """[N] the best bucket of every clip, were it long enough.

    Of a video the best of those of several frames, where there is one, unless all take videos.
    """
    brief = [shape.model_copy(update={"num_frames": 1}) for shape in shapes]
    order = sorted(range(len(shapes)), key=lambda index: shapes[index].num_frames)
    nearest = _best(catalog, {index: brief[index] for index in order}, 1, stills=True)
    of_videos = {index: brief[index] for index in order if shapes[index].num_frames > 1}
    if stills or len(of_videos) in (0, len(shapes)):
        return nearest
    is_video = catalog.column("num_frames") > 1
    return np.where(is_video, _best(catalog, of_videos, 1, stills=True), nearest)


def _best(
    catalog: Catalog, shapes: Mapping[int, Bucket], stride: int, *, stills: bool
) -> NDArray[np.int16]:
    """[N] the number of every clip's best bucket, or -1."""
    everyone = np.arange(len(catalog), dtype=np.uint32)
    members, _ = sort_into_buckets(catalog, everyone, list(shapes.values()), stride, stills=stills)
    best = np.full(len(catalog), -1, np.int16)
    for index, rows in zip(shapes, members.rows, strict=True):
        best[rows] = index
    return best


def _off(
    catalog: Catalog, shapes: Sequence[Bucket], bucket: NDArray[np.int16]
) -> NDArray[np.float64]:
    """[N] how far the aspect ratio of each clip is from that of some bucket, in per cent."""
    aspects = np.log(catalog.column("width") / catalog.column("height"))
    wanted = np.log([shape.width / shape.height for shape in shapes])
    off: NDArray[np.float64] = np.round(np.abs(aspects - wanted[bucket]), 2)
    return off
