"""Reads what a clip of the shapes world shows from its pixels alone, and checks its caption.

It does not guess: whatever is not one steady object of a known shape, colour and direction is read
as `None`, which counts as wrong.
"""

import colorsys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.demo.shapes import COLOURS, DIRECTIONS, SHAPES, coverage, parse_caption
from longtake.errors import DataError

# Least distance between object and background in RGB, with each colour in [0, 1].
_LEAST_CONTRAST = 0.35
# The object's share of a frame: a cross of radius 6.5 is a tenth of 32x32, a square of 8 a fifth.
_LEAST_COVERED, _MOST_COVERED = 0.04, 0.4
# Largest to smallest area of the object: it may cross the edge, but not appear and vanish.
_MOST_AREA_RATIO = 1.6
_LEAST_SATURATION = 0.4
_MOST_HUE_ERROR = 22.0  # degrees; half the distance between two colours is 30
_LEAST_AGREEMENT = 0.68  # soft intersection over union of object and template
_LEAST_LEAD = 0.03  # difference to the agreement with the second best template
_LEAST_TRAVEL = 0.12  # way from the first to the last frame, as a share of the height
_MOST_ANGLE_ERROR = 18.0  # degrees; half the distance between two directions is 22.5
_MOST_STRAY = 0.2  # root mean square distance from a steady course, as a share of the travel


@dataclass(frozen=True)
class Reading:
    """Contents that were read from a clip's pixels; a field that cannot be read is `None`."""

    shape: str | None
    colour: str | None
    direction: str | None


def read(frames: NDArray[np.uint8]) -> Reading:
    """Return the shape, the colour and the direction that a clip of the shapes world shows.

    Args:
        frames: [F, H, W, 3] uint8 RGB, at least two frames.
    """
    pixels = frames.astype(np.float64) / 255
    rows, columns = np.mgrid[: pixels.shape[1], : pixels.shape[2]]
    is_border = (rows % (len(rows) - 1) == 0) | (columns % (columns.shape[1] - 1) == 0)
    background = np.median(pixels[:, is_border].reshape(-1, 3), axis=0)
    contrast = np.linalg.norm(pixels - background, axis=-1)
    # The object covers more than 3 % of the pixels, so this quantile is one of its pixels.
    peak = np.quantile(contrast, 0.97)
    if peak < _LEAST_CONTRAST:
        return Reading(None, None, None)
    object_rgb: NDArray[np.float64] = np.median(pixels[contrast > 0.75 * peak], axis=0)
    # Each pixel's share [F, H, W] of the object's colour: it is projected onto the line from the
    # background's colour to the object's.
    way = object_rgb - background
    covered = np.clip((pixels - background) @ way / max(float(way @ way), 1e-9), 0.0, 1.0)
    covered[covered < 0.25] = 0.0  # ignore a sloping background and faint ghosts
    areas = covered.sum(axis=(1, 2))
    share = areas / covered[0].size
    if share.min() <= _LEAST_COVERED or share.max() >= _MOST_COVERED:
        return Reading(None, None, None)
    if areas.max() / areas.min() >= _MOST_AREA_RATIO:
        return Reading(None, None, None)
    # Each frame's centroid as (x, y) in pixels, [F, 2].
    sums = [(covered * places).sum(axis=(1, 2)) for places in (columns, rows)]
    centres = np.stack(sums, axis=1) / areas[:, None]
    return Reading(_shape(covered, centres), _colour(object_rgb), _direction(centres, covered))


def shows(video: NDArray[np.uint8], caption: str) -> bool:
    """Return whether a video [F, H, W, 3] uint8 of the shapes world shows its caption."""
    wanted = parse_caption(caption)
    return read(video) == Reading(wanted.shape, wanted.colour, wanted.direction)


class Adherence:
    """A measure: 1 if a video shows the shape, colour and direction of its prompt, else 0.

    A measure for presets: `measures = ["longtake.demo.oracle:Adherence"]`. It is undefined for
    prompts that are not of the shapes world, and for images, in which nothing moves.
    """

    name = "adherence"

    def __call__(
        self, videos: Sequence[NDArray[np.uint8]], prompts: Sequence[str], fps: float
    ) -> list[float | None]:
        del fps
        verdicts: list[float | None] = []
        for video, prompt in zip(videos, prompts, strict=True):
            verdict = None
            with suppress(DataError):  # a prompt of another world
                verdict = float(shows(video, prompt)) if len(video) > 1 else None
            verdicts.append(verdict)
        return verdicts


def _shape(covered: NDArray[np.float64], centres: NDArray[np.float64]) -> str | None:
    """Return the shape whose drawing matches the clip's pixels best, if one clearly does."""
    height, width = covered.shape[1:]
    agreements = {}
    for shape in SHAPES:
        # The soft intersection over union with the shape drawn at equal area.
        unit_area = coverage(shape, 8.0, np.full((1, 2), 31.5), 64, 64).sum() / 8.0**2
        radius = float(np.sqrt(np.median(covered.sum(axis=(1, 2))) / unit_area))
        template = coverage(shape, radius, centres, height, width)
        union = np.maximum(template, covered).sum()
        agreements[shape] = float(np.minimum(template, covered).sum() / union)
    best, second = sorted(agreements, key=agreements.__getitem__, reverse=True)[:2]
    lead = agreements[best] - agreements[second]
    return best if agreements[best] >= _LEAST_AGREEMENT and lead >= _LEAST_LEAD else None


def _colour(object_rgb: NDArray[np.float64]) -> str | None:
    hue, saturation, _ = colorsys.rgb_to_hsv(*object_rgb)
    if saturation < _LEAST_SATURATION:
        return None
    errors = {name: abs((360 * hue - at + 180) % 360 - 180) for name, at in COLOURS.items()}
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] <= _MOST_HUE_ERROR else None


def _direction(centres: NDArray[np.float64], covered: NDArray[np.float64]) -> str | None:
    """Return the direction of the straight line through a shape's centroids, if there is one."""
    # Least squares: the centroids' mean velocity in pixels per frame.
    times = np.arange(len(centres)) - (len(centres) - 1) / 2
    step = times @ centres / (times @ times)
    travel = float(np.linalg.norm(step)) * (len(centres) - 1)
    if travel < _LEAST_TRAVEL * covered.shape[1]:
        return None
    strays = centres - centres.mean(axis=0) - times[:, None] * step
    if np.sqrt((strays**2).sum(axis=1).mean()) > _MOST_STRAY * travel:
        return None
    cosines = {name: float(step @ to / np.hypot(*to)) for name, to in DIRECTIONS.items()}
    best = max(cosines, key=cosines.__getitem__)
    angle = np.degrees(np.arccos(min(1.0, cosines[best] / float(np.linalg.norm(step)))))
    return best if angle <= _MOST_ANGLE_ERROR else None
