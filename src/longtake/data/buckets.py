"""Sorts clips into buckets (clip shapes), and chooses the window and seed of each sample.

All are pure functions of clip, recipe and seed.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress, pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longtake.config import Bucket, DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import HDR, Clip, is_turned
from longtake.data.decode import HD_LINES
from longtake.data.order import Indices, derive, permuted, shares
from longtake.data.window import Crop, Window, crop

Rows = NDArray[np.uint32]  # rows of a catalog

# Reasons why a clip has no bucket, in messages.
TOO_SHORT = "too short for every bucket"
NO_STILLS = "an image, and no bucket has one frame"
ONLY_STILLS = "a video that only buckets of 1 frame could take"
TOO_SMALL = "too small for every bucket, as data.upscale is false"
CROPPED = "cropped by more than data.max_crop"

_SIZES = ("width", "height")
_ROUNDING = 1e-9  # tolerance of shares
_MOST_MORE_CUT = 0.1  # a shared bucket may cut this much more than the best one
_ROUNDING_FRAMES = 1e-6  # tolerance of frames: times are floats, and frames begin at exact times
# Used in place of a bucket's index.
_NO_BUCKET, _TOO_MUCH_CUT, _NO_STILLS, _TOO_SMALL = -1, -2, -3, -4
_CHUNK = 2**18  # arrays of this many rows stay in the processor's cache
_MAX_ROWS_ON_HEAP = 2**18  # one megabyte; larger arrays are mapped from a file


@dataclass(frozen=True)
class SharedClips:
    """Clips of which several buckets (clip shapes) get a different part in each epoch."""

    rows: Rows
    weights: tuple[float, ...]  # share that each bucket gets; they sum to 1

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Cumulative sizes of the buckets' parts of these clips, which each epoch permutes."""
        return tuple(accumulate(shares(len(self.rows), self.weights)))


