"""By how much numbers differ from window to window without a reason; pure.

It is estimated from changes between windows, which do not depend on levels: a rank that is slow all
the time adds nothing to it. Changes that are far from what is usual (it has become slow) are taken
for less, and what few windows say is taken for more.
"""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from math import pi, sqrt
from statistics import median

_WINDOWS, _LATE_WINDOWS = 256, 32
_FAR = 3.0
"""Changes of more than so many medians are taken for that."""
_LATE_SHARE = 0.9
"""Noise that has risen lately counts; but of few windows it seems to have risen now and then."""
_NORMAL = sqrt(pi) / 2
"""Standard deviation by the mean distance of two draws from a normal distribution."""
_MEDIAN = 1.4826 / sqrt(2) / _NORMAL
"""The mean of such distances by their median."""


class Noise:
    """The noise of one number of one device."""

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=_WINDOWS)

    @property
    def count(self) -> int:
        """Changes that it knows."""
        return len(self._changes)

    def add(self, change: float) -> None:
        """Learn by how much the number has changed since the window before."""
        self._changes.append(abs(change))

    def deviation(self) -> float:
        """The standard deviation, rather too large than too small; 0: nothing is known."""
        changes, count = self._changes, self.count
        if not count:
            return 0.0
        most = _FAR * median(changes)
        late = islice(changes, max(0, count - _LATE_WINDOWS), None)
        sums = sum(min(each, most) for each in changes), sum(min(each, most) for each in late)
        mean = max(sums[0] / count, _LATE_SHARE * sums[1] / min(count, _LATE_WINDOWS))
        return _NORMAL * mean * (1 + 1.5 / count + 12 / count**2)


class SharedNoise:
    """The noise that all devices of a kind have, known sooner than that of each."""

    def __init__(self) -> None:
        self._noise = Noise()
        self._before: dict[tuple[str, str], float] = {}

    def add(self, values: Mapping[tuple[str, str], float], least: float) -> float:
        """Learn from one more window.

        Args:
            values: of all devices, by node and name.
            least: shares are of the values, or of this where those are less.

        Returns:
            The standard deviation of one's share from the median of the others.
        """
        middle = median(values.values()) if values else 0.0
        shares = {who: share(each, middle, least) for who, each in values.items()}
        changes = [
            abs(each - self._before[who]) for who, each in shares.items() if who in self._before
        ]
        self._before = shares
        if len(changes) > 2:  # of two, each alone knows as much
            # The median of all moves with each of them, that of the others does not.
            self._noise.add(_MEDIAN * median(changes) * len(changes) / (len(changes) - 1))
        return self._noise.deviation()


def share(value: float, usual: float, least: float) -> float:
    """How far a value is from what is usual, as a share of the mean of both, or of `least`."""
    return (value - usual) / max((abs(value) + abs(usual)) / 2, least, 1e-12)
