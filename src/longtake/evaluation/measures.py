"""Measures of videos that need no weights; pure.

Formulas, ranges and limits: docs/concepts/measures.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Video = NDArray[np.uint8]
"""[F, H, W, 3] RGB."""
Floats = NDArray[np.float64]
Pixels = NDArray[np.float32]

_LUMA = np.array([0.2126, 0.7152, 0.0722], np.float32)  # ITU-R BT.709, of the RGB as it is stored
_MOST_THUMBNAIL_ROWS = 96


@dataclass(frozen=True)
class Signals:
    """Numbers of a video's frames; F frames, P = F - 1 pairs of neighbours.

    Attributes:
        luma: [F] mean luma of each frame, 0 to 255.
        contrast: [F] standard deviation of its luma.
        saturation: [F] mean saturation of its pixels, 0 to 1.
        edges: [F] variance of the Laplacian of its luma; None: fewer than 3 rows or columns.
        change: [P] mean absolute difference of neighbours over all pixels and colours, 0 to 255.
        thumbnails: [F, h, w] luma, each of its pixels the mean of a square of `reduction`.
        reduction: pixels of the video on a side of one of the thumbnails'.
        height: rows of the video.
    """

    luma: Floats
    contrast: Floats
    saturation: Floats
    edges: Floats | None
    change: Floats
    thumbnails: Pixels
    reduction: int
    height: int

    @classmethod
    def of(cls, video: Video) -> "Signals":
        """Look at each frame once."""
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
            grey = luma_of(frame)
            rows[number] = grey.mean(), grey.std(), _saturation(frame), _edges(grey)
            thumbnails[number] = _reduced(grey, reduction)
        change = [_change(*pair) for pair in pairwise(video)]
        edges = rows[:, 3] if min(height, width) >= 3 else None
        luma, contrast, saturation = rows[:, :3].T
        return cls(
            luma, contrast, saturation, edges, np.array(change), thumbnails, reduction, height
        )


def luma_of(frame: Video) -> Pixels:
    luma: Pixels = frame.astype(np.float32) @ _LUMA
    return luma


def _saturation(frame: Video) -> float:
    """Mean of (max - min) / max of the three colours, as in HSV; 0 where a pixel is black."""
    red, green, blue = np.ascontiguousarray(np.moveaxis(frame, -1, 0))
    largest = np.maximum(np.maximum(red, green), blue)
    smallest = np.minimum(np.minimum(red, green), blue)
    spread = largest - smallest
    return float(np.divide(spread, np.maximum(largest, 1), dtype=np.float32).mean())


def _edges(luma: Pixels) -> float:
    """Variance of the Laplacian of four neighbours, inside of the border."""
    if min(luma.shape) < 3:
        return 0.0
    laplacian = luma[:-2, 1:-1] + luma[2:, 1:-1]
    laplacian += luma[1:-1, :-2]
    laplacian += luma[1:-1, 2:]
    laplacian -= 4 * luma[1:-1, 1:-1]
    return float(laplacian.var())


def _reduced(luma: Pixels, reduction: int) -> Pixels:
    """Means of squares; what is left over at the right and below is left out."""
    height, width = (side // reduction for side in luma.shape)
    whole = luma[: height * reduction, : width * reduction]
    rows = whole.reshape(height, reduction, -1).sum(axis=1)
    sums: Pixels = rows.reshape(height, width, reduction).sum(axis=2)
    return sums / np.float32(reduction**2)


def _change(before: Video, after: Video) -> float:
    difference = np.maximum(before, after) - np.minimum(before, after)
    return int(difference.sum(dtype=np.uint64)) / difference.size


def brightness(signals: Signals, fps: float) -> float:
    del fps
    return float(signals.luma.mean())


def contrast(signals: Signals, fps: float) -> float:
    del fps
    return float(signals.contrast.mean())


def saturation(signals: Signals, fps: float) -> float:
    del fps
    return float(signals.saturation.mean())


def brightness_slope(signals: Signals, fps: float) -> float | None:
    luma = signals.luma
    times = np.arange(len(luma)) - (len(luma) - 1) / 2
    return float(times @ luma / (times @ times)) * fps if len(luma) > 1 else None


def flicker(signals: Signals, fps: float) -> float | None:
    """Mean absolute second difference of the frames' luma, 0 to 510; None: fewer than 3 frames.

    Light that rises or falls steadily has none; light that comes and goes has most.
    """
    del fps
    return float(np.abs(np.diff(signals.luma, 2)).mean()) if len(signals.luma) > 2 else None


def sharpness(signals: Signals, fps: float) -> float | None:
    """Variance of the Laplacian of the luma, mean over frames; squared grey levels, 0 and up.

    The focus measure of Pech-Pacheco et al. ("Diatom autofocusing in brightfield microscopy",
    2000) with the Laplacian of four neighbours, of pixels inside of the border. None: fewer than 3
    rows or columns.
    """
    del fps
    return None if signals.edges is None else float(signals.edges.mean())


_SAME = 0.5  # grey levels: what compression alone makes of a frame that is shown again


def frame_change(signals: Signals, fps: float) -> float | None:
    """Mean absolute difference of neighbouring frames, 0 to 255; None: one frame.

    Temporal flickering of VBench (Huang et al., 2023) is 1 - frame_change / 255.
    """
    del fps
    return float(signals.change.mean()) if len(signals.change) else None


def duplicate_frames(signals: Signals, fps: float) -> float | None:
    del fps
    return float(np.mean(signals.change < _SAME)) if len(signals.change) else None


_LEAST = 20.0  # grey levels
_LEAD = 2.0
_REACH = 4  # pairs


def cuts(signals: Signals) -> list[int]:
    """The pairs of neighbours (0: the first two frames) between which there is a cut.

    There the picture changes by 20 grey levels at least, and by twice as much as between any other
    two neighbours within four frames: flicker, a flash, a fade and lasting motion are none.
    """
    change = signals.change
    found = []
    for pair, jump in enumerate(change):
        around = [*change[max(0, pair - _REACH) : pair], *change[pair + 1 : pair + 1 + _REACH]]
        if jump >= _LEAST and jump >= _LEAD * max(around, default=0.0):
            found.append(pair)
    return found


def scene_jumps(signals: Signals, fps: float) -> float | None:
    del fps  # however long it takes, a cut is one
    return float(len(cuts(signals))) if len(signals.change) > 1 else None


def largest_jump(signals: Signals, fps: float) -> float | None:
    del fps
    return float(signals.change.max()) if len(signals.change) else None


Flow = NDArray[np.float32]
"""[2, h, w]: by how many pixels each moves down and to the right."""

_LEVELS = 4
_LEAST_SIDE = 8
_WINDOW = 7
_ROUNDS = 2
_MOST_PER_ROUND = 1.5  # pixels of a level; more is a window that has lost its way
_STIFFNESS = 2.0  # squared grey levels a pixel: gradients below that are taken for noise
_FASTEST = 0.05
_LEAST_CONTRAST = 0.5  # grey levels


def motion(signals: Signals, fps: float) -> float | None:
    """Speed of the fastest twentieth of the picture, median over pairs; % of its height a second.

    The median, so that neither a cut nor a flash passes for motion. None: there is no pair, or the
    picture is too small to see anything move in it.
    """
    pictures = signals.thumbnails
    if len(pictures) < 2 or min(pictures.shape[1:]) < _LEAST_SIDE:
        return None
    pixels = float(np.median([_fastest(*pair) for pair in pairwise(pictures)])) * signals.reduction
    return 100 * pixels * fps / signals.height


def _fastest(before: Pixels, after: Pixels) -> float:
    """Mean length of the longest twentieth of the flow, in pixels."""
    if np.array_equal(before, after):
        return 0.0
    lengths = np.hypot(*flow(before, after)).ravel()
    count = max(1, round(_FASTEST * lengths.size))
    return float(np.partition(lengths, -count)[-count:].mean())


def flow(before: Pixels, after: Pixels) -> Flow:
    """Where each pixel of a picture [h, w] goes until the next one.

    The second is first given the mean and the contrast of the first, so that light that flickers
    does not pass for motion.
    """
    found: Flow = np.zeros((2, *before.shape), np.float32)
    if min(before.std(), after.std()) < _LEAST_CONTRAST:
        return found
    alike = (after - after.mean()) * (before.std() / after.std()) + before.mean()
    coarse_first = _pyramid(before, alike)[::-1]
    found = np.zeros((2, *coarse_first[0][0].shape), np.float32)
    for one, other in coarse_first:
        found = _refined(_enlarged(found, one.shape), one, other)
    return found


def _pyramid(*pictures: Pixels) -> list[tuple[Pixels, ...]]:
    """The pictures, then each at half the size of the one before it, while they are not tiny."""
    levels: list[tuple[Pixels, ...]] = [pictures]
    while len(levels) < _LEVELS and min(levels[-1][0].shape) >= 2 * _LEAST_SIDE:
        levels.append(tuple(map(_halved, levels[-1])))
    return levels


def _halved(picture: Pixels) -> Pixels:
    height, width = (side // 2 * 2 for side in picture.shape)
    whole = picture[:height, :width].reshape(height // 2, 2, width // 2, 2)
    halved: Pixels = whole.mean(axis=(1, 3))
    return halved


def _enlarged(found: Flow, shape: tuple[int, ...]) -> Flow:
    """A flow of a coarser level, in the pixels of this one; itself where it is of this one."""
    if found.shape[1:] == shape:
        return found
    rows, columns = (np.minimum(np.arange(new) // 2, old - 1) for new, old in _sides(shape, found))
    return 2 * found[:, rows][:, :, columns]


def _sides(shape: tuple[int, ...], found: Flow) -> list[tuple[int, int]]:
    return list(zip(shape, found.shape[1:], strict=True))


def _refined(found: Flow, before: Pixels, after: Pixels) -> Flow:
    """A flow that is nearer to where a level's pixels go: least squares over a window of each."""
    down, right = (np.asarray(each, np.float32) for each in np.gradient(before))
    a, b, c = _blurred(down * down), _blurred(down * right), _blurred(right * right)
    a, c = a + _STIFFNESS, c + _STIFFNESS
    determinant = a * c - b * b
    for _ in range(_ROUNDS):
        late = _late(before, after, found)
        y, x = _blurred(down * late), _blurred(right * late)
        step = np.stack([c * y - b * x, a * x - b * y]) / determinant
        found = found + np.clip(step, -_MOST_PER_ROUND, _MOST_PER_ROUND)
        found = np.stack([_blurred(found[0]), _blurred(found[1])])
    return found


