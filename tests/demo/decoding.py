"""Clips as they are read back from their files."""

from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def decode(path: Path) -> tuple[NDArray[np.uint8], float]:
    """All frames of a clip, [F, H, W, 3], and its frames per second."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.average_rate is not None
        return np.stack(frames).astype(np.uint8), float(stream.average_rate)
