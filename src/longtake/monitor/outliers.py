"""Outlier detection: a node's health numbers against other nodes' and its own past, by windows.

A healthy cluster is not uniform, so no single value is judged. A deviation is the distance from the
median of the others, relative to the mean of both, so that half and twice the time are equally far.
Spreads are robust (1.4826 MAD) and never less than that of healthy hardware. Deviations beyond an
allowance add up over windows (`Cusum`).

Measured: none of 90 runs of 1,000 windows on two, three and four ranks had a false alarm, at 3 and
at 6 % noise, all ranks judged. One of two ranks that becomes 10 % slower is found after 4.6 windows
on average at 1.5 % noise and after 7.1 at 3 %, one of four after 4.7 and 5.6; 30 % take three.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi, sqrt
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from longtake.health.network import BUSY, RATE
from longtake.health.system import OPEN_FILES, HealthProbe, Numbers, open_files
from longtake.heartbeat import Heartbeat, Phase, read_heartbeats
from longtake.node_dir import beat_of
from longtake.node_numbers import CHECKPOINT, SIGMAS, SIGNALS, Baseline, HealthSignal, by_device

_T = TypeVar("_T")
SLOW = "peer_send_share"
ALL_UP_TO = 17  # up to this number of nodes, each is compared with all others

_SAVES: tuple[Phase, ...] = ("checkpoint", "save")
_NEAR_SAMPLES = 6  # samples after a save in which its data may still be written to the disk


# --- What the ranks of this node need for a step.


class StepProbe(HealthProbe):
    """Health probe of the ranks' training steps: compares heartbeats with the sample before."""

    name = "steps"
    numbers: Mapping[str, str] = {
        "step_work_seconds": "The rank's own work for a step, without waiting for others",
        "steps_per_second": "Steps of the rank per second",
        CHECKPOINT: "1: a rank of the node saves a checkpoint, or did in the last six samples",
        **OPEN_FILES,
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[tuple[int, int], tuple[float, Heartbeat]] = {}
        self._near = 0

    def sample(self) -> Numbers:
        """Return step rates and times since the last sample, by rank; times need a new step."""
        now = time.monotonic()
        found = read_heartbeats(self._folder)
        ranks = {(each.pid, each.started): (now, each) for each in found if each.role == "rank"}
        numbers: Numbers = {}
        for who, (_, each) in ranks.items():
            then, before = self._before.get(who, (now, None))
            # A save may begin and end between two samples, so finished ones are counted, too.
            is_saving = each.phase in _SAVES or _num_saves(each) > _num_saves(before)
            self._near = _NEAR_SAMPLES + 1 if is_saving else self._near
            if before is None or each.phase == "ended":
                continue
            steps = (each.steps_done - before.steps_done) / max(1e-9, now - then)
            numbers[f"steps_per_second:{each.rank}"] = round(steps, 6)
            count = each.work_count - before.work_count
            if count > 0:
                seconds = (each.work_seconds - before.work_seconds) / count
                numbers[f"step_work_seconds:{each.rank}"] = round(seconds, 6)
        # Data of a save may still be written to the disk some samples later.
        self._near = max(0, self._near - 1)
        numbers[CHECKPOINT] = float(self._near > 0)
        self._before = ranks
        return numbers | open_files([each.pid for each in found if each.phase != "ended"])


def _num_saves(heartbeat: Heartbeat | None) -> int:
    timings = heartbeat.timings if heartbeat else {}
    return sum(timings[each].count for each in _SAVES if each in timings)


# --- Which nodes are compared.


def peers_of(host: str, hosts: Sequence[str]) -> list[str]:
    """Return the nodes to compare a node with: those 1, 2, 4, 8, ... places before and after it.

    These are all of up to 17 nodes, and 14 of 200: enough for a robust median, few enough to read.
    Neighbours in a rack, which may fail together, are compared with other racks too. The relation
    is symmetric.
    """
    if host not in hosts or len(hosts) <= ALL_UP_TO:
        return [other for other in hosts if other != host][: ALL_UP_TO - 1]
    at, count = hosts.index(host), len(hosts)
    strides = [2**power for power in range(count.bit_length()) if 2 * 2**power <= count]
    found = {(at + sign * stride) % count for stride in strides for sign in (1, -1)}
    return [other for place, other in enumerate(hosts) if place in found]


class LivingNodes:
    """Finds the nodes whose watchers still write heartbeats; other nodes are gone or hang."""

    def __init__(self) -> None:
        self._beats: dict[str, object] = {}

    def of(self, heartbeats: Mapping[str, Mapping[str, Any]], launch: str) -> list[str]:
        """Return the nodes of this launch whose watcher wrote a heartbeat since the last call."""
        # The beat and not the file's time, as clocks of nodes and of the disk differ.
        marks = {host: beat_of(each) for host, each in heartbeats.items()}
        before, self._beats = self._beats, dict(marks)
        return [
            host
            for host, mark in marks.items()
            if heartbeats[host]
            and before.get(host, mark) != mark
            and launch in ("", heartbeats[host].get("launch"))
        ]


# --- Links to other nodes.

_WAITED_FOR = 0.5  # fraction of time: a link that is busy for less does not limit the run
_WELL = 0.5  # fraction of the usual rate: a slower, busy link does not enter its own past
_ENOUGH_PAST, _MOST_PAST = 3, 30


class SlowLinks:
    """Finds network links to other nodes that a run waits for and that are slower than usual."""

    numbers: Mapping[str, str] = {
        SLOW: "Rate of the link to that node as a share of the usual rate, if the run waits for it"
    }

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_PAST))

    def judge(self, own: Numbers, others: Mapping[str, Numbers]) -> Numbers:
        """Return the relative rate of each busy network link (1: usual), by the node it leads to.

        The usual rate is the median of the current rates of other nodes' links and of this link's
        past.
        """
        there = [rate for each in others.values() for rate in by_device(each, RATE).values()]
        found: Numbers = {}
        for host, rate in by_device(own, RATE).items():
            past = self._past[host]
            known = there + ([median(past)] if len(past) >= _ENOUGH_PAST else [])
            share = rate / max(median(known), 1.0) if known else 1.0
            is_waited_for = own.get(f"{BUSY}:{host}", 0.0) >= _WAITED_FOR
            if known and is_waited_for:
                found[f"{SLOW}:{host}"] = round(share, 4)
            # A slow link does not enter its own past, or it would become usual.
            if share > _WELL or not is_waited_for:
                past.append(rate)
        return found


