"""Videos that were written, decoded again one at a time: all of them would fill the memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from longtake.data.clip import Media
from longtake.data.decode import opened

Video = NDArray[np.uint8]


class Reread(Sequence[Video]):
    """A sequence of videos, [F, H, W, 3] each.

    Args:
        paths: their files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> Video: ...
    @overload
    def __getitem__(self, index: slice) -> "Reread": ...
    def __getitem__(self, index: int | slice) -> "Video | Reread":
        if isinstance(index, slice):
            return Reread(self._paths[index])
        with opened(Media(str(self._paths[index]))) as (container, stream):
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames)
