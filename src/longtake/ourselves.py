"""Our own programs as processes of their own: the same interpreter, the same longtake."""

import os
import sys
import time
from collections import deque
from pathlib import Path

_PACKAGES = Path(__file__).parents[1]  # where longtake is imported from


_MAX_STARTS = 5
_SECONDS_BEFORE_ANOTHER = 1.0
_LONG_SECONDS = 600.0


class Starts:
    """When a program of ours that has died is started again: soon, but not again and again."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque(maxlen=_MAX_STARTS)

    def note(self) -> None:
        """It is started now."""
        self._begun.append(time.monotonic())

    @property
    def pause_seconds(self) -> float:
        """For how long to leave it alone: one that dies often, for a long while."""
        is_often = len(self._begun) == _MAX_STARTS
        is_often = is_often and time.monotonic() - self._begun[0] < _LONG_SECONDS
        return _LONG_SECONDS if is_often else _SECONDS_BEFORE_ANOTHER


def program(module: str, *arguments: str) -> list[str]:
    """What starts one of our modules; a file of the folder it starts in is never taken for ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with `changes`, in which longtake is found wherever it lies."""
    paths = [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}
