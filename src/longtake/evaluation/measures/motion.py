"""How fast what moves in a video moves, by an optical flow of our own.

The flow is that of Lucas and Kanade ("An iterative image registration technique with an application
to stereo vision", 1981), from coarse to fine as in Bouguet ("Pyramidal implementation of the Lucas
Kanade feature tracker", 2000), densely, on small pictures of the luma. Where there is no texture to
follow, the flow is drawn to 0. It is meant to be compared with itself, over checkpoints: flows of
other methods give other numbers, in much the same order.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from longtake.evaluation.measures.signals import Pixels, Signals

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
