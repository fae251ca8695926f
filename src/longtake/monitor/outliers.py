"""Compares a node's numbers with other nodes' and with its own past, window by window.

A healthy cluster is not uniform, so no single number is judged. A deviation is the distance from
the median of the others as a share of the mean of both, equal in both directions: half the time is
as far as twice. Spreads are robust (1.4826 MAD) and never less than healthy hardware's. What
exceeds an allowance adds up over windows (`Cusum`).

Measured: none of 90 runs of 1,000 windows on two, three and four ranks had a false alarm, at 3 and
at 6 % noise, all ranks judged. One of two ranks that becomes 10 % slower is found after 4.6 windows
on average at 1.5 % noise and after 7.1 at 3 %, one of four after 4.7 and 5.6; 30 % take three.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi, sqrt
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from longtake.health.network import BUSY, RATE
from longtake.health.system import OPEN_FILES, Numbers, StatelessProbe, open_files
from longtake.heartbeat import Heartbeat, Phase, read_heartbeats
from longtake.node_dir import beat_of
from longtake.node_numbers import CHECKPOINT, SIGMAS, SIGNALS, Baseline, HealthSignal, by_device

_T = TypeVar("_T")
SLOW = "peer_send_share"
ALL_UP_TO = 17  # so many nodes are all compared with each other

_SAVES: tuple[Phase, ...] = ("checkpoint", "save")
_NEAR_SAMPLES = 6  # after the last save, for what it wrote may still be on its way to the disk


# --- What the ranks of this node need for a step.


class StepProbe(StatelessProbe):
    """Compares ranks' heartbeats with those of the last sample; `folder`: the heartbeat folder."""

    name = "steps"
    numbers: Mapping[str, str] = {
        "step_work_seconds": "The rank's own work for a step, without waiting for others",
        "steps_per_second": "Steps that the rank has done",
        CHECKPOINT: "1: a rank of the node saves a checkpoint, or did in the last six samples",
        **OPEN_FILES,
    }

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: dict[tuple[int, int], tuple[float, Heartbeat]] = {}
        self._near = 0

    def sample(self) -> Numbers:
        """The numbers since the last sample, by rank; no `step_work_seconds` without a step."""
        now = time.monotonic()
        found = read_heartbeats(self._folder)
        ranks = {(each.pid, each.started): (now, each) for each in found if each.role == "rank"}
        numbers: Numbers = {}
        for who, (_, each) in ranks.items():
            if who in self._before and each.phase != "ended":
                numbers |= _since(*self._before[who], now, each)
        numbers[CHECKPOINT] = float(self._is_near(each for _, each in ranks.values()))
        self._before = ranks
        return numbers | open_files([each.pid for each in found if each.phase != "ended"])

    def _is_near(self, ranks: Iterable[Heartbeat]) -> bool:
        """Whether a rank saves, or has saved since one of the last samples."""
        before = {who: each for who, (_, each) in self._before.items()}
        seen = [
            each.phase in _SAVES
            or _num_saves(each) > _num_saves(before.get((each.pid, each.started)))
            for each in ranks
        ]
        self._near = _NEAR_SAMPLES if any(seen) else max(0, self._near - 1)
        return self._near > 0


def _since(then: float, before: Heartbeat, now: float, after: Heartbeat) -> Numbers:
    steps = after.steps_done - before.steps_done
    found = {f"steps_per_second:{after.rank}": round(steps / max(1e-9, now - then), 6)}
    count = after.work_count - before.work_count
    if count > 0:
        seconds = (after.work_seconds - before.work_seconds) / count
        found[f"step_work_seconds:{after.rank}"] = round(seconds, 6)
    return found


def _num_saves(heartbeat: Heartbeat | None) -> int:
    timings = heartbeat.timings if heartbeat else {}
    return sum(timings[each].count for each in _SAVES if each in timings)


# --- Which nodes are compared.


