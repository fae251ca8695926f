"""Whether sampled videos of the shapes world show what their prompts ask for, as a measure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longtake.demo.oracle import shows
from longtake.errors import DataError


class Adherence:
    """1 where shape, colour and direction are all as asked for, else 0; its mean is a share.

    A measure for presets: `measures = ["longtake.demo.adherence:Adherence"]`. It is not defined
    for prompts that are not of the shapes world, nor for pictures, in which nothing moves.
    """

    name = "adherence"

    def __call__(
        self, videos: Sequence[NDArray[np.uint8]], prompts: Sequence[str], fps: float
    ) -> list[float | None]:
        """Judge each video [F, H, W, 3] by its prompt."""
        del fps
        return [_judged(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]


def _judged(video: NDArray[np.uint8], prompt: str) -> float | None:
    if len(video) < 2:
        return None
    try:
        return float(shows(video, prompt))
    except DataError:
        return None
