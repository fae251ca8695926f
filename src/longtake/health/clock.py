"""The node's clock: steps, slews, programs that set it, and offsets of other nodes' clocks.

A step (the clock is set) is detected as a change of CLOCK_REALTIME against a clock that cannot be
set. A slew (the clock runs faster or slower) is detected as a drift against CLOCK_MONOTONIC_RAW,
which is not corrected. Steps backwards break everything that compares system times: timeouts,
certificates, file times.
"""

import ctypes
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from longtake.health.system import HealthProbe, Numbers, read_text

STEP_SECONDS = 1e-3
"""Smallest step (a set clock) in seconds that is detected; several readings of the clocks differ by
less."""
SLEW_PPM = 200.0
"""Drift in parts per million from which the clock counts as slewed (made to run faster or slower):
an oscillator's error is below 100 ppm."""
_SLEW_OVER_PPM = 100.0  # below SLEW_PPM, so that a rate near it does not come and go
_SLEW_SECONDS, _SLEW_SPANS = 5.0, 3  # a slew is reported after three spans in one direction
_NUM_READINGS = 5
_SECOND_LOOK_SECONDS = 0.02


class Clocks(NamedTuple):
    """Readings of three system clocks at the same moment, in nanoseconds."""

    real_ns: int  # CLOCK_REALTIME: the system time, which can be set
    # CLOCK_BOOTTIME: like CLOCK_MONOTONIC it cannot be set and is slewed with the system time; but
    # like the system time it includes the time in which the machine sleeps.
    monotonic_ns: int
    raw_ns: int  # CLOCK_MONOTONIC_RAW: the oscillator, uncorrected

    @property
    def offset_ns(self) -> int:
        return self.real_ns - self.monotonic_ns


@dataclass(frozen=True)
class ClockStepped:
    """A change of the node's clock: it was set to another time."""

    seconds: float  # negative: back


@dataclass(frozen=True)
class ClockSlewed:
    """A change of the node's clock: it is being slewed, that is, runs too fast or too slow."""

    ppm: float  # microseconds per second; positive: too fast
    seconds: float  # total correction since the slew was first seen


@dataclass(frozen=True)
class ClockSteady:
    """A change of the node's clock: it is no longer slewed, and runs as usual."""

    seconds: float  # total correction by the slew


ClockChange = ClockStepped | ClockSlewed | ClockSteady


def read_clocks() -> Clocks:
    """Read the three system clocks; of several readings, the quickest is returned."""
    return min((_reading() for _ in range(_NUM_READINGS)), key=lambda each: each[0])[1]


