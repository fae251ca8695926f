"""A decoding process that freezes at a clip, for the drills; a process of its own.

    python -m longtake.drill.frozen_worker in-c 40 (what longtake.data.worker is given)

Before it does what `longtake.data.worker` would do, it puts another function in the place of the
one that reads windows; longtake knows nothing of it. It freezes when it has read so many windows;
of a run's processes only the first that gets there does.
"""

import sys
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from longtake.data import worker
from longtake.data.references import Reference
from longtake.data.references import read as read_window
from longtake.data.window import Window
from longtake.drill import hangs

NAME = "longtake.drill.frozen_worker"
HANGS = {"in-c": hangs.in_c, "holding-gil": hangs.holding_gil}


class Freezing:
    """Reads windows until it freezes.

    Args:
        hang: how.
        after: when so many windows are read.
    """

    def __init__(self, hang: Callable[[], None], after: int) -> None:
        self._hang = hang
        self._after = after
        self._numbers = count()

    def read(self, window: Window | Reference, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Read a window, or freeze."""
        if next(self._numbers) >= self._after:
            hangs.hang_once(self._hang, window.identity, str(window.media))
        return read_window(window, out)


def main() -> None:
    """Freeze when it is time, and until then do what a decoding process does."""
    how, after = sys.argv[1:3]
    del sys.argv[1:3]
    vars(worker).update(read=Freezing(HANGS[how], int(after)).read)
    worker.main()


if __name__ == "__main__":
    main()
