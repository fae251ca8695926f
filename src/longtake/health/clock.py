"""Whether the node's clock is stepped or slewed.

A step (somebody sets the clock) shows as a change of CLOCK_REALTIME against a clock that cannot be
set; a slew (somebody makes it run faster or slower) as a drift of it against CLOCK_MONOTONIC_RAW,
which is not corrected. Steps backwards break what compares dates, such as time limits of
collectives, certificates and files' dates.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from longtake.health.check import Numbers
from longtake.health.clock_alarm import ClockAlarm

STEP_SECONDS = 1e-3
"""Smaller ones are told of only where the kernel says that the clock was set."""
SLEW_PPM = 200.0
"""More than the error of a machine's oscillator (under 100 ppm): somebody corrects the clock."""
_SLEW_OVER_PPM = 100.0
_SLEW_SECONDS = 5.0
_SLEW_SPANS = 3
_READINGS = 5
_SECOND_LOOK_SECONDS = 0.02


class Clocks(NamedTuple):
    """The three clocks at one moment."""

    real_ns: int
    """CLOCK_REALTIME: the date, which can be set."""
    monotonic_ns: int
    """CLOCK_BOOTTIME: like CLOCK_MONOTONIC it cannot be set, but is slewed together with the date;
    it goes on while the machine sleeps, as the date does."""
    raw_ns: int
    """CLOCK_MONOTONIC_RAW: the oscillator, uncorrected."""

    @property
    def offset_ns(self) -> int:
        """Constant unless the date is set."""
        return self.real_ns - self.monotonic_ns


@dataclass(frozen=True)
class Stepped:
    """The clock was set.

    Attributes:
        seconds: by how much: negative is backwards. 0, or next to it: it was set, and set back
            before anybody could look.
    """

    seconds: float


@dataclass(frozen=True)
class Slewed:
    """The clock runs too fast (positive) or too slowly on purpose.

    Attributes:
        ppm: by how many microseconds a second.
        seconds: by how much it was moved since that was first seen.
    """

    ppm: float
    seconds: float


@dataclass(frozen=True)
class Steady:
    """A slew has ended.

    Attributes:
        seconds: by how much it has moved the clock.
    """

    seconds: float


Change = Stepped | Slewed | Steady


def read_clocks() -> Clocks:
    """Read the clocks, the date in the middle of the others; nothing else here reads a clock."""
    return min((_reading() for _ in range(_READINGS)), key=lambda each: each[0])[1]