def peers_of(host: str, hosts: Sequence[str]) -> list[str]:
    """The nodes that a node is compared with: those 1, 2, 4, 8, ... places before and after it.

    All of up to 17 nodes, 14 of 200: enough to know what is usual, few enough to read. Neighbours
    in a rack, which may fail together, are compared with other racks too; and a node that one node
    reads reads that node.
    """
    if host not in hosts or len(hosts) <= ALL_UP_TO:
        return [other for other in hosts if other != host][: ALL_UP_TO - 1]
    at, count = hosts.index(host), len(hosts)
    strides = [2**power for power in range(count.bit_length()) if 2 * 2**power <= count]
    found = {(at + sign * stride) % count for stride in strides for sign in (1, -1)}
    return [other for place, other in enumerate(hosts) if place in found]


class LivingNodes:
    """Tells heartbeats that continue from those of nodes that are gone or do not move."""

    def __init__(self) -> None:
        self._beats: dict[str, object] = {}

    def of(self, heartbeats: Mapping[str, Mapping[str, Any]], launch: str) -> list[str]:
        """Nodes of this launch whose heartbeat changed since the last call."""
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

_WAITED_FOR = 0.5  # of the time: a link that is busy for less is not what a run waits for most
_WELL = 0.5  # of the usual: a slower link that is waited for is no measure for its own future
_ENOUGH_PAST, _MOST_PAST = 3, 30