def _reading() -> tuple[int, Clocks]:
    gettime = time.clock_gettime_ns
    # The system time is read between two readings of each other clock, whose middle is its moment.
    monotonic, raw = gettime(time.CLOCK_BOOTTIME), gettime(time.CLOCK_MONOTONIC_RAW)
    real = gettime(time.CLOCK_REALTIME)
    raw_after, width = gettime(time.CLOCK_MONOTONIC_RAW), gettime(time.CLOCK_BOOTTIME) - monotonic
    return width, Clocks(real, monotonic + width // 2, (raw + raw_after) // 2)


class Clock(HealthProbe):
    """Probe of the node's clock: detects steps between two looks, and slews over some seconds."""

    name = "clock"
    numbers: Mapping[str, str] = {
        "clock_steps_total": "Times that the clock was set by 1 ms or more",
        "clock_backward_steps_total": "Times that the clock was set back",
        "clock_last_step_seconds": "Amount by which the clock was last set; negative: back",
        "clock_slew_ppm": "Drift of the clock against its oscillator in microseconds per second",
    }

    def __init__(self) -> None:
        self._last = read_clocks()
        self._points = deque([self._point(self._last, 0)], maxlen=_SLEW_SPANS + 1)
        self._stepped_ns = 0
        self._steps = self._backward_steps = 0
        self._last_step = 0.0
        self._slewing_since: tuple[int, int] | None = None
        self._changes: list[ClockChange] = []

    def look(self) -> None:
        """Compare the system clocks with the last readings; call this several times a second."""
        now = read_clocks()
        change = self._change_since_last(now)
        if abs(change) >= STEP_SECONDS * 1e9:
            self._stepped_ns += change
            self._steps += 1
            self._backward_steps += change < 0
            self._last_step = change / 1e9
            self._changes.append(ClockStepped(self._last_step))
        self._last = now
        point = self._point(now, self._stepped_ns)
        if point[0] - self._points[-1][0] < _SLEW_SECONDS * 1e9:
            return
        self._points.append(point)
        rates = self._rates()
        if self._slewing_since is not None:
            if abs(rates[-1]) < _SLEW_OVER_PPM:
                self._changes.append(ClockSteady((point[1] - self._slewing_since[1]) / 1e9))
                self._slewing_since = None
        elif len(rates) == _SLEW_SPANS and (min(rates) > SLEW_PPM or max(rates) < -SLEW_PPM):
            first = self._slewing_since = self._points[0]
            ppm = (point[1] - first[1]) / (point[0] - first[0]) * 1e6
            self._changes.append(ClockSlewed(ppm, (point[1] - first[1]) / 1e9))

    def sample(self) -> Numbers:
        self.look()
        found: Numbers = {
            "clock_steps_total": self._steps,
            "clock_backward_steps_total": self._backward_steps,
            "clock_last_step_seconds": self._last_step,
        }
        rates = self._rates()
        return found | ({"clock_slew_ppm": round(rates[-1], 3)} if rates else {})

    def take_changes(self) -> list[ClockChange]:
        taken, self._changes = self._changes, []
        return taken

    def _change_since_last(self, now: Clocks) -> int:
        """Return the nanoseconds by which the system time was set since the last look."""
        change = now.offset_ns - self._last.offset_ns
        if abs(change) < STEP_SECONDS * 1e9:
            return change
        # In simulated clocks (virtual machines, tests) the system time may drift against the other
        # clock. A second reading shows it: a drift continues, a step does not.
        threading.Event().wait(_SECOND_LOOK_SECONDS)
        later = read_clocks()
        rate = (later.offset_ns - now.offset_ns) / max(1, later.monotonic_ns - now.monotonic_ns)
        # A lower rate is noise, and a higher one another step during the pause.
        is_drift = SLEW_PPM * 1e-6 < abs(rate) < 1
        drift = rate * (now.monotonic_ns - self._last.monotonic_ns)
        return change - int(drift) if is_drift else change

    def _point(self, now: Clocks, stepped_ns: int) -> tuple[int, int]:
        # Steps are subtracted, as a step would look like a large slew.
        return now.raw_ns, now.real_ns - stepped_ns - now.raw_ns

    def _rates(self) -> list[float]:
        return [(b[1] - a[1]) / (b[0] - a[0]) * 1e6 for a, b in pairwise(self._points)]


# --- Programs that set the clock.

_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000  # from linux/timex.h
_NOMINAL_TICK = 10_000  # microseconds, at the 100 ticks per second of user space
_ERROR = -1


class _Timex(ctypes.Structure):
    """The C structure `timex` of adjtimex(2), with its padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance")),
        *((name, ctypes.c_long) for name in ("seconds", "microseconds", "tick")),
        ("pulses", ctypes.c_long * 3),
        ("shift", ctypes.c_int),
        ("pulse_counts", ctypes.c_long * 4),
        ("tai", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


class KernelClock(HealthProbe):
    """Health probe of the kernel's clock corrections, which chrony or ntpd makes by adjtimex."""

    name = "kernel_clock"
    numbers: Mapping[str, str] = {
        "clock_is_synchronised": "1: the program that disciplines the clock follows a source",
        "clock_kernel_offset_seconds": "Offset that the kernel has still to correct",
        "clock_kernel_correction_ppm": "Rate by which the kernel makes the clock run faster",
        "clock_kernel_max_error_seconds": "Largest error of the clock; it rises by 500 ppm unless "
        "a program disciplines the clock",
    }

    def __init__(self) -> None:
        self._adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)

    def sample(self) -> Numbers:
        """Read the state of the kernel's clock by adjtimex(2); no numbers without adjtimex."""
        timex = _Timex(modes=0)
        if self._adjtimex is None or self._adjtimex(ctypes.byref(timex)) == _ERROR:
            return {}
        # adjtimex(2): the unit of `offset` is set by a bit of `status`.
        of_one = 1e-9 if timex.status & _STA_NANO else 1e-6
        # Coarse corrections change the length of a tick, fine ones `freq`, in 2**-16 ppm.
        ticks_ppm = (timex.tick - _NOMINAL_TICK) * 1e6 / _NOMINAL_TICK
        return {
            "clock_is_synchronised": float(not timex.status & _STA_UNSYNC),
            "clock_kernel_offset_seconds": timex.offset * of_one,
            "clock_kernel_correction_ppm": round(timex.freq / 65536 + ticks_ppm, 3),
            "clock_kernel_max_error_seconds": timex.maxerror * 1e-6,
        }


