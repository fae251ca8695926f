"""Observation of a node's processes: living ones, dead ones, and those that exceed a time limit.

Limits are learnt from the launch itself: a phase may take a multiple of its longest duration so
far. Phases that were not seen yet, or are rare and long, have a constant limit.
"""

import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from longtake.config import WatchSection
from longtake.failures import failure_of
from longtake.formatting import join_words
from longtake.heartbeat import Heartbeat, Phase, Role, read_heartbeat, read_heartbeats
from longtake.monitor import flight_recorder
from longtake.process import SETTINGS_VARIABLE
from longtake.stacks import stack_file

_STALE_SECONDS = 60.0  # time for which the pages of dead decode workers are kept
_SECONDS_BETWEEN_COUNTS, _NUM_COUNTS = 5.0, 8  # samples of the kernel's count of OOM kills

_BEFORE_STEPS: frozenset[Phase] = frozenset(
    {"start", "rendezvous", "open", "plan", "build", "load"}
)
_OF_STATE: frozenset[Phase] = frozenset({"checkpoint", "save", "rollback"})
_RARE: frozenset[Phase] = _OF_STATE | {"sampling"}
_UNLIMITED: frozenset[Phase] = frozenset({"idle", "ended", "cache"})
# Fewest windows, in all and per worker, from which the limit of decoding is learnt: the first
# windows come from few clips.
_MIN_WINDOWS, _MIN_WINDOWS_PER_WORKER = 20, 4


@dataclass(frozen=True)
class Snapshot:
    """The heartbeats of a node's processes at one moment, of living and of dead ones."""

    now: float  # time.monotonic()
    living: list[Heartbeat]  # processes that exist and whose phase is not `ended`
    dead: list[Heartbeat]

    @property
    def ranks(self) -> list[Heartbeat]:
        return [each for each in self.living if each.role == "rank"]

    @property
    def launch(self) -> str:
        ranks = self.ranks
        return max(ranks, key=lambda each: each.started).launch if ranks else ""


