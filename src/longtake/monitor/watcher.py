"""The watcher of a node: reads heartbeats of its processes several times a second; torch-free.

The loop itself accesses only memory. Everything that may block has a thread of its own: the run
directory, the node's health, dumps of processes, alerts.
"""

import argparse
import fcntl
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGPIPE, SIGTERM, SIGUSR1
from typing import IO, Any

from longtake import fsio, process
from longtake.config import WatchSection
from longtake.formatting import printable_lines
from longtake.health.system import oom_kills
from longtake.heartbeat import Heartbeat, make_private_dir, read_heartbeats
from longtake.monitor import coordinator, flight_recorder, observe, reporting
from longtake.monitor.node_health import NodeHealth

_SCAN_SECONDS, _MAX_SCAN_SECONDS = 0.25, 1.0
_CPU_SHARE = 0.002  # fraction of a core for scans: with many processes they are less frequent
_HEARTBEAT_SECONDS = 0.9
_LATE_SECONDS = 1.0
_SECONDS_WITHOUT_RANK = 60.0
_BEGIN_SECONDS = 2.0
_END_SECONDS = 10.0
_SIGTERM_SECONDS = 600.0
_SECONDS_BETWEEN_LATE_LINES = 60.0


def watch(target: reporting.WatchTarget) -> None:
    """Watch the processes of a run on one node until they end.

    If another watcher runs, one started by a user returns at once, and one started by the training
    waits to take over. A SIGTERM, which a scheduler sends to all processes of a job, does not end
    the watcher while ranks still save.
    """
    stop = process.StopSignal(
        (SIGTERM, SIGINT),
        # A closed terminal, and a scheduler's warning to all processes of a job.
        ignored=(SIGHUP, SIGUSR1, SIGPIPE),
        patience_seconds={SIGTERM: 0.0 if target.by_hand else _SIGTERM_SECONDS},
        keeps_ignored=False,
    )
    beat = process.Beat()
    with stop:
        lock = WatcherLock(target.folder)
        try:
            if _takes_over(target, lock, stop, beat):
                _Watcher(target, beat).watch(stop)
        finally:
            lock.release()


def _takes_over(
    target: reporting.WatchTarget,
    lock: "WatcherLock",
    stop: process.StopSignal,
    beat: process.Beat,
) -> bool:
    seen, has_seen_ranks = time.monotonic(), False
    while not lock.acquire():
        beat()
        if target.by_hand:
            text = f"{target.run.path} is watched already, by process {lock.holder()}."
            print(printable_lines(text), flush=True)  # noqa: T201 - to a person
            return False
        ranks = [each for each in read_heartbeats(target.folder) if each.role == "rank"]
        has_seen_ranks |= bool(ranks)
        if any(each.phase != "ended" and each.is_alive for each in ranks):
            seen = time.monotonic()
        elif has_seen_ranks:  # also if all were dead at the first scan: the run was short
            return False
        if time.monotonic() - seen > _SECONDS_WITHOUT_RANK or stop.wait(_SCAN_SECONDS):
            return False
    return True


class WatcherLock:
    """File lock in a node's heartbeat folder: only one watcher of a run can hold it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "watcher.lock"
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Take the lock of the node's watcher if it is free; return True if this process has it."""
        make_private_dir(self._path.parent)
        file = open(self._path, "a+", opener=fsio.no_follow)  # noqa: SIM115 - kept open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between open and flock. A lock on a removed
            # file excludes nobody.
            is_there = os.fstat(file.fileno()).st_ino == self._path.stat().st_ino
        except OSError:
            is_there = False
        if not is_there:
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def holder(self) -> str:
        with suppress(OSError):
            return self._path.read_text()
        return ""

    def release(self) -> None:
        """Release the lock of the node's watcher; remove its file, and the folder if empty."""
        if self._file is not None:
            if not any(self._path.parent.glob("rank_*")):
                flight_recorder.remove_all_files(self._path.parent)
            # Removed while it is locked, so that a watcher that has just opened it notices.
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._path.parent.rmdir()


