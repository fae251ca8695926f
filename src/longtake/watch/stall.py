"""Says which processes take too long: by what their phases have taken before; pure.

How long a phase takes is learnt from each launch itself, and a stall is a multiple of the longest
time seen. What has not been seen yet, or is known to be rare and long, has an allowance.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from longtake.config import WatchSection
from longtake.heartbeat import Phase, Pulse, Role

_BEFORE_STEPS: frozenset[Phase] = frozenset(
    {"start", "rendezvous", "open", "plan", "build", "load"}
)
_OF_STATE: frozenset[Phase] = frozenset({"checkpoint", "save", "rollback"})
_RARE: frozenset[Phase] = _OF_STATE | {"evaluate"}
_MIN_WINDOWS, _MIN_WINDOWS_OF_EACH = 20, 4
"""Decoding is learnt from so many windows, and so many of each process: the first are of few
clips."""
_LIMITLESS: frozenset[Phase] = frozenset({"idle", "ended", "cache"})


@dataclass(frozen=True)
class Overdue:
    """A heart that has been in its phase for too long.

    Attributes:
        pulse: what it says.
        limit: seconds that it should have taken at most.
    """

    pulse: Pulse
    limit: float


class Expectations:
    """What each phase may take on this node, in the launch that runs.

    Args:
        section: the recipe's.

    Attributes:
        launch: which launch; empty: it has not told yet.
        seconds_late: by how much the watcher itself was late, in all.
    """

    def __init__(self, section: WatchSection) -> None:
        self.launch = ""
        self.seconds_late = 0.0
        self._section = section
        self._longest: dict[tuple[Role, Phase], float] = {}
        self._windows: dict[tuple[int, int], int] = {}
        self._num_workers = 0
        self._slips: list[tuple[float, float]] = []
        self._excused_at: float | None = None

    def learn(self, pulses: Iterable[Pulse]) -> None:
        """Take in what living processes' phases have taken; another launch is learnt afresh."""
        pulses = list(pulses)
        ranks = [pulse for pulse in pulses if pulse.role == "rank"]
        if ranks and (launch := max(ranks, key=lambda each: each.started).launch) != self.launch:
            self.launch = launch
            self._longest.clear()
            self._windows.clear()
        workers = [pulse for pulse in pulses if pulse.role == "decode"]
        self._num_workers = len(workers)
        for pulse in workers:
            timing = pulse.timings.get("decode")
            self._windows[pulse.pid, pulse.started] = timing.count if timing else 0
        for pulse in pulses:
            if not self._is_of_another_launch(pulse):
                for phase, timing in pulse.timings.items():
                    key = (pulse.role, phase)
                    self._longest[key] = max(timing.longest, self._longest.get(key, 0.0))

    def was_late(self, seconds: float, now: float) -> None:
        """Extend all limits that run: the machine was suspended, or too busy to watch.

        Args:
            seconds: how long nobody looked, beyond what was planned.
            now: `time.monotonic()`.
        """
        self.seconds_late += seconds
        recent = [slip for slip in self._slips if now - slip[0] < self._section.start_seconds]
        self._slips = [*recent, (now, seconds)]

    def excuse(self, now: float) -> None:
        """Give hearts that have waited for another one time to go on: its stall is over now."""
        self._excused_at = now

    def limit_of(self, pulse: Pulse, now: float) -> float | None:
        """Seconds that the phase it is in may take; None: any time."""
        base = self._base_limit(pulse)
        if base is None or self._is_of_another_launch(pulse):
            return None
        since = now - pulse.seconds
        limit = base + sum(seconds for at, seconds in self._slips if at >= since)
        if self._excused_at is not None and since <= self._excused_at:
            limit = max(limit, self._excused_at - since + self._section.min_seconds)
        return limit

    def overdue(self, pulses: Iterable[Pulse], now: float) -> list[Overdue]:
        """The hearts that are past their limits, the one that has been for longest first."""
        limits = ((pulse, self.limit_of(pulse, now)) for pulse in pulses)
        found = [Overdue(pulse, limit) for pulse, limit in limits if limit is not None]
        late = (each for each in found if each.pulse.seconds > each.limit)
        return sorted(late, key=lambda each: -each.pulse.seconds)

    def _base_limit(self, pulse: Pulse) -> float | None:
        section = self._section
        if pulse.phase in _LIMITLESS:
            return None
        if pulse.phase in _BEFORE_STEPS:
            return section.start_seconds
        longest = self._longest.get((pulse.role, pulse.phase))
        floor = section.checkpoint_seconds if pulse.phase in _RARE else section.min_seconds
        usual = max(floor, min(section.factor * (longest or 0.0), section.max_seconds))
        if longest is None and pulse.phase in _OF_STATE:
            # The one at the end, or at an interrupt, is waited for until all is written.
            return max(section.checkpoint_seconds, section.start_seconds)
        is_known = longest is not None and pulse.is_settled and self._knows_decoding(pulse)
        return usual if is_known else max(usual, section.first_steps_seconds)

    def _knows_decoding(self, pulse: Pulse) -> bool:
        enough = max(_MIN_WINDOWS, _MIN_WINDOWS_OF_EACH * self._num_workers)
        return pulse.phase != "decode" or sum(self._windows.values()) >= enough

    def _is_of_another_launch(self, pulse: Pulse) -> bool:
        return pulse.launch not in ("", self.launch)


def still_holds(before: Overdue, after: Pulse | None, limit: float | None) -> bool:
    """Whether a heart that gave the alarm is still where it was, past its limit.

    A rank that is gone without a word is; one that has ended as it should is not, and neither is
    a decoding process that is gone, for its pool has replaced it.

    Args:
        before: the heart, as it gave the alarm.
        after: as it is now; None: its record is gone, as that of a rank that has ended well is.
        limit: of its phase now, in seconds.
    """
    if after is None or after.phase == "ended":
        return False
    if not after.is_alive:
        return after.role == "rank"
    return not has_moved(before.pulse, after) and limit is not None and after.seconds > limit


def has_moved(before: Pulse, after: Pulse) -> bool:
    """Whether a heart is no longer in the phase in which it was read before."""
    is_same = (before.phase, before.step, before.detail) == (after.phase, after.step, after.detail)
    return not is_same or after.seconds < before.seconds