class SlowLinks:
    """Finds links that a run waits for and that are slower than links usually are."""

    numbers: Mapping[str, str] = {
        SLOW: "Rate of the link to that node as a share of the usual, if the run waits for it"
    }

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MOST_PAST))

    def judge(self, own: Numbers, others: Mapping[str, Numbers]) -> Numbers:
        """The share of the usual rate of each link that is waited for, by the node it leads to.

        Usual is the median of the present rates of other nodes' links and this one's past.
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
            if share > _WELL or not is_waited_for:
                past.append(rate)
        return found


# --- Noise: by how much numbers differ from window to window without a reason. It is estimated from
# changes between windows, which do not depend on levels: a rank that is always slow adds nothing.
# Changes far from the usual (it became slow) count for less, and few windows' noise for more.

_NOISE_WINDOWS, _LATE_WINDOWS = 256, 32
_FAR = 3.0  # medians: larger changes count as that
_LATE_SHARE = 0.9  # noise that rose lately counts; of few windows it seems to rise now and then
_NORMAL = sqrt(pi) / 2  # standard deviation by the mean distance of two normal draws
_MEDIAN = 1.4826 / sqrt(2) / _NORMAL  # the mean of such distances by their median


class NoiseEstimate:
    """The noise of one number of one device."""

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=_NOISE_WINDOWS)

    @property
    def count(self) -> int:
        return len(self._changes)

    def add(self, change: float) -> None:
        self._changes.append(abs(change))

    def deviation(self) -> float:
        """The standard deviation, rather too large than too small; 0: unknown."""
        changes, count = self._changes, self.count
        if not count:
            return 0.0
        most = _FAR * median(changes)
        late = islice(changes, max(0, count - _LATE_WINDOWS), None)
        sums = sum(min(each, most) for each in changes), sum(min(each, most) for each in late)
        mean = max(sums[0] / count, _LATE_SHARE * sums[1] / min(count, _LATE_WINDOWS))
        return _NORMAL * mean * (1 + 1.5 / count + 12 / count**2)


class SharedNoise:
    """The noise of all devices of a kind, known sooner than that of each."""

    def __init__(self) -> None:
        self._noise = NoiseEstimate()
        self._before: dict[tuple[str, str], float] = {}

    def add(self, values: Mapping[tuple[str, str], float], least: float) -> float:
        """Add a window; returns the standard deviation of a share from the median of the others."""
        middle = median(values.values()) if values else 0.0
        shares = {who: _share(each, middle, least) for who, each in values.items()}
        changes = [
            abs(each - self._before[who]) for who, each in shares.items() if who in self._before
        ]
        self._before = shares
        if len(changes) > 2:  # of two, each alone knows as much
            # The median of all moves with each of them; that of the others does not.
            self._noise.add(_MEDIAN * median(changes) * len(changes) / (len(changes) - 1))
        return self._noise.deviation()


def _share(value: float, usual: float, least: float) -> float:
    return (value - usual) / max((abs(value) + abs(usual)) / 2, least, 1e-12)


# --- Adding up.

_ALLOWANCE = 1.1
_ALARM = 5.3
# Much noise hides a little slowness anyway: then false alarms cost more.
_ALARM_OF_NOISE, _CALM_NOISE = 3.0, 1.25
_MOST = 3.0
_CALM = 0.5
_CEILING = 2 * _ALARM
_CUSUM_WINDOWS = 48
_ENOUGH_FOR_NOISE = 3


@dataclass(frozen=True)
class CusumWindow:
    """One value of a number, and what was usual then."""

    value: float
    usual: float  # median of what it is compared with
    deviation: float  # to the bad side, as a share
    spread: float  # of healthy ones, as a share


class Cusum:
    """What adds up, window by window, about one number of one device.

    Each window gives a z: by how many spreads a value is worse than the usual. What exceeds an
    allowance adds up, and what stays under it is subtracted again (cumulative sum, Page 1954). No
    window counts for more than `_MOST`, so an alarm takes three of them however bad one was. A
    spread is never less than the number's own noise: numbers that differ more take longer to add
    up. Once more of the noise is known, the windows before are weighed anew by it.
    """

    def __init__(self, is_noisy: bool = True) -> None:
        self._is_noisy = is_noisy
        self._windows: deque[CusumWindow] = deque(maxlen=_CUSUM_WINDOWS)
        self._noise = NoiseEstimate()
        self._adding = 0
        self._is_bad = False

    def add(self, window: CusumWindow, others: float = 0.0) -> bool:
        """Whether the number is bad after one more window."""
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
    return _ALARM + _ALARM_OF_NOISE * min(1.0, max(0.0, noise - _CALM_NOISE))


@dataclass(frozen=True)
class Outlier:
    """A number that has been worse for some windows."""

    signal: HealthSignal
    device: str  # empty: of the node
    value: float  # in the middle of these windows
    usual: float  # in the same unit, the median of what it is compared with
    against: Baseline

    @property
    def percent(self) -> float:
        return 100 * (self.value / self.usual - 1) if self.usual else 0.0

    def __str__(self) -> str:
        """GPU 3 power 412 W against 655 W median; rank 24 step time +11 %."""
        signal = self.signal
        if signal.counts:
            port = " port ".join(self.device.rsplit("/", 1))
            value, usual = _count(self.value), _count(self.usual)
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
_IN_USE = 0.1
_MOST_ABSENT = 12  # windows for which an outlier outlives its number: steps may be longer
_Key = tuple[str, str, Baseline]  # signal, device


class OutlierDetector:
    """Judges a node window by window; equal numbers give equal outliers."""

    def __init__(self, signals: Sequence[HealthSignal] = SIGNALS) -> None:
        self._signals = signals
        self._sums: dict[_Key, Cusum] = {}
        self._noises = {signal.name: SharedNoise() for signal in signals}
        self._past: dict[_Key, deque[float]] = defaultdict(lambda: deque(maxlen=_BASELINE_WINDOWS))
        self._bad: dict[_Key, tuple[Outlier, int]] = {}

    def judge(
        self, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]
    ) -> list[Outlier]:
        """All outliers after one more window.

        A number that is missing in this window, or has nothing to be compared with, stays what it
        was for some windows.
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
        """The keys that are judged of one signal, each with its outlier."""
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
                    past.append(value)  # the start stays the baseline
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