@dataclass(frozen=True)
class BucketAssignment:
    """Clips of a catalog, sorted into buckets (clip shapes).

    A bucket has the same number of clips in each epoch: its own, then a part of each of `shared`.
    Positions count along this list.
    """

    shapes: tuple[Bucket, ...]
    rows: tuple[Rows, ...]  # own clips of each bucket, as ascending rows of the catalog
    shared: tuple[SharedClips, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of clips of each bucket in an epoch."""
        # `ends` of shared clips are cumulative, so their differences are the parts of each bucket.
        own = np.array([len(rows) for rows in self.rows], np.int64)
        return tuple(sum((np.diff(each.ends, prepend=0) for each in self.shared), own).tolist())

    def __len__(self) -> int:
        return sum(map(len, self.rows)) + sum(len(each.rows) for each in self.shared)

    def all_rows(self) -> Rows:
        return np.concatenate([*self.rows, *(each.rows for each in self.shared)])

    def candidates(self, bucket: int) -> Rows:
        """Return the catalog rows of all clips that a bucket has in at least one epoch."""
        taken = (each.rows for each in self.shared if each.weights[bucket])
        return np.concatenate([self.rows[bucket], *taken]) if self.shared else self.rows[bucket]

    def rows_at(self, bucket: int, positions: Indices, epochs: Indices, *key: int | str) -> Rows:
        """Return the catalog rows [N] of the clips at positions of a bucket, each in its epoch.

        `key` sets the order of clips that buckets share.
        """
        own = self.rows[bucket]
        if not self.shared:
            return own[positions]
        found, is_own = np.empty(len(positions), np.uint32), positions < len(own)
        found[is_own] = own[positions[is_own]]
        begin = len(own)
        for number, each in enumerate(self.shared):
            first, end = (0, *each.ends)[bucket : bucket + 2]
            if first == end:
                continue
            is_here = (positions >= begin) & (positions < begin + end - first)
            # Each epoch permutes shared clips in another way, and a batch can hold samples of two
            # epochs.
            for epoch in np.unique(epochs[is_here]).tolist():
                mine = is_here & (epochs == epoch)
                places = positions[mine] - begin + first
                which = permuted(places, len(each.rows), *key, "shares", epoch, number)
                found[mine] = each.rows[which]
            begin += end - first
        return found

    def filtered(self, keep: Callable[[Rows], NDArray[np.bool_]]) -> "BucketAssignment":
        """Return this assignment of clips to buckets with only the clips that `keep` accepts.

        Of these, each epoch moves the fractions that `Bucket.share` names to other buckets.
        """
        rows = tuple(mine[keep(mine)] for mine in self.rows)
        shared = (SharedClips(each.rows[keep(each.rows)], each.weights) for each in self.shared)
        return BucketAssignment(self.shapes, rows, tuple(each for each in shared if len(each.rows)))


def sort_into_buckets(
    catalog: Catalog,
    rows: Rows,
    shapes: Sequence[Bucket],
    stride: int,
    *,
    stills: bool = False,
    fps: float | None = None,
    max_crop: float | None = None,
    upscale: bool = True,
    has_shares: bool = False,
) -> tuple[BucketAssignment, Counter[str]]:
    """Assign each clip to its best bucket (see `choose`); count clips that fit none, by reason.

    With `has_shares`, clips also go to fitting buckets with a `share`; see `Bucket.share`.
    """
    sharing = [i for i, shape in enumerate(shapes) if has_shares and shape.share is not None]
    others = [shapes[index] for index in sharing]
    taken: dict[tuple[int, ...], list[Rows]] = {}  # key: best bucket, flags of `sharing`
    for chunk, part, within in _chunks(catalog, rows):
        kinds, which = _kinds(part, within, shapes, stride, fps)
        best = _best_bucket(kinds, shapes, stride, stills=stills, upscale=upscale)
        cut = _cuts(kinds, shapes)[np.arange(len(best)), np.maximum(best, 0)]
        best[(best == _NO_BUCKET) & (kinds.frames == 1)] = _NO_STILLS
        if max_crop is not None:
            best[(best >= 0) & (cut > max_crop + _ROUNDING)] = _TOO_MUCH_CUT
        # A shared bucket may crop slightly more than the best one, but must never scale a clip up.
        most = np.minimum(cut + _MOST_MORE_CUT, np.inf if max_crop is None else max_crop)
        also = _fits(kinds, others, stride, stills=stills)
        also &= _cuts(kinds, others) <= most[:, None] + _ROUNDING
        also &= _covers(kinds, others)
        also &= (best[:, None] >= 0) & (best[:, None] != sharing)
        # Work on the few distinct kinds, and spread the result over millions of clips at the end.
        groups, group = np.unique(np.column_stack([best, also]), axis=0, return_inverse=True)
        choice = group.astype(np.min_scalar_type(len(groups))).take(which)
        ordered = chunk.take(np.argsort(choice, kind="stable"))  # one byte: sorted in one pass
        ends = np.cumsum(np.bincount(choice, minlength=len(groups)))
        for key, (begin, end) in zip(groups.tolist(), pairwise([0, *ends]), strict=True):
            taken.setdefault(tuple(key), []).append(ordered[begin:end])
    alone = (0,) * len(sharing)
    unfit, stills_left, small, cropped = (
        sum(map(len, taken.pop((why, *alone), [])))
        for why in (_NO_BUCKET, _NO_STILLS, _TOO_SMALL, _TOO_MUCH_CUT)
    )
    own = [taken.pop((index, *alone), []) for index in range(len(shapes))]
    shared = sorted(taken, key=lambda key: (key[0], key[:0:-1]))
    stored = _stored([*own, *(taken[key] for key in shared)])
    members = BucketAssignment(
        tuple(shapes),
        stored[: len(shapes)],
        tuple(
            SharedClips(some, _weights(shapes, best, list(compress(sharing, also))))
            for (best, *also), some in zip(shared, stored[len(shapes) :], strict=True)
        ),
    )
    has_stills = any(shape.num_frames == 1 for shape in shapes)  # all are long enough
    too_short = ONLY_STILLS if has_stills else TOO_SHORT
    dropped = {too_short: unfit, NO_STILLS: stills_left, TOO_SMALL: small, CROPPED: cropped}
    return members, Counter({reason: count for reason, count in dropped.items() if count})


def shares_cut(catalog: Catalog, rows: Rows, shape: Bucket) -> NDArray[np.float64]:
    """Return the share [N] of each clip's picture that the crop to a bucket removes."""
    across = shape.width / catalog.column("width")[rows]
    down = shape.height / catalog.column("height")[rows]
    # The picture is scaled by the larger ratio to cover the bucket. The share min / max remains.
    return 1 - np.minimum(across, down) / np.maximum(across, down)


def _weights(shapes: Sequence[Bucket], best: int, others: Collection[int]) -> tuple[float, ...]:
    # Shares above 1 in total are scaled down, and the best bucket then gets nothing.
    given = {index: shapes[index].share or 0.0 for index in others}
    total = sum(given.values())
    weights = {index: share / max(1.0, total) for index, share in given.items()}
    weights[best] = max(0.0, 1 - total)
    return tuple(weights.get(index, 0.0) for index in range(len(shapes)))


def choose(
    catalog: Catalog,
    rows: Rows,
    shapes: Sequence[Bucket],
    stride: int,
    *,
    stills: bool = False,
    fps: float | None = None,
    upscale: bool = True,
) -> NDArray[np.int16]:
    """Return for each clip the index of the bucket (clip shape) that keeps most of it, or -1.

    The nearest aspect ratio comes first (least cropped), then the most frames, then the nearest
    area. With `stills` a bucket of one frame takes videos too, otherwise only clips of one frame.
    With `fps` a video's frames are counted at that rate. Without `upscale` no bucket is chosen that
    would enlarge the clip. Results are in the order of `rows`.
    """
    chosen = [np.empty(0, np.int16)]
    for _, part, within in _chunks(catalog, rows):
        kinds, which = _kinds(part, within, shapes, stride, fps)
        best = _best_bucket(kinds, shapes, stride, stills=stills, upscale=upscale)
        chosen.append(np.maximum(best, _NO_BUCKET).take(which))
    return np.concatenate(chosen)


def _chunks(catalog: Catalog, rows: Rows) -> Iterator[tuple[Rows, Catalog, Rows | slice]]:
    """Split ascending catalog rows into parts; yield each with the slice of the catalog it is in.

    Each part is small, so that its columns are read from the mapped file without a copy of all.
    """
    edges = np.arange(_CHUNK, len(catalog), _CHUNK).astype(rows.dtype)  # else all rows are cast
    for begin, end in pairwise([0, *np.searchsorted(rows, edges), len(rows)]):
        if begin < end:
            chunk = rows[begin:end]
            first, count = int(chunk[0]), int(chunk[-1]) - int(chunk[0]) + 1
            part = replace(catalog, table=catalog.table.slice(first, count))
            yield chunk, part, slice(None) if len(chunk) == count else chunk - chunk[0]


def frame_counts(catalog: Catalog, fps: float | None) -> NDArray[np.int64]:
    """Return the number of frames of each clip [N], at its own rate or at `fps`.

    A video shorter than two frames at that rate counts as 0, because it is not an image.
    """
    counts: NDArray[np.int64] = catalog.column("num_frames")
    if fps is None:
        return counts
    at_rate = _frames_in(catalog.column("duration_seconds"), fps)
    is_video = catalog.column("fps") > 0
    return np.where(is_video, np.where(at_rate > 1, at_rate, 0), counts)


def frame_count(clip: Clip, fps: float | None) -> int:
    """Return the number of frames of a clip, at its own rate or at `fps`."""
    if fps is None or clip.kind == "image":
        return clip.num_frames
    return int(_frames_in(np.array([clip.duration_seconds]), fps)[0])


def _frames_in(seconds: NDArray[np.float64], fps: float) -> NDArray[np.int64]:
    return np.floor(seconds * fps + _ROUNDING_FRAMES).astype(np.int64)


def frames_at(clip: Clip, numbers: range, fps: float) -> tuple[int, ...]:
    """Return the frames of a video that are shown at the times of given frames at another rate."""
    due = np.array(numbers) / fps
    if clip.timing is not None and clip.timing.listed:
        ticks = np.array(clip.timing.listed, np.float64) - clip.timing.listed[0]
        # `fps` is the average over the timestamps: (number of frames - 1) / (last - first).
        begins = ticks * ((clip.num_frames - 1) / clip.fps / ticks[-1])
        rounding = _ROUNDING_FRAMES / clip.fps
        # With a variable frame rate, the frame on screen is the last one that has begun.
        shown = np.searchsorted(begins, due + rounding, side="right") - 1
    else:
        shown = np.floor(due * clip.fps + _ROUNDING_FRAMES).astype(np.int64)
    return tuple(np.clip(shown, 0, clip.num_frames - 1).tolist())


@dataclass(frozen=True)
class _Kinds:
    """Distinct sizes and frame counts (kinds) of clips, as arrays [K].

    Frame counts are rounded down to those that buckets distinguish.
    """

    frames: NDArray[np.int64]
    widths: NDArray[np.int64]
    heights: NDArray[np.int64]


def _kinds(
    catalog: Catalog, rows: Rows | slice, shapes: Sequence[Bucket], stride: int, fps: float | None
) -> tuple[_Kinds, NDArray[np.int32]]:
    """Return the few distinct sizes of clips among millions, and the index of each clip's."""
    spans = np.unique([1, 2, *(span(shape, stride) for shape in shapes)])  # 2: videos
    num_frames = frame_counts(catalog, fps)[rows]
    fits = np.zeros(len(num_frames), np.min_scalar_type(len(spans)))
    for shortest in spans.tolist():
        fits += (num_frames >= shortest).view(np.uint8)  # counts the spans that fit
    key = fits.astype(np.int64)
    for name in _SIZES:
        # Width and height are below 2^20 (see `catalog`), so a kind fits into 64 bits.
        key <<= 20
        key |= catalog.column(name)[rows]
    encoded = pa.array(key).dictionary_encode()  # hashed, as np.unique sorts
    kinds, side = encoded.dictionary.to_numpy(), 2**20 - 1
    frames = np.concatenate([[0], spans])[kinds >> 40]
    return _Kinds(frames, (kinds >> 20) & side, kinds & side), encoded.indices.to_numpy()


def _fits(
    kinds: _Kinds, shapes: Sequence[Bucket], stride: int, *, stills: bool
) -> NDArray[np.bool_]:
    """Return true [K, S] where clips of a size have enough frames for a bucket.

    A bucket of one frame takes videos only with `stills`.
    """
    frames, num_frames = kinds.frames[:, None], np.array([each.num_frames for each in shapes])
    fits: NDArray[np.bool_] = frames >= np.array([span(shape, stride) for shape in shapes])
    return fits if stills else fits & ((num_frames > 1) | (frames == 1))


def _covers(kinds: _Kinds, shapes: Sequence[Bucket]) -> NDArray[np.bool_]:
    """Return true [K, S] where clips of a size need not be enlarged for a bucket."""
    is_wide = kinds.widths[:, None] >= np.array([shape.width for shape in shapes])
    return is_wide & (kinds.heights[:, None] >= np.array([shape.height for shape in shapes]))


def _cuts(kinds: _Kinds, shapes: Sequence[Bucket]) -> NDArray[np.float64]:
    """Return the share of the picture [K, S] that the crop of each size to a bucket removes."""
    across = np.array([shape.width for shape in shapes]) / kinds.widths[:, None]
    down = np.array([shape.height for shape in shapes]) / kinds.heights[:, None]
    return 1 - np.minimum(across, down) / np.maximum(across, down)


def _best_bucket(
    kinds: _Kinds, shapes: Sequence[Bucket], stride: int, *, stills: bool, upscale: bool
) -> NDArray[np.int16]:
    """Return the index of the best bucket [K] for each size of clips, by the rules of `choose`.

    Of a size without any it is `_NO_BUCKET`, or `_TOO_SMALL` if one would enlarge the clips.
    """
    fits = _fits(kinds, shapes, stride, stills=stills)
    is_best = fits if upscale else fits & _covers(kinds, shapes)
    otherwise = np.where(fits.any(axis=1), _TOO_SMALL, _NO_BUCKET)
    aspects = np.log(kinds.widths / kinds.heights)[:, None]
    # Rounded to 2 digits, so that nearly equal aspect ratios leave the choice to the frames.
    aspect = np.round(np.abs(aspects - np.log([each.width / each.height for each in shapes])), 2)
    areas = np.log(kinds.widths * kinds.heights)[:, None]
    area = np.abs(areas - np.log([each.width * each.height for each in shapes]))
    has_any = is_best.any(axis=1)
    # Each criterion only decides among the buckets that all earlier ones find equal.
    for distance in (aspect, np.array([-each.num_frames for each in shapes]), area):
        distance = np.where(is_best, distance, np.inf)
        is_best &= distance == distance.min(axis=1, keepdims=True)
    return np.where(has_any, is_best.argmax(axis=1), otherwise).astype(np.int16)


def span(shape: Bucket, stride: int) -> int:
    """Return the number of source frames that a window of a bucket spans."""
    return (shape.num_frames - 1) * stride + 1


def _stored(taken: Sequence[Sequence[Rows]]) -> tuple[Rows, ...]:
    """Join the catalog rows of each bucket to one array; large ones lie in a temporary file."""
    ends = np.cumsum([0, *(sum(map(len, chunks)) for chunks in taken)])
    empty = np.empty(0, np.uint32)
    buckets = (np.concatenate([empty, *chunks], dtype=np.uint32) for chunks in taken)
    if ends[-1] > _MAX_ROWS_ON_HEAP:
        with tempfile.TemporaryFile() as file:
            for bucket in buckets:
                bucket.tofile(file)
            file.flush()
            # The mapping outlives the deleted file, and the kernel drops its pages when memory is
            # short.
            rows: Rows = np.memmap(file, np.uint32, mode="r")
    else:
        rows = np.concatenate([empty, *buckets])
    return tuple(rows[start:end] for start, end in pairwise(ends))


def sample_seed(run_seed: int, stage: str, source: str, epoch: int, clip: Clip) -> int:
    """Return the seed of a sample's random choices, equal for every rank and resumption."""
    return derive(run_seed, "sample", f"{stage}/{source}", epoch, clip.identity)


def sample_window(clip: Clip, shape: Bucket, data: DataSection, seed: int) -> Window:
    """Return the window that a sample is trained on: first frame, crop, and mirrored or not."""
    # The seed has 63 random bits, so the bias of the remainder is negligible.
    begins = starts(clip, shape, data)
    start = begins[seed % len(begins)]
    across, down = (_fraction(seed, axis) if data.random_crop else 0.5 for axis in "xy")
    cut = crop(clip.height, clip.width, shape, across, down)
    is_flipped = data.flip > 0 and _fraction(seed, "flip") < data.flip
    return _window(clip, shape, data, start, cut, is_flipped=is_flipped)


def all_windows(clip: Clip, shape: Bucket, data: DataSection) -> list[Window]:
    """Return every window that samples of a clip can have, if crops are not random."""
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
    return window_of(
        clip,
        frames,
        cut,
        shape.height,
        shape.width,
        is_flipped=is_flipped,
        untagged=data.untagged,
        tone_maps=data.hdr == "tone_map",
    )


def window_of(
    clip: Clip,
    frames: range | tuple[int, ...],
    cut: Crop,
    height: int,
    width: int,
    *,
    is_flipped: bool = False,
    untagged: str = "bt709",
    tone_maps: bool = True,
) -> Window:
    """Return the window with these frames of a clip, which are scaled and then cut to a size."""
    # Players decide by the lines as stored, before the picture is turned.
    lines = clip.width if is_turned(clip.rotation) else clip.height
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
        seek_to=clip.keyframe_before(frames[0]),
        scaled_height=cut.scaled_height,
        scaled_width=cut.scaled_width,
        top=cut.top,
        left=cut.left,
        height=height,
        width=width,
        is_flipped=is_flipped,
        untagged=untagged,
        is_untagged=clip.kind == "video" and not clip.color_matrix and lines >= HD_LINES,
        hdr=clip.color_transfer if tone_maps and clip.color_transfer in HDR else "",
    )


def starts(clip: Clip, shape: Bucket, data: DataSection) -> Sequence[int]:
    """Return the first frames of the windows that a clip has for a bucket, ascending.

    These are all possible ones; with `data.windows`, at most that many, from the first to the last
    at equal distances. A single one lies in the middle, or where `data.window` says.
    """
    last = num_starts(clip, shape, data.frame_stride, data.fps) - 1
    if data.window == "head":
        return [0]
    if data.window == "spread" and (data.windows is None or data.windows > last):
        return range(last + 1)
    if data.windows is None or data.windows == 1:
        return [last // 2]
    gaps = data.windows - 1
    # round(number * last / gaps) in integers, equal on every machine.
    return [(2 * number * last + gaps) // (2 * gaps) for number in range(data.windows)]


def num_starts(clip: Clip, shape: Bucket, stride: int, fps: float | None = None) -> int:
    """Return the number of places in a clip where a bucket's window may begin."""
    return frame_count(clip, fps) - span(shape, stride) + 1


def is_only_window(clip: Clip, shape: Bucket, data: DataSection) -> bool:
    return len(starts(clip, shape, data)) == 1 and not data.random_crop


def _fraction(seed: int, what: str) -> float:
    return float(derive(seed, what) / 2**63)