_CHRONYC = ("chronyc", "-n", "-c", "tracking")
_CHRONYC_TIMEOUT_SECONDS = 5.0
_CHRONYC_EVERY_SECONDS = 60.0
_UNREACHABLE_STRATUM = 16
# Indices of fields in a line of `chronyc -c tracking`: see chronyc(1), "tracking".
_STRATUM, _OFFSET, _RMS_OFFSET, _FREQUENCY, _DELAY, _DISPERSION, _LEAP = 2, 4, 6, 7, 10, 11, 13


class Chrony(HealthProbe):
    """Health probe that asks chronyd once a minute through `command`, without privileges."""

    name = "chrony"
    numbers: Mapping[str, str] = {
        "clock_ntp_offset_seconds": "The clock minus the time of chrony's sources; positive: fast",
        "clock_ntp_rms_offset_seconds": "Root mean square of that offset over a long time",
        "clock_ntp_error_seconds": "Largest error of chrony's time: half the delay to the source, "
        "plus its dispersion",
        "clock_ntp_frequency_ppm": "Error of the oscillator, which chrony corrects; positive: fast",
        "clock_ntp_stratum": "Distance from a reference clock in steps; 16: no source is reached",
    }

    def __init__(self, command: Sequence[str] = _CHRONYC) -> None:
        self._command = command
        self._is_installed = shutil.which(command[0]) is not None
        self._asked = float("-inf")
        self._found: Numbers = {}

    def sample(self) -> Numbers:
        """Return chronyd's numbers on the clock, at most a minute old. It may take 5 s.

        Without chronyd there are none.
        """
        now = time.monotonic()
        if self._is_installed and now - self._asked >= _CHRONYC_EVERY_SECONDS:
            # Emptied before, so that numbers of a chronyd that no longer answers are not returned.
            self._asked, self._found = now, {}
            with suppress(OSError, subprocess.SubprocessError):
                line = subprocess.check_output(  # noqa: S603 - the program's name is ours
                    self._command,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    timeout=_CHRONYC_TIMEOUT_SECONDS,
                )
                self._found = parse_tracking(line)
        return dict(self._found)


