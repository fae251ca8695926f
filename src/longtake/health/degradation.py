"""Which of a node's numbers are worse than those of the others, for some time already; pure.

A healthy cluster is not uniform, so that no single number is judged. A value's deviation is its
distance from the median of the others, as a share of the mean of the two, which is the same both
ways: a rank at half the time of another is as far from it as one at twice. Spreads are robust, too
(1.4826 MAD); with few others that means little, and they are never taken for less than what the
kind of number has on healthy hardware. `course.py` adds up what deviates.

Measured: none of 90 runs of 1,000 windows on two, three and four ranks had a false alarm, at 3 and
at 6 % noise, all ranks judged. One of two ranks that becomes 10 % slower is found after 4.6 windows
on average at 1.5 % noise and after 7.1 at 3 %, one of four after 4.7 and 5.6; 30 % take three.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from longtake.health.course import Course, Window
from longtake.health.noise import SharedNoise, share
from longtake.health.signals import SIGNALS, Against, Finding, Signal

_SIGMAS = 1.4826
"""Standard deviations in a median absolute deviation."""
_ENOUGH_FOR_SPREAD = 8
_BASELINE_WINDOWS = 12
_IN_USE = 0.1
_MOST_ABSENT = 12
"""Windows for which a finding outlives its number: a step may take longer than a window."""
_Key = tuple[str, Against]


class Degradation:
    """Judges a node window by window. Whoever has the same numbers comes to the same findings."""

    def __init__(self, signals: Sequence[Signal] = SIGNALS) -> None:
        self._signals = signals
        self._courses: dict[_Key, Course] = {}
        self._noises = {signal.name: SharedNoise() for signal in signals}
        self._past: dict[str, deque[float]] = {}
        self._bad: dict[_Key, tuple[Finding, int]] = {}

    def judge(
        self, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> list[Finding]:
        """What is bad after one more window.

        Args:
            own: the node's numbers by `name` or `name:device`.
            others: likewise, by node, of the nodes that it is compared with.

        Returns:
            All that is bad now, also what was so before. A number that is not there in this
            window, or has nothing to be compared with, stays what it was, for some windows.
        """
        found: dict[_Key, tuple[Finding, int]] = {}
        judged: set[_Key] = set()
        for signal in self._signals:
            for key, finding in self._of(signal, own, others):
                judged.add(key)
                if finding is not None:
                    found[key] = finding, 0
        for key, (finding, absent) in self._bad.items():
            if key not in judged and absent < _MOST_ABSENT:
                found[key] = finding, absent + 1
        self._bad = found
        return [finding for finding, _ in found.values()]

    def _of(
        self, signal: Signal, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> Iterator[tuple[_Key, Finding | None]]:
        """All that is judged of one signal, and what is found."""
        mine = _values(signal, own)
        there = {(n, k): v for n, each in others.items() for k, v in _values(signal, each).items()}
        everywhere = {**{("", key): each for key, each in mine.items()}, **there}
        noise = self._noises[signal.name].add(everywhere, signal.least)
        theirs = list(there.values())
        for key, value in mine.items():
            beside = [each for other, each in mine.items() if other != key]
            if "others" in signal.against and theirs + beside:
                where: _Key = key, "others"
                yield where, self._judged(signal, where, value, theirs + beside, noise)
            if "own past" in signal.against:
                where = key, "own past"
                past = self._past.setdefault(key, deque(maxlen=_BASELINE_WINDOWS))
                if len(past) < _BASELINE_WINDOWS:
                    past.append(value)  # how it was at the start stays what it is compared with
                else:
                    yield where, self._judged(signal, where, value, past)

    def _judged(
        self,
        signal: Signal,
        where: _Key,
        value: float,
        usual: Sequence[float],
        noise: float = 0.0,
    ) -> Finding | None:
        middle = median(usual)
        unit = max((abs(value) + abs(middle)) / 2, signal.least, 1e-12)
        deviation = share(value, middle, signal.least) * (1 if signal.worse == "higher" else -1)
        spread = max(signal.spread, _spread(usual, middle) / unit)
        course = self._courses.setdefault(where, Course(is_noisy=not signal.counts))
        if not course.add(Window(value, middle, deviation, spread), noise):
            return None
        key, against = where
        return Finding(signal, key.partition(":")[2], *course.level(), against)


def _values(signal: Signal, numbers: Mapping[str, float]) -> dict[str, float]:
    if signal.unless and numbers.get(signal.unless):
        return {}
    found = {key: each for key, each in numbers.items() if key.partition(":")[0] == signal.name}
    if not signal.needs:
        return found
    shares = {key: numbers.get(key.replace(signal.name, signal.needs), 0.0) for key in found}
    return {key: each for key, each in found.items() if shares[key] >= _IN_USE}


def _spread(values: Sequence[float], middle: float) -> float:
    """The standard deviation of the healthy majority; 0 of too few to tell."""
    if len(values) < _ENOUGH_FOR_SPREAD:
        return 0.0
    return _SIGMAS * median(abs(each - middle) for each in values)
