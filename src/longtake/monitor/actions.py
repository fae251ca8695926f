"""`watch.action`: ends a process that hangs, on its own node.

Only processes of the run are signalled, if they are still the ones of the diagnosis and in the same
phase. Where a wrong guess costs most, a save that is only slow or a clip that is only long, the
process has twice its limit.
"""

import errno
import os
import signal
import time
from typing import Any

from longtake.heartbeat import Heartbeat, read_heartbeats
from longtake.monitor.diagnosis import StallDiagnosis, Suspect
from longtake.monitor.observe import PhaseTimeouts
from longtake.monitor.reporting import EventReporter, WatchTarget
from longtake.node_dir import DumpRequest

_COMPUTING_SHARE = 0.9  # of a core: a decode worker works, though perhaps at one line of Python
_ROUNDING_SECONDS = 0.001  # of the seconds that a dump holds


class StallActions:
    """Carries out `watch.action`."""

    def __init__(
        self, target: WatchTarget, reporter: EventReporter, timeouts: PhaseTimeouts
    ) -> None:
        self._action = target.settings.action
        self._host, self._folder = target.host, target.folder
        self._reporter, self._timeouts = reporter, timeouts
        self._clips: set[str] = set()

    def act_on(self, diagnosis: StallDiagnosis, request: DumpRequest) -> None:
        """End the suspects of this node that the recipe allows to end.

        If no process is the cause, it is the rank that raised the alarm.
        """
        if self._action == "report":
            return
        if reason := _blames_no_process(diagnosis):
            if self._action == "kill":
                self._end_alarmed_rank(diagnosis, request, reason)
        elif diagnosis.kind == "stuck":
            # The cause, and other decode workers that hang; one rank's end is all ranks' end.
            first, *others = diagnosis.suspects
            also = [each for each in others if each.role == "decode" and not each.moved]
            for suspect in (first, *also):
                if suspect.host == self._host and suspect.pid > 0:
                    self._end_suspect(suspect, diagnosis)

    def _end_alarmed_rank(
        self, diagnosis: StallDiagnosis, request: DumpRequest, reason: str
    ) -> None:
        alarm: dict[str, Any] = {**request.get("stall", {})}
        if alarm.get("host") != self._host or alarm.get("role") != "rank":
            return
        suspect = Suspect(
            host=self._host,
            pid=alarm["pid"],
            role="rank",
            rank=alarm["rank"],
            doing=alarm["phase"],
            seconds=alarm["seconds"],
        )
        if ended := self._end(suspect):
            event = {**_rank_event(ended, diagnosis), "reason": reason}
            self._reporter.emit("killed_rank", **event)

    def _end_suspect(self, suspect: Suspect, diagnosis: StallDiagnosis) -> None:
        if suspect.role == "decode":
            if suspect.clip in self._clips:
                self._reporter.log(
                    f"process {suspect.pid} is not ended: clip {suspect.clip} has cost a process "
                    "already; it is ended after data.sample_timeout_seconds"
                )
            elif ended := self._end(suspect):
                self._clips.add(suspect.clip)
                self._reporter.emit("restarted_worker", **_worker_event(ended, diagnosis))
        elif suspect.role == "rank" and self._action == "kill" and (ended := self._end(suspect)):
            self._reporter.emit("killed_rank", **_rank_event(ended, diagnosis))

    def _end(self, suspect: Suspect) -> Heartbeat | None:
        """Kill it, if it is still the same process and has not moved on; its last heartbeat."""
        pages = (each for each in read_heartbeats(self._folder) if each.pid == suspect.pid)
        found = next((each for each in pages if each.role == suspect.role), None)
        if found is None or not found.is_alive:
            self._reporter.log(f"process {suspect.pid} is gone already")
        elif _has_moved_on(found, suspect):
            self._reporter.log(f"process {suspect.pid} has moved on: it is not ended")
        elif wait := self._reason_to_wait(found, suspect):
            self._reporter.log(f"process {suspect.pid} is not ended yet: {wait}")
        elif problem := kill_process(found):
            self._reporter.log(f"process {suspect.pid} cannot be ended: {problem}")
        else:
            return found
        return None

    def _reason_to_wait(self, heartbeat: Heartbeat, suspect: Suspect) -> str:
        """Why it is not ended before twice its limit; empty: it is."""
        limit = self._timeouts.limit_of(heartbeat, time.monotonic())
        if limit is None or heartbeat.seconds >= 2 * limit:
            return ""
        until = f"until {2 * limit:.0f} s, twice the limit (it has been {heartbeat.seconds:.0f} s)"
        if heartbeat.phase in ("checkpoint", "save", "rollback"):
            return f"it may still be in its {heartbeat.phase} {until}"
        if heartbeat.role == "decode" and suspect.cpu_share >= _COMPUTING_SHARE:
            return f"it computes ({suspect.cpu_share:.1f} cores), and may do so {until}"
        return ""


def kill_process(heartbeat: Heartbeat) -> str:
    """Send SIGKILL to a process, and to no other that has got its pid since.

    The pidfd is opened before the identity is checked, so the pid cannot change hands in between.
    A kernel before 5.3 or a sandbox without pidfds has to do without.
    """
    pidfd = -1
    try:
        try:
            pidfd = os.pidfd_open(heartbeat.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
        if not heartbeat.is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            os.kill(heartbeat.pid, signal.SIGKILL)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return ""


def _blames_no_process(diagnosis: StallDiagnosis) -> str:
    """Why any rank may be ended: the network, or a silent node; empty: a process is the cause."""
    if diagnosis.kind == "link" and not diagnosis.suspects:
        return (
            "all ranks wait at the same place, and none is the cause: any one that ends restarts "
            "the job"
        )
    if diagnosis.kind == "lost" and all(each.role == "node" for each in diagnosis.suspects):
        silent = ", ".join(diagnosis.silent_nodes) or "a node"
        return f"{silent} gives no answer, and all wait: any rank that ends restarts the job"
    return ""


def _has_moved_on(heartbeat: Heartbeat, suspect: Suspect) -> bool:
    is_elsewhere = heartbeat.phase != suspect.doing
    is_at_another = suspect.role == "decode" and heartbeat.detail != suspect.clip
    has_entered_again = heartbeat.seconds + _ROUNDING_SECONDS < suspect.seconds
    return is_elsewhere or is_at_another or has_entered_again


def _worker_event(ended: Heartbeat, diagnosis: StallDiagnosis) -> dict[str, Any]:
    return {
        "token": diagnosis.token,
        "pid": ended.pid,
        "rank": ended.rank,
        "clip": ended.detail,
        "clip_path": ended.path_of_clip,
        "seconds": round(ended.seconds, 3),
        "reason": f"process {ended.pid} of rank {ended.rank} was ended; clip {ended.detail} is "
        "read again.",
    }


def _rank_event(ended: Heartbeat, diagnosis: StallDiagnosis) -> dict[str, Any]:
    names = ("pid", "rank", "launch", "step", "phase")
    return {
        "token": diagnosis.token,
        **{name: getattr(ended, name) for name in names},
        "seconds": round(ended.seconds, 3),
        "reason": f"rank {ended.rank} (process {ended.pid}) was ended at step {ended.step}, "
        f"{ended.phase}.",
    }
