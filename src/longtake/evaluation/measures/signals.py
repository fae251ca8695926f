"""What all measures are made of: a few numbers of each frame, and of each pair of neighbours.

A video is looked at one frame after another, so that what is held beside it is some frames large.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

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
    """[H, W] luma of a frame [H, W, 3], 0 to 255."""
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
