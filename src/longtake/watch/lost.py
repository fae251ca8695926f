"""Notices ranks whose processes are gone without having ended as they should."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longtake.heartbeat import Pulse

_SECONDS_BETWEEN_COUNTS = 5.0
_COUNTS = 8


@dataclass(frozen=True)
class Lost:
    """A rank that died.

    Attributes:
        pulse: what it said last.
        is_first: whether it is the first of its launch on this node; the others may have been
            ended because of it.
    """

    pulse: Pulse
    is_first: bool

    def reason(self, kills: int) -> str:
        """What is known of it, in a sentence; see `as_event`."""
        pulse = self.pulse
        on = f" on {pulse.detail}" if pulse.detail else ""
        where = f"step {pulse.step}, {pulse.phase}{on}"
        text = f"rank {pulse.rank} (process {pulse.pid}) is gone without having ended: {where}"
        if kills:
            text += "; the kernel ended it, or another process of the job: out of memory"
        return f"{text}."

    def as_event(self, kills: int) -> dict[str, Any]:
        """The fields of the event `rank_died`.

        Args:
            kills: how many processes of the job the kernel has ended lately, for want of memory.
        """
        pulse = self.pulse
        names = ("pid", "rank", "launch", "step", "phase", "detail")
        fields = {name: getattr(pulse, name) for name in names}
        seconds = round(pulse.seconds, 3)
        reason = {"out_of_memory": kills > 0, "reason": self.reason(kills)}
        return {**fields, "seconds": seconds, **reason}


def alert_of(found: Sequence[Lost], kills: int) -> dict[str, Any]:
    """What people are told of ranks that were found gone at one look: all of them at once.

    Args:
        found: the ranks, one at least.
        kills: as for `Lost.as_event`.
    """
    first = next((lost for lost in found if lost.is_first), found[0])
    event = first.as_event(kills)
    if len(found) == 1:
        return event
    ranks = [lost.pulse.rank for lost in found]
    names = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return {**event, "ranks": ranks, "reason": f"ranks {names} are gone: {event['reason']}"}


class Roll:
    """Who has been seen alive, and who of them is missing.

    A rank that was dead before anybody looked belongs to this launch only if one of its ranks
    lives.
    """

    def __init__(self) -> None:
        self._alive: set[tuple[int, int]] = set()
        self._told: set[tuple[int, int]] = set()
        self._launches: set[str] = set()
        self._counts: deque[tuple[float, int]] = deque(maxlen=_COUNTS)

    def wants_count(self, now: float) -> bool:
        """Whether it is time for `count_kills`."""
        return not self._counts or now - self._counts[-1][0] >= _SECONDS_BETWEEN_COUNTS

    def count_kills(self, kills: int | None, now: float) -> None:
        """Take down how many processes the kernel has ended for want of memory, ever.

        Args:
            kills: None: it does not say.
            now: `time.monotonic()`.
        """
        self._counts.append((now, kills or 0))

    def kills_since(self, kills: int | None) -> int:
        """How many more there are than some seconds ago, when a rank was yet about to die."""
        return max(0, (kills or 0) - self._counts[0][1]) if self._counts else 0

    def call(self, living: Iterable[Pulse], dead: Iterable[Pulse]) -> list[Lost]:
        """The ranks that are missing since the last call, in the order of their ranks.

        Args:
            living: hearts whose processes exist.
            dead: hearts whose processes do not.
        """
        ranks = [pulse for pulse in living if pulse.role == "rank"]
        launches = {pulse.launch for pulse in ranks if pulse.launch}
        self._alive |= {(pulse.pid, pulse.started) for pulse in ranks}
        found = []
        for pulse in (each for each in dead if each.role == "rank" and each.phase != "ended"):
            who = (pulse.pid, pulse.started)
            is_ours = who in self._alive or pulse.launch in launches
            if is_ours and who not in self._told:
                self._told.add(who)
                is_first = pulse.launch not in self._launches
                self._launches.add(pulse.launch)
                found.append(Lost(pulse, is_first))
        return found