class HeartbeatScanner:
    """Reads the heartbeats of a node's processes, cheaply enough for several times a second.

    /proc is read once for each process; afterwards one `poll` of all pidfds finds those that ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pidfds: dict[tuple[int, int], int] = {}

    def scan(self) -> Snapshot:
        found = read_heartbeats(self._folder)
        self._close(self._pidfds.keys() - set(map(_identity, found)))
        # One call for all processes; a pidfd is readable once its process has ended.
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        gone = {pidfd for pidfd, _ in poll.poll(0)}
        living: list[Heartbeat] = []
        dead: list[Heartbeat] = []
        for each in found:
            if each.phase == "ended":
                dead.append(each)
            elif self._is_alive(each, gone):
                living.append(each)
            else:
                dead.append(each.read_again())
        return Snapshot(time.monotonic(), living, dead)

    def _is_alive(self, heartbeat: Heartbeat, gone: set[int]) -> bool:
        who = _identity(heartbeat)
        if (pidfd := self._pidfds.get(who)) is not None:
            return pidfd not in gone
        with suppress(OSError):
            self._pidfds[who] = os.pidfd_open(heartbeat.pid)
        if heartbeat.is_alive:  # checked after opening, so the pidfd is not a later process's
            return True
        self._close({who} & self._pidfds.keys())
        return False

    def _close(self, processes: set[tuple[int, int]]) -> None:
        for each in processes:
            os.close(self._pidfds.pop(each))


def _identity(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.pid, heartbeat.started


class StaleHeartbeats:
    """Removes heartbeat files (pages) of dead processes that no diagnosis of a stall needs."""

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}

    def remove(self, snapshot: Snapshot) -> None:
        """Remove heartbeat files of former launches, and old ones except of ranks that died."""
        # Ranks of this launch that died stay, as dumps list them as missing.
        now, launch = snapshot.now, snapshot.launch
        self._since = {each.path: self._since.get(each.path, now) for each in snapshot.dead}
        for each in snapshot.dead:
            is_former = bool(launch) and each.launch not in ("", launch)
            is_old = now - self._since[each.path] > _STALE_SECONDS
            if is_former or (is_old and (each.role == "decode" or each.phase == "ended")):
                remove_heartbeats([each])


def remove_heartbeats(dead: Iterable[Heartbeat]) -> None:
    """Remove the heartbeat files of dead processes, unless a new process uses the same path."""
    for each in dead:
        # A new process may have got the pid, and thereby the path, since the scan.
        again = read_heartbeat(each.path)
        if again is not None and (again.phase == "ended" or not again.is_alive):
            folder = each.path.parent
            each.path.unlink(missing_ok=True)
            stack_file(folder, each.pid).unlink(missing_ok=True)
            if each.role == "rank" and not any(folder.glob(f"rank_{each.rank}_*")):
                flight_recorder.remove_files(folder, [each.rank])


@dataclass(frozen=True)
class DeadRank:
    """A rank whose process is gone, though it did not end normally."""

    heartbeat: Heartbeat
    is_first: bool  # first of its launch on this node; others may have been killed because of it

    def as_event(self, oom_kills: int) -> dict[str, Any]:
        """Return the fields of the event `rank_failed` for this rank.

        `oom_kills` is the number of the job's processes that the kernel has just killed for lack of
        memory.
        """
        found = self.heartbeat
        where = f"step {found.step}, {found.phase}" + (f" on {found.detail}" * bool(found.detail))
        reason = f"rank {found.rank} (process {found.pid}) "
        if found.error:
            failure = failure_of(found, "exception", found.error, log="", source="watcher")
            reason += f"failed: {where}: {found.error}"
        else:
            error = "its process is gone without having ended"
            failure = failure_of(found, "killed", error, log="", source="watcher")
            reason += f"is gone without having ended: {where}"
            if oom_kills:
                reason += "; the kernel killed it, or another process of the job: out of memory"
        return {
            **failure.as_event(),
            "detail": found.detail,
            "seconds": round(found.seconds, 3),
            "out_of_memory": oom_kills > 0 and not found.error,
            "reason": reason.removesuffix(".") + ".",
        }


def alert_of(found: Sequence[DeadRank], oom_kills: int) -> dict[str, Any]:
    """Return one alert about all ranks that were found dead at the same time; at least one."""
    first = next((each for each in found if each.is_first), found[0])
    event = first.as_event(oom_kills)
    if len(found) == 1:
        return event
    ranks = [each.heartbeat.rank for each in found]
    return {
        **event,
        "ranks": ranks,
        "reason": f"ranks {join_words(ranks)} are gone: {event['reason']}",
    }


class LivenessTracker:
    """Finds ranks of this node that died.

    A rank that was already dead when the watcher began counts only if another rank of its launch
    lives.
    """

    def __init__(self) -> None:
        self._alive: set[tuple[int, int]] = set()
        self._reported: set[tuple[int, int]] = set()
        self._launches: set[str] = set()
        self._counts: deque[tuple[float, int]] = deque(maxlen=_NUM_COUNTS)

    def count_oom_kills(self, count: Callable[[], int], now: float) -> None:
        """Note the kernel's count of processes killed for lack of memory, every few seconds.

        `count` returns it; the difference to a later count tells how many were killed recently.
        """
        if not self._counts or now - self._counts[-1][0] >= _SECONDS_BETWEEN_COUNTS:
            self._counts.append((now, count()))

    def recent_oom_kills(self, kills: int) -> int:
        # The kernel counts kills without their times: recent means since the oldest sample.
        return max(0, kills - self._counts[0][1]) if self._counts else 0

    def dead_ranks(self, living: Iterable[Heartbeat], dead: Iterable[Heartbeat]) -> list[DeadRank]:
        """Return the ranks of this node that died since the last call."""
        ranks = [each for each in living if each.role == "rank"]
        launches = {each.launch for each in ranks if each.launch}
        self._alive |= set(map(_identity, ranks))
        found = []
        for each in (each for each in dead if each.role == "rank" and each.phase != "ended"):
            who = _identity(each)
            # A watcher that starts late must not report the dead ranks of a former launch.
            is_ours = who in self._alive or each.launch in launches
            if is_ours and who not in self._reported:
                self._reported.add(who)
                found.append(DeadRank(each, is_first=each.launch not in self._launches))
                self._launches.add(each.launch)
        return found


@dataclass(frozen=True)
class Overdue:
    """A process that has been in its phase for longer than the phase's limit in seconds."""

    heartbeat: Heartbeat
    limit: float