def _late(before: Pixels, after: Pixels, found: Flow) -> Pixels:
    """By how much each pixel is darker where it has gone; 0 where that is outside."""
    places = np.indices(before.shape, np.float32) + found
    seen = ndimage.map_coordinates(after, places, order=1, mode="nearest")
    ends = np.array(before.shape, np.float32).reshape(2, 1, 1) - 1
    is_inside = ((places >= 0) & (places <= ends)).all(axis=0)
    late: Pixels = np.where(is_inside, before - seen, np.float32(0))
    return late


def _blurred(values: Pixels) -> Pixels:
    blurred: Pixels = ndimage.uniform_filter(values, _WINDOW, mode="nearest")
    return blurred


@dataclass(frozen=True)
class Known:
    """One measure of ours."""

    find: Callable[[Signals, float], float | None]
    unit: str
    floor: float
    bad: Literal["up", "down", "both", "none"]


MEASURES = {
    "brightness": Known(brightness, "grey levels", 16.0, "both"),
    "contrast": Known(contrast, "grey levels", 8.0, "both"),
    "saturation": Known(saturation, "share", 0.05, "both"),
    "sharpness": Known(sharpness, "squared grey levels", 10.0, "down"),
    "flicker": Known(flicker, "grey levels", 0.5, "up"),
    "frame_change": Known(frame_change, "grey levels", 1.0, "none"),
    "motion": Known(motion, "% of height a second", 5.0, "down"),
    "duplicate_frames": Known(duplicate_frames, "share", 0.1, "up"),
    "scene_jumps": Known(scene_jumps, "cuts", 0.5, "up"),
    "largest_jump": Known(largest_jump, "grey levels", 4.0, "none"),
    "brightness_slope": Known(brightness_slope, "grey levels a second", 4.0, "both"),
}


def measure(video: Video, fps: float) -> dict[str, float]:
    """All measures that need no weights.

    Args:
        video: [F, H, W, 3] uint8 RGB.
        fps: frames a second that it is shown at; motion and brightness_slope are per second.
    """
    signals = Signals.of(video)
    found = {name: known.find(signals, fps) for name, known in MEASURES.items()}
    return {name: value for name, value in found.items() if value is not None}


def mean_of(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in measured for name in each)
    values = {name: [each[name] for each in measured if name in each] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
