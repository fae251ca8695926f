"""Watches over a node's health, in threads of their own, so that no disk or driver holds it up."""

import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longtake import heartbeat
from longtake.config import WatchSection
from longtake.fsio import now
from longtake.health import time_daemons
from longtake.health.apart import Apart
from longtake.health.cgroup import CgroupMemory
from longtake.health.check import Check, Numbers
from longtake.health.chrony import Chrony
from longtake.health.clock import STEP_SECONDS, Clock, Stepped
from longtake.health.degradation import Degradation
from longtake.health.disk import Disk
from longtake.health.gpu import Gpu
from longtake.health.infiniband import InfiniBand
from longtake.health.kernel_clock import KernelClock
from longtake.health.links import Ethernet
from longtake.health.load import Load
from longtake.health.reach import RATE, SLOW, Reach, SlowLinks
from longtake.health.signals import Finding
from longtake.health.steps import Steps
from longtake.health.time_daemons import TimeDaemons
from longtake.node_dir import NodeDirectory, NodeEventKind
from longtake.run_dir import RunDirectory
from longtake.watch.clock_words import event_of
from longtake.watch.conditions import Conditions, full_disks
from longtake.watch.journal import Journal
from longtake.watch.neighbours import Neighbours

Event = tuple[NodeEventKind, dict[str, Any]]
_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 0.5
_TINY_STEPS_SECONDS = 600.0
"""Clocks that are set by next to nothing, again and again, are told of once in this time."""


class HealthWatch:
    """Samples a node's health until it is closed.

    Args:
        run: the run.
        node: this node's folder in it.
        section: of the recipe.
        data_paths: folders of the data set, whose disks are measured.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: NodeDirectory,
        section: WatchSection,
        data_paths: Sequence[Path] = (),
    ) -> None:
        self._host = node.host
        self._seconds = section.health_seconds
        self._clock = Clock()
        self._neighbours = Neighbours(run, node.host)
        self._places = {"run": run.path, **{str(path): path for path in data_paths}}
        self._reach = Reach(heartbeat.folder_of(run.path))
        self._checks = _checks(run, node, self._places, [self._neighbours, self._reach])
        self._degradation, self._slow_links = Degradation(), SlowLinks()
        self._conditions = Conditions()
        self._journal = Journal(node.health_path)
        self._latest: Numbers = {}
        self._events: deque[Event] = deque()
        self._wrong: dict[str, str] = {}
        self._wrong_since = 0.0
        self._full: set[str] = set()
        self._tiny_step_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, in about a second even where a check hangs."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        else:
            self._clock.close()
        for check in self._checks:
            check.close()
        self._journal.close()

    def latest(self) -> Numbers:
        """The newest numbers; empty: there are none yet."""
        return dict(self._latest)

    def addresses(self) -> list[str]:
        """Those that this node's ranks use towards other nodes."""
        return self._reach.addresses

    def take_events(self) -> list[Event]:
        """What has happened since the last call: kinds, and what belongs to each."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def _watch(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self._look_at_clock()
                if time.monotonic() >= due:
                    due = max(due + self._seconds, time.monotonic())
                    self._sample()
            except Exception:  # a fault in one look must not end all others
                traceback.print_exc(file=sys.stderr)
            self._wait()
        self._clock.close()

    def _wait(self) -> None:
        if self._clock.fileno is None:
            self._stop.wait(_LOOK_SECONDS)
        else:
            select.select([self._clock.fileno], [], [], _LOOK_SECONDS)

    def _look_at_clock(self) -> None:
        self._clock.look()
        for change in self._clock.take_changes():
            self._neighbours.forget_offsets()
            if not self._is_old_news(change):
                self._events.append(event_of(self._host, change, time_daemons.running()))

    def _is_old_news(self, change: object) -> bool:
        if not isinstance(change, Stepped) or abs(change.seconds) >= STEP_SECONDS:
            return False
        last, at = self._tiny_step_at, time.monotonic()
        self._tiny_step_at = at if last is None or at - last >= _TINY_STEPS_SECONDS else last
        return last == self._tiny_step_at

    def _sample(self) -> None:
        found = self._clock.sample()
        self._reach.learn(self._neighbours.addresses)
        for check in self._checks:
            found |= check.sample()
        findings = self._degradation.judge(found, self._neighbours.health)
        found |= self._slow_links.judge(found, self._neighbours.health)
        self._tell_what_is_wrong(self._conditions.of(found, findings), findings, found)
        self._tell_what_is_full(found)
        self._latest = found
        self._journal.put({"time": now(), **{name: _short(each) for name, each in found.items()}})

    def _tell_what_is_wrong(
        self, wrong: dict[str, str], findings: Sequence[Finding], found: Numbers
    ) -> None:
        if wrong.keys() - self._wrong.keys():
            if not self._wrong:
                self._wrong_since = time.monotonic()
            reason = ", ".join(wrong.values())
            fields = {"reason": reason, **_slowest_rank(findings), **_slow_link(wrong, found)}
            self._events.append(("degraded", {**fields, "message": f"{self._host}: {reason}."}))
        elif self._wrong and not wrong:
            seconds = time.monotonic() - self._wrong_since
            reason = ", ".join(self._wrong.values())
            words = f"{self._host}: as usual again, after {seconds:.0f} s; it was: {reason}."
            self._events.append(("recovered", {"reason": reason, "message": words}))
        self._wrong = wrong

    def _tell_what_is_full(self, numbers: Numbers) -> None:
        full = full_disks(numbers)
        for name in full.keys() - self._full:
            gib, path = full[name] / 2**30, str(self._places.get(name, name))
            words = f"{self._host}: {gib:.2f} GiB are free on the disk of {path}; make room there."
            fields = {"path": path, "free_gib": round(gib, 3), "message": words}
            self._events.append(("disk_full", fields))
        self._full = set(full)


def _checks(
    run: RunDirectory, node: NodeDirectory, places: dict[str, Path], others: Sequence[Check]
) -> list[Check]:
    """All that a node is looked at for; what may hang, apart."""
    may_hang: list[Check] = [
        Disk(node.path, places),
        Chrony(),
        TimeDaemons(),
        Ethernet(),
        InfiniBand(),
        Gpu(),
        *others,
    ]
    steps = Steps(heartbeat.folder_of(run.path))
    apart = [Apart(check) for check in may_hang]
    return [steps, Load(), CgroupMemory(), KernelClock(), *apart]


def _slowest_rank(findings: Sequence[Finding]) -> dict[str, Any]:
    slow = [each for each in findings if each.signal.name == "step_work_seconds"]
    if not slow:
        return {}
    worst = max(slow, key=lambda each: each.percent)
    return {"rank": int(worst.device), "percent": round(worst.percent, 1)}


def _slow_link(wrong: Iterable[str], numbers: Numbers) -> dict[str, Any]:
    """That to one node, if it is what is wrong."""
    for key in wrong:
        name, _, peer = key.partition(":")
        if name == SLOW:
            return {"peer": peer, "send_bytes_per_second": numbers.get(f"{RATE}:{peer}")}
    return {}


def _short(number: float) -> float:
    return int(number) if float(number).is_integer() else round(number, 9)
