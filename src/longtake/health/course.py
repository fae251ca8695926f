"""What adds up, window by window, about one number of one device; pure.

Each window gives a z: how many spreads a value is on the bad side of what is usual. What exceeds an
allowance adds up over windows, and what stays under it is taken off again (a cumulative sum, Page
1954). No window counts for more than `_MOST`, so that it takes three of them however bad one was.

A spread is never taken for less than the number's own noise from window to window: numbers that
differ more need longer to add up, and are found all the same. The noise of few windows is known
only roughly, and taken for more; once more is known, the windows before are weighed anew by it.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from longtake.health.noise import Noise

_ALLOWANCE = 1.1
_ALARM = 5.3
_ALARM_OF_NOISE, _CALM_NOISE = 3.0, 1.25
"""Much noise hides a little slowness anyway: then false alarms are the greater harm."""
_MOST = 3.0
_CALM = 0.5
_CEILING = 2 * _ALARM
_WINDOWS = 48
_ENOUGH_FOR_NOISE = 3


@dataclass(frozen=True)
class Window:
    """One value, and what was usual then.

    Attributes:
        value: of the number.
        usual: median of what it is compared with.
        deviation: to the bad side, as a share.
        spread: likewise, of healthy ones.
    """

    value: float
    usual: float
    deviation: float
    spread: float


class Course:
    """The newest windows of one number.

    Args:
        is_noisy: whether its own noise is to be heeded.
    """

    def __init__(self, is_noisy: bool = True) -> None:
        self._is_noisy = is_noisy
        self._windows: deque[Window] = deque(maxlen=_WINDOWS)
        self._noise = Noise()
        self._adding = 0
        self._is_bad = False

    def add(self, window: Window, others: float = 0.0) -> bool:
        """Whether the number is bad after one more window.

        Args:
            window: the newest.
            others: noise of such numbers on the whole.
        """
        if self._windows:
            self._noise.add(window.deviation - self._windows[-1].deviation)
        self._windows.append(window)
        if self._noise.count < _ENOUGH_FOR_NOISE:
            return False
        noise = max(self._noise.deviation(), others) if self._is_noisy else 0.0
        alarm = _alarm(noise / window.spread)
        self._is_bad = self._sum(noise) >= (_CALM if self._is_bad else alarm)
        return self._is_bad

    def level(self) -> tuple[float, float]:
        """Value and usual in the middle of the windows that have added up.

        Medians: the first of them may have been bad for a part of its time only.
        """
        windows = list(self._windows)[-max(1, self._adding) :]
        usual = median(each.usual for each in windows)
        if all(each.usual > 0 for each in windows):
            return usual * median(each.value / each.usual for each in windows), usual
        return median(each.value for each in windows), usual

    def _sum(self, noise: float) -> float:
        found, self._adding = 0.0, 0
        for each in self._windows:
            z = each.deviation / max(each.spread, noise)
            found = min(_CEILING, max(0.0, found + min(z, _MOST) - _ALLOWANCE))
            self._adding = self._adding + 1 if found else 0
        return found


def _alarm(noise: float) -> float:
    """What has to add up, by the noise in spreads of healthy ones."""
    return _ALARM + _ALARM_OF_NOISE * min(1.0, max(0.0, noise - _CALM_NOISE))
