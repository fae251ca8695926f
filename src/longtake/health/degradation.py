"""Which of a node's numbers are worse than those of the others, for some time already; pure.

A healthy cluster is not uniform, so that no single number is judged. Each window gives a robust z:
how many spreads (1.4826 MAD, which is why z = 0.6745 (x - median) / MAD) a value is on the bad side
of the median of the others. What exceeds an allowance adds up over windows, and what stays under
it is taken off again (a cumulative sum, Page 1954): a device that is 10 % slower is found after
about four windows of 3 % noise, and noise alone does not add up. No window counts for more than
`_MOST`, so that it takes three of them however bad one was.

With few others a MAD means little. The spread is therefore never taken for less than what the kind
of number has on healthy hardware, nor than its own noise from window to window.

Measured with 3 % noise: no false alarm in 90 runs of 1,000 windows on two ranks; a rank 10 % slower
is found after 4.5 windows on average of eight ranks, and 5.7 of two, which is near the least that
any test with so few false alarms needs. Noise of 6 % gives alarms on two ranks.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

_SIGMAS = 1.4826
"""Standard deviations in a median absolute deviation."""
_ALLOWANCE = 1.2
_ALARM = 4.5
_MOST = 3.0
_CALM = 0.5
_CEILING = 2 * _ALARM
_ENOUGH_FOR_SPREAD = 8
_NOISE_WINDOWS = 48
_ENOUGH_FOR_NOISE = 6
_NOISE_DISCOUNT = 1.1
"""Noise is known only roughly: taken for a little less, or slow ranks would be found late."""
_BASELINE_WINDOWS = 12
_IN_USE = 0.1
Against = Literal["others", "own past"]


@dataclass(frozen=True)
class Signal:
    """A number that can be judged.

    Attributes:
        name: of the number, without its device.
        kind: of device, for people.
        label: for people.
        unit: of what is shown.
        worse: which way is worse.
        spread: of healthy hardware, as a share of the median.
        least: in shares of the median, or of this where the median is less.
        against: what it is compared with. What depends on the data (work per step) has no past
            that it could be compared with.
        percent: whether people are told the deviation, and not the values.
        scale: how much of the shown unit one is.
        needs: a share of the same device that tells whether it is in use; it is not judged, and
            nothing is judged by it, while that is less than a tenth.
    """

    name: str
    kind: str
    label: str
    unit: str
    worse: Literal["higher", "lower"]
    spread: float
    least: float = 0.0
    against: tuple[Against, ...] = ("others",)
    percent: bool = False
    scale: float = 1.0
    needs: str = ""


SIGNALS = (
    Signal("gpu_power_watts", "GPU", "power", "W", "lower", 0.08, needs="gpu_utilization_share"),
    Signal("gpu_sm_clock_mhz", "GPU", "clock", "MHz", "lower", 0.04, needs="gpu_utilization_share"),
    Signal("step_work_seconds", "rank", "step time", "s", "higher", 0.04, percent=True),
    Signal(
        "link_speed_bits_per_second",
        "link",
        "speed",
        "Gbit/s",
        "lower",
        0.04,
        against=("others", "own past"),
        scale=1e-9,
    ),
    Signal(
        "disk_write_seconds",
        "disk",
        "writing 4 KiB",
        "s",
        "higher",
        1.0,
        least=0.1,
        against=("others", "own past"),
    ),
    Signal("pressure_cpu_share", "", "waiting for processors", "", "higher", 0.5, least=0.25),
)


@dataclass(frozen=True)
class Finding:
    """A number that has been worse for some windows.

    Attributes:
        signal: which.
        device: of what; empty: of the node.
        value: now.
        usual: median of what it is compared with.
        against: with what.
    """

    signal: Signal
    device: str
    value: float
    usual: float
    against: Against

    @property
    def percent(self) -> float:
        """By how much it deviates from the usual."""
        return 100 * (self.value / self.usual - 1) if self.usual else 0.0

    def words(self) -> str:
        """For people: GPU 3 power 412 W against 655 W median; rank 24 step time +11 %."""
        signal = self.signal
        label = f"{signal.kind} {self.device} {signal.label}" if self.device else signal.label
        if signal.percent:
            return f"{label} {self.percent:+.0f} %"
        value, usual = (f"{each * signal.scale:.3g}" for each in (self.value, self.usual))
        if signal.scale * max(abs(self.value), abs(self.usual)) >= 1:
            value, usual = (f"{each * signal.scale:.0f}" for each in (self.value, self.usual))
        middle = "median" if self.against == "others" else "in its own past"
        unit = f" {signal.unit}" if signal.unit else ""
        return f"{label} {value}{unit} against {usual}{unit} {middle}"


@dataclass
class _Course:
    """What adds up about one number of one device."""

    sum: float = 0.0
    is_bad: bool = False
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=_NOISE_WINDOWS))

    def add(self, deviation: float, spread: float) -> bool:
        """Whether the number is bad after a window, in which it deviated so much to the bad side.

        Args:
            deviation: as a share of the median.
            spread: likewise, of healthy ones.
        """
        self.deviations.append(deviation)
        z = deviation / max(spread, _noise(self.deviations))
        self.sum = min(_CEILING, max(0.0, self.sum + min(z, _MOST) - _ALLOWANCE))
        self.is_bad = self.sum >= (_CALM if self.is_bad else _ALARM)
        return self.is_bad


class Degradation:
    """Judges a node window by window. Whoever has the same numbers comes to the same findings."""

    def __init__(self, signals: Sequence[Signal] = SIGNALS) -> None:
        self._signals = signals
        self._courses: dict[tuple[str, Against], _Course] = {}
        self._past: dict[str, deque[float]] = {}

    def judge(
        self, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> list[Finding]:
        """What is bad after one more window.

        Args:
            own: the node's numbers by `name` or `name:device`.
            others: likewise, by node, of the nodes that it is compared with.

        Returns:
            All that is bad now, also what was so before. A number that is not there in this
            window stays what it was.
        """
        return [finding for signal in self._signals for finding in self._of(signal, own, others)]

    def _of(
        self, signal: Signal, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> Iterator[Finding]:
        theirs = [value for each in others.values() for value in _values(signal, each).values()]
        mine = _values(signal, own)
        for key, value in mine.items():
            device = key.partition(":")[2]
            if "others" in signal.against:
                beside = [each for other, each in mine.items() if other != key]
                if self._is_bad(signal, key, value, theirs + beside, "others"):
                    yield Finding(signal, device, value, median(theirs + beside), "others")
            if "own past" in signal.against:
                past = self._past.setdefault(key, deque(maxlen=_BASELINE_WINDOWS))
                if len(past) < _BASELINE_WINDOWS:
                    past.append(value)  # how it was at the start stays what it is compared with
                elif self._is_bad(signal, key, value, list(past), "own past"):
                    yield Finding(signal, device, value, median(past), "own past")

    def _is_bad(
        self, signal: Signal, key: str, value: float, usual: Sequence[float], against: Against
    ) -> bool:
        if not usual:
            return False
        middle = median(usual)
        unit = max(abs(middle), signal.least, 1e-12)
        deviation = (value - middle) / unit * (1 if signal.worse == "higher" else -1)
        course = self._courses.setdefault((key, against), _Course())
        return course.add(deviation, max(signal.spread, _spread(usual, middle) / unit))


def _values(signal: Signal, numbers: Mapping[str, float]) -> dict[str, float]:
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


def _noise(deviations: Sequence[float]) -> float:
    """The standard deviation from window to window, whatever the level; 0 of too few to tell."""
    if len(deviations) < _ENOUGH_FOR_NOISE:
        return 0.0
    return float(
        _SIGMAS * median(abs(b - a) for a, b in pairwise(deviations)) / 2**0.5 / _NOISE_DISCOUNT
    )