# --- Noise: random differences from window to window. It is estimated from changes between windows,
# which do not depend on levels: a rank that is always slow adds nothing. Very large changes (the
# rank became slow) are clipped, and estimates from few windows are increased.

_NOISE_WINDOWS, _LATE_WINDOWS = 256, 32
_FAR = 3.0  # changes are clipped to this multiple of their median
_LATE_SHARE = 0.9  # weight of recent noise, which in few windows is sometimes high by chance
_NORMAL = sqrt(pi) / 2  # standard deviation over the mean distance of two normal draws
_MEDIAN = 1.4826 / sqrt(2) / _NORMAL  # mean of such distances over their median


class NoiseEstimate:
    """Estimate of the random noise of one health number of one device."""

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=_NOISE_WINDOWS)

    @property
    def count(self) -> int:
        return len(self._changes)

    def add(self, change: float) -> None:
        self._changes.append(abs(change))

    def deviation(self) -> float:
        """Return the standard deviation of the number's noise, rather overestimated; 0: unknown."""
        changes, count = self._changes, self.count
        if not count:
            return 0.0
        most = _FAR * median(changes)
        late = islice(changes, max(0, count - _LATE_WINDOWS), None)
        sums = sum(min(each, most) for each in changes), sum(min(each, most) for each in late)
        mean = max(sums[0] / count, _LATE_SHARE * sums[1] / min(count, _LATE_WINDOWS))
        # The last factor enlarges estimates from few windows; it tends to 1.
        return _NORMAL * mean * (1 + 1.5 / count + 12 / count**2)


class SharedNoise:
    """Noise of a health number over all devices of a kind, known sooner than each device's."""

    def __init__(self) -> None:
        self._noise = NoiseEstimate()
        self._before: dict[tuple[str, str], float] = {}

    def add(self, values: Mapping[tuple[str, str], float], least: float) -> float:
        """Add one window of all devices' values; return the standard deviation of their noise."""
        middle = median(values.values()) if values else 0.0
        shares = {who: _share(each, middle, least) for who, each in values.items()}
        changes = [
            abs(each - self._before[who]) for who, each in shares.items() if who in self._before
        ]
        self._before = shares
        if len(changes) > 2:  # two devices' shared noise says no more than that of each
            # The factor n / (n - 1) corrects for the median of all, which moves with each value.
            self._noise.add(_MEDIAN * median(changes) * len(changes) / (len(changes) - 1))
        return self._noise.deviation()


