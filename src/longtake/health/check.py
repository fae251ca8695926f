"""What a check is: a handful of numbers that one look at the node gives."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

Numbers = dict[str, float]
"""By `name` or `name:device`; units are in the names."""


class Check(Protocol):
    """Looks at one side of a node.

    Attributes:
        name: of the check.
        numbers: what it measures: each name, without devices, and what it says.
    """

    name: str
    numbers: Mapping[str, str]

    def sample(self) -> Numbers:
        """The numbers now; those that cannot be had are left out. It never raises."""
        ...

    def close(self) -> None:
        """Give back what the check holds."""
        ...


class Rates:
    """Counts per second, from counts that only rise."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def rate(self, name: str, count: float) -> float | None:
        """Per second since the last call with this name.

        None: there was none, or the count has fallen (the device was reset).
        """
        now = time.monotonic()
        before = self._before.get(name)
        self._before[name] = (now, count)
        if before is None or count < before[1] or now <= before[0]:
            return None
        return (count - before[1]) / (now - before[0])


def read_text(path: Path) -> str | None:
    """A small file of the kernel's, stripped; None: it is not there, or cannot be read now."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    """Likewise, a number."""
    try:
        return float(read_text(path) or "")
    except ValueError:
        return None