def _reading() -> tuple[int, Clocks]:
    gettime = time.clock_gettime_ns
    monotonic, raw = gettime(time.CLOCK_BOOTTIME), gettime(time.CLOCK_MONOTONIC_RAW)
    real = gettime(time.CLOCK_REALTIME)
    raw_after, monotonic_after = (
        gettime(time.CLOCK_MONOTONIC_RAW),
        gettime(time.CLOCK_BOOTTIME),
    )
    width = monotonic_after - monotonic
    return width, Clocks(real, monotonic + width // 2, (raw + raw_after) // 2)


class Clock:
    """Sees steps from one look to the next, and slews over some seconds.

    Attributes:
        fileno: becomes readable when the clock is set; None where the kernel does not tell.
    """

    name = "clock"
    numbers: Mapping[str, str] = {
        "clock_steps_total": "How often the clock was set, by 1 ms or more",
        "clock_backward_steps_total": "How often it was set back",
        "clock_last_step_seconds": "By how much it was last set; negative: back",
        "clock_sets_total": "How often the kernel said that the clock was set, however little",
        "clock_slew_ppm": "Microseconds a second by which the clock runs faster than its "
        "oscillator",
    }

    def __init__(self) -> None:
        self._alarm: ClockAlarm | None = None
        with suppress(OSError):
            self._alarm = ClockAlarm()
        self._last = read_clocks()
        self._points = deque([self._point(self._last, 0)], maxlen=_SLEW_SPANS + 1)
        self._stepped_ns = 0
        self._steps = self._backward_steps = self._sets = 0
        self._last_step = 0.0
        self._is_explained = False
        self._slewing_since: tuple[int, int] | None = None
        self._changes: list[Change] = []

    @property
    def fileno(self) -> int | None:
        """To wait for a step."""
        return None if self._alarm is None else self._alarm.fileno

    def look(self) -> None:
        """Compare the clocks with those of the last look; to be called some times a second."""
        was_set = self._alarm is not None and self._alarm.has_gone()
        self._sets += was_set
        now = read_clocks()
        change = self._change_since_last(now)
        is_step = abs(change) >= STEP_SECONDS * 1e9
        if is_step:
            self._note_step(change)
        elif was_set and not self._is_explained:
            self._changes.append(Stepped(change / 1e9))
        # Set between the two lines above: the kernel's word on this step comes with the next look.
        self._is_explained = is_step and not was_set
        self._last = now
        self._look_for_slew(now)

    def sample(self) -> Numbers:
        """The numbers now."""
        self.look()
        found: Numbers = {
            "clock_steps_total": self._steps,
            "clock_backward_steps_total": self._backward_steps,
            "clock_last_step_seconds": self._last_step,
            "clock_sets_total": self._sets,
        }
        rates = self._rates()
        return found | ({"clock_slew_ppm": round(rates[-1], 3)} if rates else {})

    def take_changes(self) -> list[Change]:
        """What was seen since the last call."""
        taken, self._changes = self._changes, []
        return taken

    def close(self) -> None:
        """Give the kernel's timer back."""
        if self._alarm is not None:
            self._alarm.close()
        self._alarm = None

    def _change_since_last(self, now: Clocks) -> int:
        """Nanoseconds by which the date was set since the last look."""
        change = now.offset_ns - self._last.offset_ns
        if abs(change) < STEP_SECONDS * 1e9:
            return change
        # Where clocks are simulated (virtual machines, tests) the date may drift against the other
        # clock; a step does not go on.
        threading.Event().wait(_SECOND_LOOK_SECONDS)
        later = read_clocks()
        rate = (later.offset_ns - now.offset_ns) / max(1, later.monotonic_ns - now.monotonic_ns)
        is_drift = SLEW_PPM * 1e-6 < abs(rate) < 1  # noise; and steps while we look
        drift = rate * (now.monotonic_ns - self._last.monotonic_ns)
        return change - int(drift) if is_drift else change

    def _note_step(self, change: int) -> None:
        self._stepped_ns += change
        self._steps += 1
        self._backward_steps += change < 0
        self._last_step = change / 1e9
        self._changes.append(Stepped(self._last_step))

    def _point(self, now: Clocks, stepped_ns: int) -> tuple[int, int]:
        """The oscillator, and how far the date is from it by slewing."""
        return now.raw_ns, now.real_ns - stepped_ns - now.raw_ns

    def _look_for_slew(self, now: Clocks) -> None:
        point = self._point(now, self._stepped_ns)
        if point[0] - self._points[-1][0] < _SLEW_SECONDS * 1e9:
            return
        self._points.append(point)
        rates = self._rates()
        if self._slewing_since is not None:
            if abs(rates[-1]) < _SLEW_OVER_PPM:
                self._changes.append(Steady((point[1] - self._slewing_since[1]) / 1e9))
                self._slewing_since = None
        elif len(rates) == _SLEW_SPANS and _all_beyond(rates, SLEW_PPM):
            first = self._slewing_since = self._points[0]
            ppm = (point[1] - first[1]) / (point[0] - first[0]) * 1e6
            self._changes.append(Slewed(ppm, (point[1] - first[1]) / 1e9))

    def _rates(self) -> list[float]:
        """Parts per million between the points."""
        return [(b[1] - a[1]) / (b[0] - a[0]) * 1e6 for a, b in pairwise(self._points)]


def _all_beyond(rates: list[float], limit: float) -> bool:
    return min(rates) > limit or max(rates) < -limit