def parse_tracking(line: str) -> Numbers:
    """Parse a line of `chronyc -c tracking` to health numbers; none for an invalid line."""
    fields = line.strip().split(",")
    with suppress(IndexError, ValueError):
        is_lost = fields[_LEAP] == "Not synchronised"
        error = float(fields[_DELAY]) / 2 + float(fields[_DISPERSION])
        return {
            # chrony's sign is the opposite: positive if the clock is slow.
            "clock_ntp_offset_seconds": 0.0 - float(fields[_OFFSET]),
            "clock_ntp_rms_offset_seconds": float(fields[_RMS_OFFSET]),
            "clock_ntp_error_seconds": error,
            "clock_ntp_frequency_ppm": float(fields[_FREQUENCY]),
            "clock_ntp_stratum": _UNREACHABLE_STRATUM if is_lost else float(fields[_STRATUM]),
        }
    return {}


_LINUXPTP = frozenset({"ptp4l", "phc2sys", "timemaster"})  # programs that work together
# The kernel keeps 15 characters of a process's name, hence systemd-timesyn.
_DAEMONS = frozenset({"chronyd", "ntpd", "ntpdate", "ntpsec", "openntpd", "sntp"})
_DAEMONS |= {"systemd-timesyn", "vmtoolsd"} | _LINUXPTP


def time_daemons(proc: Path = Path("/proc")) -> list[str]:
    names = {read_text(folder / "comm") for folder in proc.glob("[0-9]*")}
    found = {name for name in names if name in _DAEMONS}
    return sorted({"linuxptp" if name in _LINUXPTP else str(name) for name in found})


class TimeDaemons(HealthProbe):
    """Health probe that counts programs that set the clock; two work against each other."""

    name = "time_daemons"
    numbers: Mapping[str, str] = {"clock_daemons": "Running programs that set the clock"}

    def sample(self) -> Numbers:
        return {"clock_daemons": float(len(time_daemons()))}


# --- Other nodes' clocks.

_MAX_LEADS = 30  # five minutes at one sample per ten seconds
LEAD = "clock_lead_seconds"


class ClockOffsets:
    """Bounds of the offsets between this node's clock and other nodes', from times in heartbeats.

    A time in another node's heartbeat that is in the future here proves that the other clock is
    ahead. The offset is at least the greatest such lead of the last minutes, as the delay between
    writing and reading only reduces leads. The other node publishes the opposite bound. Both form
    an interval, as with NTP, whose width is the time until a heartbeat is seen: about a second.
    """

    numbers: Mapping[str, str] = {
        LEAD: "Least lead of the other node's clock; negative: greatest lag of clock or heartbeat",
        "clock_offset_at_least_seconds": "Least difference of the two clocks",
        "clock_offset_at_most_seconds": "Greatest possible difference of the two clocks",
    }

    def __init__(self, host: str) -> None:
        self._host = host
        self._leads: dict[str, deque[float]] = {}

    def forget(self) -> None:
        self._leads = {}

    def look(self, host: str, heartbeat: Mapping[str, Any], wall: float) -> Numbers:
        """Update the bounds of a node's clock offset by its heartbeat; the node must be alive.

        Args:
            host: the other node.
            heartbeat: content of its heartbeat.json.
            wall: this node's time just after reading it, in seconds since 1970.

        Returns:
            The numbers about the other node's clock.
        """
        date = heartbeat.get("wall")
        if not isinstance(date, int | float):
            return {}
        leads = self._leads.setdefault(host, deque(maxlen=_MAX_LEADS))
        leads.append(date - wall)
        lead = max(leads)
        found = {f"{LEAD}:{host}": round(lead, 6)}
        theirs = (heartbeat.get("health") or {}).get(f"{LEAD}:{self._host}")
        low, high = lead, -theirs if isinstance(theirs, int | float) else float("inf")
        # Bounds that contradict each other are from before and after a clock was set. Then only a
        # lead that is positive proves a difference.
        if low <= high < float("inf"):
            found[f"clock_offset_at_most_seconds:{host}"] = round(max(abs(low), abs(high)), 6)
            found[f"clock_offset_at_least_seconds:{host}"] = round(max(low, -high, 0.0), 6)
        elif low > 0:
            found[f"clock_offset_at_least_seconds:{host}"] = round(low, 6)
        return found