class _Watcher:
    def __init__(self, target: reporting.WatchTarget, beat: process.Beat) -> None:
        self._target, self._beat = target, beat
        self._disk = reporting.RunDirThread(target.node)
        self._reporter = reporting.EventReporter(target, self._disk)
        self._timeouts = observe.PhaseTimeouts(target.settings)
        self._service = coordinator.DumpService(target, self._disk, self._reporter, self._timeouts)
        self._health = NodeHealth(target.run, target.node, target.settings, target.data)
        self._exporter = self._open_exporter()
        self._scanner = observe.HeartbeatScanner(target.folder)
        self._liveness, self._stale = observe.LivenessTracker(), observe.StaleHeartbeats()
        self._phase_means = observe.PhaseMeans()
        self._stalls = StallDetector(target, self._reporter, self._timeouts, self._service)
        self._num_heartbeats = 0
        self._written_at = self._ranks_at = time.monotonic()
        self._has_seen_ranks = self._has_logged_signal = False
        self._late_logged_at = -math.inf

    def watch(self, stop: process.StopSignal) -> None:
        """Read heartbeats until the last rank of the node is gone or a signal requests the end."""
        settings, by_hand = self._target.settings, self._target.by_hand
        limits = settings.model_dump(include={"action", "factor", "min_seconds", "max_seconds"})
        self._reporter.emit("watcher_started", pid=os.getpid(), by_hand=by_hand, **limits)
        # Wait until the event is written, which creates the folder.
        self._disk.try_ask(lambda: None, _BEGIN_SECONDS)
        self._service.start()
        self._health.start()
        interval, planned = _SCAN_SECONDS, time.monotonic()
        while True:
            started = time.thread_time()
            snapshot = self._scanner.scan()
            self._check_own_lateness(snapshot.now, planned)
            self._timeouts.learn(snapshot.living)
            self._report_dead_ranks(snapshot)
            self._stalls.check(snapshot)
            self._report_health()
            if snapshot.now - self._written_at >= max(_HEARTBEAT_SECONDS, 2 * interval):
                self._write_heartbeat(snapshot)
            if self._is_over(snapshot):
                break
            # Scan less often when a scan is expensive, to stay below the share of a core.
            cost = time.thread_time() - started
            interval = min(max(cost / _CPU_SHARE, _SCAN_SECONDS), _MAX_SCAN_SECONDS)
            planned = time.monotonic() + interval
            if stop.wait(interval):
                self._reporter.log(f"ended by {stop.reason}")
                break
            if stop.is_requested and not self._has_logged_signal:
                self._has_logged_signal = True
                minutes = _SIGTERM_SECONDS / 60
                self._reporter.log(
                    f"{stop.reason}: this ends with the last rank, in {minutes:.0f} minutes at most"
                )
        self._end()

    def _end(self) -> None:
        """End the watcher: finish diagnoses and alerts, remove heartbeats of dead processes."""
        # In the order in which they pass on events: the disk's thread, which writes all, is last.
        self._service.close(_END_SECONDS)
        self._health.close()
        self._report_health()
        snapshot = self._scanner.scan()
        self._write_heartbeat(snapshot)
        self._reporter.close(_END_SECONDS)
        self._beat()
        self._disk.close(_END_SECONDS)
        if self._exporter is not None:
            self._exporter.close()
        if not snapshot.living:
            observe.remove_heartbeats(snapshot.dead)

    def _check_own_lateness(self, now: float, planned: float) -> None:
        # If the watcher was suspended, so were probably the processes: extend their limits.
        late = now - planned
        if late > _LATE_SECONDS:
            self._timeouts.extend(late, now)
            if now - self._late_logged_at > _SECONDS_BETWEEN_LATE_LINES:
                self._late_logged_at = now
                self._reporter.log(
                    f"the watcher did not run for {late:.1f} s (in total for "
                    f"{self._timeouts.seconds_late:.1f} s): the machine was suspended or too busy"
                )

    def _report_dead_ranks(self, snapshot: observe.Snapshot) -> None:
        self._liveness.count_oom_kills(oom_kills, snapshot.now)
        if found := self._liveness.dead_ranks(snapshot.living, snapshot.dead):
            kills = self._liveness.recent_oom_kills(oom_kills())
            for each in found:
                self._reporter.emit("rank_failed", is_alert=False, **each.as_event(kills))
            if any(each.is_first for each in found):
                self._reporter.alert("rank_failed", **observe.alert_of(found, kills))
        self._stale.remove(snapshot)

    def _report_health(self) -> None:
        for kind, fields in self._health.take_events():
            self._reporter.emit(kind, **fields)
        if (error := self._disk.take_error()) is not None:
            path = self._target.node.path
            reason = f"{path} cannot be written: {error}"
            if reporting.is_disk_full(error):
                self._reporter.emit("disk_full", path=str(path), reason=reason)
            else:
                self._reporter.log(reason)

    def _write_heartbeat(self, snapshot: observe.Snapshot) -> None:
        self._beat()
        self._written_at = snapshot.now
        self._num_heartbeats += 1
        workers = [each for each in snapshot.living if each.role != "rank"]
        record = {
            "host": self._target.host,
            "pid": os.getpid(),
            "beat": self._num_heartbeats,
            "launch": self._timeouts.launch,
            "ranks": [self._entry(each, snapshot.now) for each in snapshot.ranks],
            "workers": [self._entry(each, snapshot.now) for each in workers],
            "phase_means": self._phase_means.update(snapshot),
            "health": self._health.latest(),
            "addresses": self._health.addresses(),
            "stalls": self._service.num_stalls,
            "stall": self._stalls.open_token,
            "watch_seconds_late": round(self._timeouts.seconds_late, 3),
            "by_hand": self._target.by_hand,
            "ended": self._have_all_ended(snapshot),
        }
        self._disk.write_heartbeat(record)
        if self._exporter is not None:
            times = {"monotonic": time.monotonic(), "wall": time.time()}
            self._exporter.update({**record, **times})

    def _entry(self, heartbeat: Heartbeat, now: float) -> dict[str, Any]:
        limit, count = self._timeouts.limit_of(heartbeat, now), heartbeat.work_count
        step_seconds = heartbeat.work_seconds / count if count else None
        return {**heartbeat.as_dict(), "limit": limit, "step_seconds": step_seconds, "alive": True}

    def _have_all_ended(self, snapshot: observe.Snapshot) -> bool:
        dead = [each for each in snapshot.dead if each.role == "rank"]
        return not snapshot.ranks and all(each.phase == "ended" for each in dead)

    def _is_over(self, snapshot: observe.Snapshot) -> bool:
        if snapshot.ranks:
            self._ranks_at, self._has_seen_ranks = snapshot.now, True
            return False
        # A rank has its page before it starts the watcher, so a dead page means a short run.
        self._has_seen_ranks |= any(each.role == "rank" for each in snapshot.dead)
        if self._has_seen_ranks and (not self._target.by_hand or self._have_all_ended(snapshot)):
            return True
        return snapshot.now - self._ranks_at > _SECONDS_WITHOUT_RANK

    def _open_exporter(self) -> Any:
        settings = self._target.settings
        if settings.exporter_port is None:
            return None
        from longtake.monitor.exporter import Exporter  # 2 MiB that most watchers do not need

        exporter = Exporter(settings.exporter_port, settings.exporter_host)
        if exporter.problem:
            self._reporter.log(exporter.problem)
        return exporter