def _share(value: float, usual: float, least: float) -> float:
    return (value - usual) / max((abs(value) + abs(usual)) / 2, least, 1e-12)


# --- Adding up.

# Chosen so that runs of the module's docstring have no false alarm.
_ALLOWANCE = 1.1
_ALARM = 5.3
# Much noise hides slight slowness anyway, so the alarm level rises to avoid false alarms.
_ALARM_OF_NOISE, _CALM_NOISE = 3.0, 1.25
_MOST = 3.0
_CALM = 0.5  # far below the alarm, so that a number near its limit does not come and go
_CEILING = 2 * _ALARM  # a number that was bad for hours is well again within some windows
_CUSUM_WINDOWS = 48
_ENOUGH_FOR_NOISE = 3


@dataclass(frozen=True)
class CusumWindow:
    """One window (sample) of a health number: its value, and the usual value at that time."""

    value: float
    usual: float  # median of the values that it is compared with
    deviation: float  # relative deviation to the bad side
    spread: float  # relative spread of healthy values


class Cusum:
    """Cumulative sum (CUSUM, Page 1954) of the deviations of one health number of one device.

    Each window has a z-score: the number of spreads by which the value is worse than usual. The
    excess over an allowance is added to the sum, a shortfall subtracted, and the sum never falls
    below 0. z is limited to `_MOST`, so an alarm takes at least three windows. The spread is never
    less than the number's own noise, so noisier numbers take longer. The sum is computed again for
    all windows at each call, with the newest estimate of the noise.
    """

    def __init__(self, is_noisy: bool = True) -> None:
        self._is_noisy = is_noisy
        self._windows: deque[CusumWindow] = deque(maxlen=_CUSUM_WINDOWS)
        self._noise = NoiseEstimate()
        self._adding = 0
        self._is_bad = False

    def add(self, window: CusumWindow, others: float = 0.0) -> bool:
        """Add a window (sample) of the number, and return True if the number is bad now.

        `others` is the noise of all devices of the kind; the larger of it and the own noise is
        used.
        """
        if self._windows:
            self._noise.add(window.deviation - self._windows[-1].deviation)
        self._windows.append(window)
        if self._noise.count < _ENOUGH_FOR_NOISE:
            return False
        noise = max(self._noise.deviation(), others) if self._is_noisy else 0.0
        excess = noise / window.spread - _CALM_NOISE
        alarm = _ALARM + _ALARM_OF_NOISE * min(1.0, max(0.0, excess))
        total, self._adding = 0.0, 0
        for each in self._windows:
            z = each.deviation / max(each.spread, noise)
            total = min(_CEILING, max(0.0, total + min(z, _MOST) - _ALLOWANCE))
            self._adding = self._adding + 1 if total else 0
        self._is_bad = total >= (_CALM if self._is_bad else alarm)
        return self._is_bad

    def level(self) -> tuple[float, float]:
        """Return the number's median and its usual value, over the windows of the current rise.

        Medians, because the first window may have been bad for only a part of its time.
        """
        windows = list(self._windows)[-max(1, self._adding) :]
        usual = median(each.usual for each in windows)
        if all(each.usual > 0 for each in windows):
            return usual * median(each.value / each.usual for each in windows), usual
        return median(each.value for each in windows), usual


@dataclass(frozen=True)
class Outlier:
    """A health number of a device that has been significantly worse than usual for some windows."""

    signal: HealthSignal
    device: str  # empty: the number describes the whole node
    value: float  # median over these windows
    usual: float  # in the same unit, the median of the values it is compared with
    against: Baseline

    @property
    def percent(self) -> float:
        return 100 * (self.value / self.usual - 1) if self.usual else 0.0

    def __str__(self) -> str:
        """Describe the outlier: GPU 3 power 412 W against 655 W median; rank 24 step time +11 %."""
        signal = self.signal
        if signal.counts:
            port = " port ".join(self.device.rsplit("/", 1))
            value, usual = _count(self.value), _count(self.usual)
            port = f"{signal.kind} {port}".strip()
            return f"{port}: {value} {signal.counts} per second, others {usual}"
        label = f"{signal.kind} {self.device} {signal.label}" if self.device else signal.label
        return f"{label} {self.percent:+.0f} %" if signal.percent else f"{label} {self._values()}"

    def _values(self) -> str:
        signal = self.signal
        value, usual = (f"{each * signal.scale:.3g}" for each in (self.value, self.usual))
        if signal.scale * max(abs(self.value), abs(self.usual)) >= 10:
            value, usual = (f"{each * signal.scale:.0f}" for each in (self.value, self.usual))
        middle = "median" if self.against == "others" else "in its own past"
        unit = f" {signal.unit}" if signal.unit else ""
        return f"{value}{unit} against {usual}{unit} {middle}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# --- Judging.