class WatchSettings(WatchSection):
    """Settings of the watcher: the recipe's section `watch`, and constants that tests change."""

    factor: float = 5.0  # a phase may last this many times its longest duration so far
    max_seconds: float = 600.0  # upper limit of all phases except those before step 1
    checkpoint_seconds: float = 120.0  # `min_seconds` of saving, rolling back and sampling
    first_steps_seconds: float = 300.0  # `min_seconds` of the first steps of a launch or shape
    start_seconds: float = 1800.0  # limit of each phase before step 1
    rounds: int = 3  # rounds of dumps, from which is seen which processes move
    round_seconds: float = 1.5  # interval of two rounds
    health_seconds: float = 10.0  # interval of two samples of the node's health

    @classmethod
    def of(cls, section: WatchSection) -> Self:
        changed = json.loads(os.environ.get(SETTINGS_VARIABLE, "{}"))
        return cls(**{**section.model_dump(), **changed})


class PhaseTimeouts:
    """Time limits of the phases of processes on this node, learnt in the current launch."""

    def __init__(self, settings: WatchSettings) -> None:
        self.launch = ""  # empty: not known yet
        self.seconds_late = 0.0  # total delay of the watcher itself
        self._settings = settings
        self._longest: dict[tuple[Role, Phase], float] = {}
        # Durations of a stall are not learnt, or the next stall would be found later: `_stalled`
        # has processes still in the phase of a stall, `_unusual` the phases' longest durations
        # with one, and `_unusual_before` is what `_unusual` was before the open alarm.
        self._stalled: dict[tuple[int, int], Heartbeat] = {}
        self._unusual: dict[tuple[int, int, Phase], float] = {}
        self._unusual_before: dict[tuple[int, int, Phase], float] | None = None
        self._windows: dict[tuple[int, int], int] = {}
        self._num_workers = 0
        self._delays: list[tuple[float, float]] = []
        self._cleared_at: float | None = None

    def learn(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Learn the limits of phases from living processes; a new launch begins without any."""
        found = list(heartbeats)
        ranks = [each for each in found if each.role == "rank"]
        # Another launch may have other shapes, workers and devices: its durations are learnt again.
        if ranks and (launch := max(ranks, key=lambda each: each.started).launch) != self.launch:
            self.launch = launch
            for known in (self._longest, self._windows, self._stalled, self._unusual):
                known.clear()
            self._unusual_before = None
        workers = [each for each in found if each.role == "decode"]
        self._num_workers = len(workers)
        for each in workers:
            timing = each.timings.get("decode")
            self._windows[_identity(each)] = timing.count if timing else 0
        for each in found:
            if not self._is_of_another_launch(each):
                self._learn_longest(each)

    def extend(self, seconds: float, now: float) -> None:
        """Extend the limits of current phases by the watcher's own delay: all may have slept."""
        self.seconds_late += seconds
        recent = [each for each in self._delays if now - each[0] < self._settings.start_seconds]
        self._delays = [*recent, (now, seconds)]

    def alarm_is_open(self) -> None:
        """Stop learning limits from current durations until it is known that there was no stall.

        This begins with the alarm, as a process may move on between the report and the next scan.
        """
        if self._unusual_before is None:
            self._unusual_before = dict(self._unusual)

    def alarm_is_over(self, *, was_stall: bool) -> None:
        if not was_stall and self._unusual_before is not None:
            self._unusual = self._unusual_before
            self._stalled.clear()
        self._unusual_before = None

    def stall_cleared(self, now: float) -> None:
        self._cleared_at = now

    def limit_of(self, heartbeat: Heartbeat, now: float) -> float | None:
        """Return the seconds that a process's current phase may last; None: without a limit."""
        base = self._base_limit(heartbeat)
        if base is None or self._is_of_another_launch(heartbeat):
            return None
        # Phases that began before a stall was cleared include the wait for it.
        since = now - heartbeat.seconds
        limit = base + sum(seconds for at, seconds in self._delays if at >= since)
        if self._cleared_at is not None and since <= self._cleared_at:
            limit = max(limit, self._cleared_at - since + self._settings.min_seconds)
        return limit

    def overdue(
        self, heartbeats: Iterable[Heartbeat], now: float, within: float = 0.0
    ) -> list[Overdue]:
        """Return processes over their phase's limit now or in `within` seconds, longest first."""
        limits = ((each, self.limit_of(each, now)) for each in heartbeats)
        found = [Overdue(each, limit) for each, limit in limits if limit is not None]
        late = (each for each in found if each.heartbeat.seconds + within > each.limit)
        return sorted(late, key=lambda each: -each.heartbeat.seconds)

    def _learn_longest(self, heartbeat: Heartbeat) -> None:
        """Learn limits from a process's phases, except those that a stall has lengthened."""
        who = _identity(heartbeat)
        before = self._stalled.pop(who, None)
        for phase, timing in heartbeat.timings.items():
            key = (heartbeat.role, phase)
            # `longest` never falls: after a stall it says nothing until it is exceeded.
            if before is not None and phase == before.phase:
                self._unusual[*who, phase] = timing.longest
            elif timing.longest > self._unusual.get((*who, phase), -1.0):
                self._longest[key] = max(timing.longest, self._longest.get(key, 0.0))
        is_alarmed = self._unusual_before is not None
        if is_alarmed or (before is not None and not has_moved(before, heartbeat)):
            self._stalled[who] = heartbeat

    def _base_limit(self, heartbeat: Heartbeat) -> float | None:
        settings, phase = self._settings, heartbeat.phase
        if phase in _UNLIMITED:
            return None
        if phase in _BEFORE_STEPS:
            return settings.start_seconds
        if heartbeat.error:  # it failed, and still closes files and connections
            return settings.checkpoint_seconds
        longest = self._longest.get((heartbeat.role, phase))
        floor = settings.checkpoint_seconds if phase in _RARE else settings.min_seconds
        usual = max(floor, min(settings.factor * (longest or 0.0), settings.max_seconds))
        if longest is None and phase in _OF_STATE:
            # The save at the end or at a signal waits until everything is written.
            return max(settings.checkpoint_seconds, settings.start_seconds)
        # A page that is not settled is in the first steps of a launch, of a shape, or after a
        # rollback, which compile and allocate.
        is_known = longest is not None and heartbeat.is_settled
        if phase == "decode":
            enough = max(_MIN_WINDOWS, _MIN_WINDOWS_PER_WORKER * self._num_workers)
            is_known &= sum(self._windows.values()) >= enough
        return usual if is_known else max(usual, settings.first_steps_seconds)

    def _is_of_another_launch(self, heartbeat: Heartbeat) -> bool:
        return heartbeat.launch not in ("", self.launch)


def has_moved(before: Heartbeat, after: Heartbeat) -> bool:
    is_same = (before.phase, before.step, before.detail) == (after.phase, after.step, after.detail)
    return not is_same or after.seconds < before.seconds


# --- Where the time of a step goes.

_MEAN_SECONDS = 10.0  # shortest time over which a mean is taken


class PhaseMeans:
    """Mean seconds per step of each phase, by rank; an ended rank keeps its last means."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], tuple[float, Heartbeat]] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._launch = ""

    def update(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Return each rank's mean durations: JSON values with `rank`, `local_rank` and `step`.

        The means over the last `steps` steps are `work_seconds` (own work per step) and `phases`.
        """
        launch = snapshot.launch or self._launch
        if launch != self._launch:
            self._known, self._since, self._launch = {}, {}, launch
        for each in (*snapshot.dead, *snapshot.living):
            if each.role == "rank" and each.launch in ("", launch):
                self._add(each, snapshot.now)
        # Copies, as a thread writes them to disk while the next update changes the originals.
        return [dict(self._known[rank]) for rank in sorted(self._known)]

    def _add(self, heartbeat: Heartbeat, now: float) -> None:
        # Pages have totals since the start of a process: a mean is the difference of two readings.
        at, before = self._since.get(_identity(heartbeat), (-math.inf, None))
        steps = heartbeat.work_count - (before.work_count if before else 0)
        names = ("rank", "local_rank", "step")
        known = self._known.setdefault(heartbeat.rank, {})
        known |= {name: getattr(heartbeat, name) for name in names}
        if steps <= 0 or now - at < _MEAN_SECONDS:
            return
        self._since[_identity(heartbeat)] = now, heartbeat
        work = heartbeat.work_seconds - (before.work_seconds if before else 0.0)
        earlier = before.timings if before else {}
        taken = {
            phase: timing.total - (earlier[phase].total if phase in earlier else 0.0)
            for phase, timing in heartbeat.timings.items()
        }
        known["steps"], known["work_seconds"] = steps, round(work / steps, 6)
        known["phases"] = {
            phase: round(seconds / steps, 6) for phase, seconds in taken.items() if seconds > 0
        }