# --- Stalls of this node.


@dataclass
class _Stall:
    """A stall that has not ended, found by this node's alarm or another node's."""

    token: str
    at: float  # time at which it was noticed, by time.monotonic()
    seconds: float  # its duration at that time
    overdue: observe.Overdue | None = None  # process that raised the alarm; None: another node's
    is_asker: bool = False  # this node wrote the request

    @property
    def doubled_at(self) -> float:
        return self.at + self.seconds


class StallDetector:
    """Raises an alarm when a process is in a phase for too long; one stall at a time.

    Other processes come to wait for one that hangs, and then exceed their own limits. So while a
    stall is open, on this node or another, the next alarm is raised only when the stall has lasted
    twice as long.
    """

    def __init__(
        self,
        target: reporting.WatchTarget,
        reporter: reporting.EventReporter,
        timeouts: observe.PhaseTimeouts,
        service: coordinator.DumpService,
    ) -> None:
        self._target, self._reporter = target, reporter
        self._timeouts, self._service = timeouts, service
        self._stall: _Stall | None = None

    @property
    def open_token(self) -> str:
        return self._stall.token if self._stall else ""

    def check(self, snapshot: observe.Snapshot) -> None:
        """Note stalls that other nodes found, close one that is over, and raise the next alarm."""
        for request in self._service.take_begun():
            is_own = request["by"] == self._target.host
            if self._stall is not None and self._stall.token == request["token"]:
                self._stall.is_asker = is_own
            elif not is_own:
                # Another node's stall is open here too: processes that do not move wait for it.
                seconds = float(request.get("stall", {}).get("seconds", 0.0))
                self._stall = _Stall(request["token"], snapshot.now, seconds)
        if self._stall is not None:
            self._close_if_over(self._stall, snapshot)
        stall, lead = self._stall, self._service.lead_seconds
        is_pending = (
            stall is not None and stall.is_asker and self._service.outcome(stall.token) is None
        )
        wait = 0.0 if stall is None else stall.doubled_at - snapshot.now
        near = self._timeouts.overdue(snapshot.living, snapshot.now, lead) if wait < lead else []
        self._service.prepare(is_near=bool(near) or is_pending)
        overdue = [each for each in near if each.heartbeat.seconds > each.limit]
        if overdue and wait <= 0 and not is_pending:
            self._raise_alarm(overdue[0], snapshot)
        if self._stall is not None:
            self._timeouts.alarm_is_open()

    def _raise_alarm(self, overdue: observe.Overdue, snapshot: observe.Snapshot) -> None:
        found, launch = overdue.heartbeat, self._timeouts.launch
        step = coordinator.run_step(found, snapshot.living)
        if self._stall is not None:
            self._timeouts.alarm_is_over(was_stall=self._was_reported(self._stall))
        token = self._service.new_token(launch, step)
        self._stall = _Stall(token, snapshot.now, found.seconds, overdue, is_asker=True)
        self._reporter.log(
            f"{token}: {_who(found)} has been in {found.phase} for {found.seconds:.1f} s, "
            f"{overdue.limit:.1f} s is the limit"
        )
        self._service.raise_alarm(
            coordinator.stall_request(self._target, token, overdue, launch, step)
        )

    def _close_if_over(self, stall: _Stall, snapshot: observe.Snapshot) -> None:
        if stall.overdue is None:
            if snapshot.now >= stall.doubled_at:
                self._timeouts.alarm_is_over(was_stall=self._was_reported(stall))
                self._stall = None
            return
        before = stall.overdue.heartbeat
        # A page's path contains role, rank and pid.
        after = next((each for each in snapshot.living if each.path == before.path), None)
        if after is not None and not observe.has_moved(before, after):
            return
        if self._was_reported(stall) and stall.is_asker and after:
            seconds = round(stall.seconds + snapshot.now - stall.at, 1)
            self._reporter.emit(
                "stall_cleared",
                token=stall.token,
                **{name: getattr(before, name) for name in ("role", "rank", "pid", "phase")},
                step=coordinator.run_step(before, snapshot.living),
                seconds=seconds,
                reason=f"{_who(before)} continued after {seconds} s in {before.phase}.",
            )
        self._timeouts.alarm_is_over(was_stall=self._was_reported(stall))
        self._timeouts.stall_cleared(snapshot.now)
        self._stall = None

    def _was_reported(self, stall: _Stall) -> bool:
        return self._service.outcome(stall.token) == "stalled"


def _who(heartbeat: Heartbeat) -> str:
    name = "rank" if heartbeat.role == "rank" else "decode worker of rank"
    return f"{name} {heartbeat.rank} (process {heartbeat.pid})"


def main(arguments: Sequence[str]) -> int:
    """Run `python -P -m longtake.monitor.watcher RUN`, as `train` does; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m longtake.monitor.watcher", description="Watch this node's part of a run."
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--by-hand", action="store_true", help="a person has started it")
    parser.add_argument("--data", type=Path, action="append", help="a folder of data")
    parser.add_argument("--host", help="the name of this node, if it is simulated")
    parser.add_argument("--folder", type=Path, help="its heartbeat folder, if it is simulated")
    found = parser.parse_args(arguments)
    # The recipe's `watch` as JSON: a variable, as other users can read arguments.
    stated = os.environ.pop(process.SECTION_VARIABLE, None)
    try:
        section = None if stated is None else WatchSection.model_validate_json(stated)
        watch(
            reporting.watch_target(
                found.run,
                section,
                found.data or (),
                host=found.host,
                folder=found.folder,
                by_hand=found.by_hand,
            )
        )
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    # `sys.exit` would join the disk's thread, which may hang for ever.
    os._exit(main(sys.argv[1:]))