_ENOUGH_FOR_SPREAD = 8
_BASELINE_WINDOWS = 12
_IN_USE = 0.1  # a GPU or link that is used less says nothing about its power or rate
_MOST_ABSENT = 12  # windows for which an outlier stays without new values: steps may be long
_Key = tuple[str, str, Baseline]  # signal, device


class OutlierDetector:
    """Detector of a node's outlying health numbers, window (sample) by window; deterministic."""

    def __init__(self, signals: Sequence[HealthSignal] = SIGNALS) -> None:
        self._signals = signals
        self._sums: dict[_Key, Cusum] = {}
        self._noises = {signal.name: SharedNoise() for signal in signals}
        self._past: dict[_Key, deque[float]] = defaultdict(lambda: deque(maxlen=_BASELINE_WINDOWS))
        self._bad: dict[_Key, tuple[Outlier, int]] = {}

    def judge(
        self, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> list[Outlier]:
        """Add a window of the node's health numbers, and return the node's current outliers.

        An outlier whose number is missing in this window, or has nothing to be compared with, stays
        for some windows.
        """
        found: dict[_Key, tuple[Outlier, int]] = {}
        judged: set[_Key] = set()
        for signal in self._signals:
            for key, outlier in self._of(signal, own, others):
                judged.add(key)
                if outlier is not None:
                    found[key] = outlier, 0
        for key, (outlier, absent) in self._bad.items():
            if key not in judged and absent < _MOST_ABSENT:
                found[key] = outlier, absent + 1
        self._bad = found
        return [outlier for outlier, _ in found.values()]

    def _of(
        self,
        signal: HealthSignal,
        own: Mapping[str, float],
        others: Mapping[str, Mapping[str, float]],
    ) -> Iterator[tuple[_Key, Outlier | None]]:
        """Judge one health number on all devices; yields each key and its outlier, or None."""
        mine = _values(signal, own)
        there = {(n, k): v for n, each in others.items() for k, v in _values(signal, each).items()}
        everywhere = {**{("", device): each for device, each in mine.items()}, **there}
        noise = self._noises[signal.name].add(everywhere, signal.least)
        theirs = list(there.values())
        for device, value in mine.items():
            beside = [each for other, each in mine.items() if other != device]
            if "others" in signal.against and theirs + beside:
                where: _Key = signal.name, device, "others"
                yield where, self._judged(signal, where, value, theirs + beside, noise)
            if "own past" in signal.against:
                where = signal.name, device, "own past"
                past = self._past[where]
                if len(past) < _BASELINE_WINDOWS:
                    past.append(value)  # the first windows stay the baseline for the whole run
                else:
                    yield where, self._judged(signal, where, value, past)

    def _judged(
        self,
        signal: HealthSignal,
        where: _Key,
        value: float,
        usual: Sequence[float],
        noise: float = 0.0,
    ) -> Outlier | None:
        middle = median(usual)
        unit = max((abs(value) + abs(middle)) / 2, signal.least, 1e-12)
        deviation = _share(value, middle, signal.least) * (1 if signal.worse == "higher" else -1)
        spread = signal.spread
        # Few values underestimate the spread; the signal's own, of healthy hardware, is then used.
        if len(usual) >= _ENOUGH_FOR_SPREAD:
            spread = max(spread, SIGMAS * median(abs(each - middle) for each in usual) / unit)
        cusum = self._sums.setdefault(where, Cusum(is_noisy=not signal.counts))
        if not cusum.add(CusumWindow(value, middle, deviation, spread), noise):
            return None
        _, device, against = where
        return Outlier(signal, device, *cusum.level(), against)


def _values(signal: HealthSignal, numbers: Mapping[str, float]) -> dict[str, float]:
    if signal.unless and numbers.get(signal.unless):
        return {}
    found = by_device(numbers, signal.name)
    uses = by_device(numbers, signal.needs) if signal.needs else dict.fromkeys(found, 1.0)
    return {device: each for device, each in found.items() if uses.get(device, 0.0) >= _IN_USE}
