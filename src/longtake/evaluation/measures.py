"""Measures of videos that need no weights, alarms for their drift, and ranges of training clips.

Formulas, ranges and limits: docs/concepts/measures.md.
"""

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import combinations, groupby, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from longtake import errors, fsio
from longtake.config import Bucket, DataSection, Recipe
from longtake.data.buckets import frame_counts, sample_window, span
from longtake.data.catalog import Catalog
from longtake.data.clip import Clip
from longtake.data.order import derive
from longtake.data.window import read_window
from longtake.evaluation_dir import Alarm, EvaluationDirectory, VideoScores
from longtake.run_dir import RunDirectory

Video = NDArray[np.uint8]
"""A video as a uint8 array [F, H, W, 3], RGB."""
Floats = NDArray[np.float64]
Pixels = NDArray[np.float32]

_LUMA = np.array([0.2126, 0.7152, 0.0722], np.float32)  # ITU-R BT.709, for RGB as it is stored
_MOST_THUMBNAIL_ROWS = 96


@dataclass(frozen=True)
class Signals:
    """Per-frame statistics of a video, which measures use: F frames, P = F - 1 neighbour pairs."""

    luma: Floats  # [F] mean of each frame, 0 to 255
    contrast: Floats  # [F] standard deviation of the luma
    saturation: Floats  # [F] mean over the pixels, 0 to 1
    edges: Floats  # [F] variance of the luma's Laplacian; [0] with fewer than 3 rows or columns
    change: Floats  # [P] mean absolute difference over all pixels and colours, 0 to 255
    thumbnails: Pixels  # [F, h, w] luma; each pixel is the mean of a square of `reduction` pixels
    reduction: int  # side of that square, in pixels of the video
    height: int  # rows of the video

    @classmethod
    def of(cls, video: Video) -> "Signals":
        """Compute the statistics of a video in one pass over its frames."""
        assert video.dtype == np.uint8, video.dtype
        assert video.ndim == 4, video.shape
        assert video.shape[-1] == 3, video.shape
        assert video.size, video.shape
        num_frames, height, width, _ = video.shape
        reduction = -(-min(height, width) // _MOST_THUMBNAIL_ROWS)
        rows = np.empty((num_frames, 4))
        size = (height // reduction, width // reduction)
        thumbnails = np.empty((num_frames, *size), np.float32)
        for number, frame in enumerate(video):
            grey: Pixels = frame.astype(np.float32) @ _LUMA
            rows[number] = grey.mean(), grey.std(), _saturation(frame), _edges(grey)
            thumbnails[number] = _reduced(grey, reduction)
        change = np.array([_change(*pair) for pair in pairwise(video)])
        luma, contrast, saturation, edges = rows.T
        edges = edges if min(height, width) >= 3 else edges[:0]
        return cls(luma, contrast, saturation, edges, change, thumbnails, reduction, height)


def _saturation(frame: Video) -> float:
    """Return a frame's mean of (max - min) / max of R, G and B, as in HSV; 0 for black pixels."""
    red, green, blue = np.ascontiguousarray(np.moveaxis(frame, -1, 0))
    largest = np.maximum(np.maximum(red, green), blue)
    smallest = np.minimum(np.minimum(red, green), blue)
    spread = largest - smallest
    return float(np.divide(spread, np.maximum(largest, 1), dtype=np.float32).mean())


def _edges(luma: Pixels) -> float:
    """Return the variance of a picture's Laplacian of four neighbours, without the border."""
    if min(luma.shape) < 3:
        return 0.0
    laplacian = luma[:-2, 1:-1] + luma[2:, 1:-1]
    laplacian += luma[1:-1, :-2]
    laplacian += luma[1:-1, 2:]
    laplacian -= 4 * luma[1:-1, 1:-1]
    return float(laplacian.var())


def _reduced(luma: Pixels, reduction: int) -> Pixels:
    """Shrink a picture: return the mean of each square of pixels, without incomplete squares."""
    height, width = (side // reduction for side in luma.shape)
    whole = luma[: height * reduction, : width * reduction]
    rows = whole.reshape(height, reduction, -1).sum(axis=1)
    sums: Pixels = rows.reshape(height, width, reduction).sum(axis=2)
    return sums / np.float32(reduction**2)


def _change(before: Video, after: Video) -> float:
    # uint8 has no negative numbers, so the absolute difference is that of maximum and minimum.
    difference = np.maximum(before, after) - np.minimum(before, after)
    return int(difference.sum(dtype=np.uint64)) / difference.size


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _slope(signals: Signals, fps: float) -> float | None:
    luma = signals.luma
    times = np.arange(len(luma)) - (len(luma) - 1) / 2
    return float(times @ luma / (times @ times)) * fps if len(luma) > 1 else None


_SAME = 0.5  # grey levels by which compression alone changes a frame that is shown again
_LEAST = 20.0  # grey levels by which a cut changes the picture, at least
_LEAD = 2.0  # multiple of the largest change around a cut
_REACH = 4  # pairs on each side that count as around it


def _cuts(signals: Signals, fps: float) -> float | None:
    """Count the cuts of a video: pairs of neighbouring frames that show different shots.

    At a cut the picture changes by 20 grey levels at least, and by twice as much as between any
    other two neighbours within four frames: flicker, flashes, fades and lasting motion do
    not count.
    """
    del fps
    change, found = signals.change, 0
    for pair, jump in enumerate(change):
        around = [*change[max(0, pair - _REACH) : pair], *change[pair + 1 : pair + 1 + _REACH]]
        found += bool(jump >= _LEAST and jump >= _LEAD * max(around, default=0.0))
    return float(found) if len(change) > 1 else None


Flow = NDArray[np.float32]
"""Optical flow [2, h, w]: pixels by which each pixel of a picture moves down and to the right."""

_LEVELS = 4
_LEAST_SIDE = 8
_WINDOW = 7
_ROUNDS = 2
_MOST_PER_ROUND = 1.5  # pixels of a level; a larger step means that the window has lost its way
_STIFFNESS = 2.0  # squared grey levels a pixel: smaller gradients are taken for noise
_FASTEST = 0.05  # share of the picture whose speed counts
_LEAST_CONTRAST = 0.5  # grey levels


def _motion(signals: Signals, fps: float) -> float | None:
    """Return the motion of a video: the fastest twentieth of the picture, % of height per second.

    It is the median over pairs, so that neither a cut nor a flash counts as motion. None: there is
    no pair, or the picture is too small to see motion in it.
    """
    pictures = signals.thumbnails
    if len(pictures) < 2 or min(pictures.shape[1:]) < _LEAST_SIDE:
        return None
    pixels = float(np.median([_fastest(*pair) for pair in pairwise(pictures)])) * signals.reduction
    return 100 * pixels * fps / signals.height


def _fastest(before: Pixels, after: Pixels) -> float:
    """Return the mean length in pixels of the longest twentieth of the flow between pictures."""
    if np.array_equal(before, after):
        return 0.0
    lengths = np.hypot(*_flow(before, after)).ravel()
    count = max(1, round(_FASTEST * lengths.size))
    return float(np.partition(lengths, -count)[-count:].mean())


def _flow(before: Pixels, after: Pixels) -> Flow:
    """Estimate the optical flow from one picture [h, w] to the next, from coarse to fine.

    The second picture first gets the mean and the contrast of the first, so that flickering light
    does not count as motion.
    """
    found: Flow = np.zeros((2, *before.shape), np.float32)
    # A plain picture shows no motion, and its contrast could not be scaled to that of another.
    if min(before.std(), after.std()) < _LEAST_CONTRAST:
        return found
    alike = (after - after.mean()) * (before.std() / after.std()) + before.mean()
    coarse_first = _pyramid(before, alike)[::-1]
    found = np.zeros((2, *coarse_first[0][0].shape), np.float32)
    for one, other in coarse_first:
        found = _refined(_enlarged(found, one.shape), one, other)
    return found


def _pyramid(*pictures: Pixels) -> list[tuple[Pixels, ...]]:
    """Return a pyramid's levels: the pictures, then copies of half the size until they are tiny."""
    levels: list[tuple[Pixels, ...]] = [pictures]
    while len(levels) < _LEVELS and min(levels[-1][0].shape) >= 2 * _LEAST_SIDE:
        height, width = (side // 2 for side in levels[-1][0].shape)
        even = (each[: 2 * height, : 2 * width] for each in levels[-1])
        squares = (each.reshape(height, 2, width, 2) for each in even)
        levels.append(tuple(each.mean(axis=(1, 3)) for each in squares))
    return levels


def _enlarged(found: Flow, shape: tuple[int, ...]) -> Flow:
    """Enlarge an optical flow to the next finer level; one of that shape is returned unchanged."""
    if found.shape[1:] == shape:
        return found
    sides = zip(shape, found.shape[1:], strict=True)
    rows, columns = (np.minimum(np.arange(new) // 2, old - 1) for new, old in sides)
    return 2 * found[:, rows][:, :, columns]


def _refined(found: Flow, before: Pixels, after: Pixels) -> Flow:
    """Improve an optical flow by least squares over a window around each pixel."""
    down, right = (np.asarray(each, np.float32) for each in np.gradient(before))
    # Normal equations of each window (Lucas and Kanade), solved below by Cramer's rule. The
    # stiffness on their diagonal keeps the flow small where there is no gradient to tell it.
    a, b, c = _blurred(down * down), _blurred(down * right), _blurred(right * right)
    a, c = a + _STIFFNESS, c + _STIFFNESS
    # Positive, as the stiffness makes the matrix definite.
    determinant = a * c - b * b
    ends = np.array(before.shape, np.float32).reshape(2, 1, 1) - 1
    for _ in range(_ROUNDS):
        # How much darker each pixel is where it has moved to; 0 if that is outside.
        places = np.indices(before.shape, np.float32) + found
        seen = ndimage.map_coordinates(after, places, order=1, mode="nearest")
        is_inside = ((places >= 0) & (places <= ends)).all(axis=0)
        late: Pixels = np.where(is_inside, before - seen, np.float32(0))
        y, x = _blurred(down * late), _blurred(right * late)
        step = np.stack([c * y - b * x, a * x - b * y]) / determinant
        found = found + np.clip(step, -_MOST_PER_ROUND, _MOST_PER_ROUND)
        # This carries the flow into areas where nothing can be seen to move.
        found = np.stack([_blurred(found[0]), _blurred(found[1])])
    return found


def _blurred(values: Pixels) -> Pixels:
    return ndimage.uniform_filter(values, _WINDOW, mode="nearest")


@dataclass(frozen=True)
class Known:
    """A built-in measure of a video; `find` is None where undefined (motion of one frame)."""

    find: Callable[[Signals, float], float | None]  # called with statistics and frames per second
    unit: str
    floor: float  # least base of a relative change, and least margin of a range
    bad: Literal["up", "down", "both", "none"]  # directions of a change that are a failure


MEASURES = {
    "brightness": Known(lambda s, _: _mean(s.luma), "grey levels", 16.0, "both"),
    "contrast": Known(lambda s, _: _mean(s.contrast), "grey levels", 8.0, "both"),
    "saturation": Known(lambda s, _: _mean(s.saturation), "share", 0.05, "both"),
    "sharpness": Known(lambda s, _: _mean(s.edges), "squared grey levels", 10.0, "down"),
    "flicker": Known(lambda s, _: _mean(np.abs(np.diff(s.luma, 2))), "grey levels", 0.5, "up"),
    "frame_change": Known(lambda s, _: _mean(s.change), "grey levels", 1.0, "none"),
    "motion": Known(_motion, "% of height a second", 5.0, "down"),
    "duplicate_frames": Known(lambda s, _: _mean(s.change < _SAME), "share", 0.1, "up"),
    "scene_jumps": Known(_cuts, "cuts", 0.5, "up"),
    "largest_jump": Known(lambda s, _: max(s.change, default=None), "grey levels", 4.0, "none"),
    "brightness_slope": Known(_slope, "grey levels a second", 4.0, "both"),
}


def measure(video: Video, fps: float) -> dict[str, float]:
    """Compute all built-in measures of a video that are defined for it.

    Args:
        video: [F, H, W, 3] uint8 RGB.
        fps: frames per second at which it is shown; motion and brightness_slope are per second.
    """
    signals = Signals.of(video)
    found = {name: known.find(signals, fps) for name, known in MEASURES.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def mean_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in measured for name in each)
    values = {name: [each[name] for each in measured if name in each] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def mean_of_size(videos: Iterable[VideoScores]) -> dict[str, float]:
    """Return the mean measures of those videos that have their preset's size.

    The training clips that they are compared with are read in that size.
    """
    own = {"num_frames", "height", "width"}
    return mean_of(
        [each["measures"] for each in videos if not own & each.get("settings", {}).keys()]
    )


_QUANTILES = 0.01, 0.5, 0.99
_MOST_UNREADABLE = 8
"""Number of unreadable clips at the beginning after which all are assumed to be on another
machine."""


@dataclass(frozen=True)
class Spread:
    """Distribution of a measure over training clips: 1 %, 50 % and 99 % quantiles, and mean."""

    low: float
    median: float
    high: float
    mean: float


@dataclass(frozen=True)
class Reference:
    """Measures of training clips, to which those of sampled videos are compared; kept as JSON."""

    num_clips: fsio.Count
    measures: Mapping[str, Spread]
    of: Mapping[str, Any] = field(default_factory=dict)  # everything that they depend on


def reference_of(
    run: RunDirectory,
    recipe: Recipe,
    preset: str,
    bucket: Bucket,
    fps: float,
    on_clip: Callable[[], None] | None = None,
) -> tuple[Reference | None, str]:
    """Return the measures of training clips to compare a preset with, cached or computed.

    None with a remark if the clips are missing.
    """
    path = EvaluationDirectory(run).reference_path(preset)
    catalogs = sorted(run.catalogs_path.glob("*.parquet"))
    # If any of this changes, the reference is made again.
    asked = {
        # The batch size changes no clip.
        "bucket": bucket.model_dump(exclude={"batch_size"}),
        "fps": fps,
        "clips": recipe.evaluation.reference_clips,
        "frame_stride": recipe.data.frame_stride,
        # Only if it is set, so that references from before this key existed stay valid.
        **({} if recipe.data.fps is None else {"data_fps": recipe.data.fps}),
        "catalogs": [each.stem for each in catalogs],
    }
    # A damaged reference is made again.
    with suppress(errors.RecordError):
        kept = fsio.read_record(path, Reference)
        if kept is not None and kept.of == asked:
            return kept, ""
    count = recipe.evaluation.reference_clips
    try:
        measured = _measured(run, catalogs, recipe.data, bucket, fps, on_clip)
        rows = list(islice(measured, count)) if count else []
    except errors.DataError as error:  # a clip's, a catalog's: they may lie on another machine
        return None, f"{preset} is compared with no training clips: {error}"
    if not rows:
        return None, ""
    spreads = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        low, median, high = np.quantile(values, _QUANTILES).tolist()
        spreads[name] = Spread(low, median, high, float(np.mean(values)))
    made = Reference(len(rows), spreads, asked)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several servers may make the same reference at once.
    fsio.write_json(path, asdict(made), by_many=True)
    return made, ""


def _measured(
    run: RunDirectory,
    catalogs: Sequence[Path],
    data: DataSection,
    bucket: Bucket,
    fps: float,
    on_clip: Callable[[], None] | None,
) -> Iterator[dict[str, float]]:
    """Yield the measures of the readable training clips, in the order of their identities."""
    any_read, unreadable = False, 0
    for clip in _clips(run, catalogs, bucket, data):
        if on_clip is not None:
            on_clip()
        # The same window of a clip, whenever the reference is made.
        seed = derive("reference", clip.identity)
        try:
            video = read_window(sample_window(clip, bucket, data, seed))
        except errors.ClipError:
            unreadable += 1
            if not any_read and unreadable == _MOST_UNREADABLE:
                raise
            continue
        any_read = True
        yield measure(np.ascontiguousarray(video.transpose(1, 2, 3, 0)), fps)


def _clips(
    run: RunDirectory, paths: Sequence[Path], bucket: Bucket, data: DataSection
) -> Iterator[Clip]:
    """Yield a run's clips of all catalogs that are long enough, each once, by identity.

    Identities are hashes, so the first ones are a random choice.
    """
    if not paths:
        raise errors.DataError(
            f"{run.catalogs_path} has no copies of the catalogs that were trained on."
        )
    num_frames = span(bucket, data.frame_stride)
    by_catalog = []
    for catalog in map(Catalog.load, paths):
        rows = np.flatnonzero(frame_counts(catalog, data.fps) >= num_frames).tolist()
        by_catalog.append(map(catalog.clip, rows))
    # Each catalog is in the order of identities, so that equal clips come one after the other.
    merged = heapq.merge(*by_catalog, key=lambda clip: clip.identity)
    is_any = False
    for _, equal_clips in groupby(merged, key=lambda clip: clip.identity):
        is_any = True
        yield next(equal_clips)
    if not is_any:
        raise errors.DataError(f"no clip has {num_frames} frames, as {bucket} takes.")


_MARGIN = 0.1
"""Margin around the training clips' range of a measure, as a share of that range: quantiles of a
few dozen clips are rough."""
DRIFT_CHECKPOINTS = 4
"""Number of checkpoints in a row at which a measure must rise (or fall) for an alarm. The same
number of first results is taken to show a model that still learns."""
DRIFT_CHANGE = 0.05
"""Least total change of a measure for a drift alarm, as a share of its `base`."""
_TREND_CHECKPOINTS, _TREND_SIGMAS, _TREND_CHANGE = 8, 3.0, 4.0
"""Test of trend, for the drift of a measure in steps or with relapses: least number of results,
least distance from no trend in standard deviations, and multiple of `DRIFT_CHANGE`."""


def find_drift(
    preset: str,
    history: Sequence[Mapping[str, float]],
    steps: Sequence[int],
    reference: Reference | None = None,
    *,
    checkpoints: int = DRIFT_CHECKPOINTS,
    change: float = DRIFT_CHANGE,
) -> list[Alarm]:
    """Return drift alarms: built-in measures that rose or fell at the last checkpoints, or overall.

    While a model learns, all measures move: results count from the checkpoint that `_learnt` gives.
    No alarm is given for a measure that has come nearer to the training clips, for one that moved
    in a direction that is no failure (`bad` of `MEASURES`), nor for a user's own measure, which may
    be meant to rise. Results are ordered by step; the change is stated as a share of `base`. A
    checkpoint that lacks a measure is skipped.
    """
    assert len(history) == len(steps)
    rows = dict(zip(steps, history, strict=True))
    alarms = []
    for name in dict.fromkeys(name for row in history for name in row if name in MEASURES):
        series = [(step, rows[step][name]) for step in sorted(rows) if name in rows[step]]
        values = [value for _, value in series]
        start = _learnt(name, values, checkpoints, reference)
        row = last_row(values)[-max(1, len(series) - start) :]
        share, how = (row[-1] - row[0]) / base(name, row), "checkpoints in a row"
        is_drift = len(row) > checkpoints and abs(share) >= change
        trend = values[start:]
        if not is_drift and len(trend) >= _TREND_CHECKPOINTS:
            # Medians of the first and the last third, as single results are noisy.
            third = len(trend) // 3
            ends = statistics.median(trend[:third]), statistics.median(trend[-third:])
            share, how = (ends[1] - ends[0]) / base(name, ends), "checkpoints on the whole"
            sigmas = trend_sigmas(trend) * (1 if share > 0 else -1)
            is_drift = sigmas >= _TREND_SIGMAS and abs(share) >= _TREND_CHANGE * change
            # The comparison with training clips and the message below use both ends of the row.
            row = [ends[0], *trend[1:-1], ends[1]]
        is_drift = is_drift and MEASURES[name].bad in ("both", "up" if share > 0 else "down")
        if is_drift and reference is not None and name in reference.measures:
            # A measure that ends nearer to the training clips' median than it began is learning.
            median = reference.measures[name].median
            is_drift = abs(row[-1] - median) >= abs(row[0] - median)
        if is_drift:
            first_step, last_step = series[-len(row)][0], series[-1][0]
            verb = "rose" if share > 0 else "fell"
            message = (
                f"{name} of {preset} {verb} {len(row) - 1} {how}, "
                f"{100 * share:+.0f} % (from step {first_step} to {last_step})."
            )
            alarms.append(Alarm(measure=name, kind="drift", message=message))
    return alarms


def _learnt(
    name: str, values: Sequence[float], checkpoints: int, reference: Reference | None
) -> int:
    """Return the index of the first value of a measure that counts, as the model has learnt.

    It is the last of the first `checkpoints` values, or the first one within the range of the
    training clips, whichever is later; the number of values if none is within that range.
    """
    inside = 0
    if reference is not None and name in reference.measures:
        low, high = _range(name, reference.measures[name])
        inside = next(
            (place for place, value in enumerate(values) if low <= value <= high), len(values)
        )
    return max(checkpoints - 1, inside)


def last_row(values: Sequence[float]) -> list[float]:
    """Return the longest end of a series that only rises or only falls; at least its last value."""
    directions = np.sign(np.diff(values))
    start = len(values) - 1
    while start > 0 and directions[start - 1] == directions[-1] != 0:
        start -= 1
    return list(values[start:])


def trend_sigmas(values: Sequence[float]) -> float:
    """Return a trend test's statistic in standard deviations; positive if the series rises.

    Of Mann (1945) and Kendall (1975): the number of pairs that rise minus that of pairs that fall,
    compared to random order. Equal values reduce its variance.
    """
    count = len(values)
    pairs = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    equal = (n * (n - 1) * (2 * n + 5) for n in Counter(values).values())
    variance = (count * (count - 1) * (2 * count + 5) - sum(equal)) / 18
    # The correction of a discrete statistic for continuity moves it toward 0 by one.
    return math.copysign(max(0, abs(pairs) - 1), pairs) / math.sqrt(variance) if variance else 0.0


def base(name: str, row: Sequence[float]) -> float:
    """Return the value by which a measure's change is divided, to state the change as a share.

    It is the first value, or `floor` if that is more: near 0 any change would be a multiple.
    """
    return max(abs(row[0]), MEASURES[name].floor) or 1.0


def find_out_of_range(
    preset: str, measures: Mapping[str, float], reference: Reference
) -> list[Alarm]:
    """Return alarms for measures outside of the range of 98 % of the training clips, with a margin.

    The margin is a tenth of that range, or the measure's `floor` if that is more.
    """
    alarms = []
    for name in (name for name in measures if name in reference.measures and name in MEASURES):
        value, span = measures[name], reference.measures[name]
        low, high = _range(name, span)
        if not low <= value <= high:
            message = (
                f"{name} of {preset} is {_short(value)}; of {reference.num_clips} training clips "
                f"98 % lie between {_short(span.low)} and {_short(span.high)}."
            )
            alarms.append(Alarm(measure=name, kind="range", message=message))
    return alarms


def _range(name: str, span: Spread) -> tuple[float, float]:
    margin = max(_MARGIN * (span.high - span.low), MEASURES[name].floor)
    return span.low - margin, span.high + margin


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
