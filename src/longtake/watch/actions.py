"""Does what the recipe says about a process that hangs, on the node on which it is.

Only processes of the run are touched, and only if they are still the ones that the verdict names,
still in the phase in which they hung. What a wrong guess would cost most, a save that is merely
slow or a clip that is merely long, has twice its limit.
"""

import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from longtake.heartbeat import Pulse, read_all
from longtake.node_dir import Request
from longtake.watch.post import Post
from longtake.watch.report import Reporter
from longtake.watch.stall import Expectations
from longtake.watch.verdict import Suspect, Verdict

_Action = Literal["report", "restart-worker", "kill"]
_COMPUTES = 0.9
"""Of a core: a decoding process that is at work, though it may be at the same line of Python."""
_NOBODY = (
    "all ranks wait at the same place, and none is to blame: any one that ends restarts the job"
)


class Actions:
    """Carries out `watch.action`.

    Args:
        post: the watcher's.
        reporter: is told what was done.
        expectations: what phases may take.
    """

    def __init__(self, post: Post, reporter: Reporter, expectations: Expectations) -> None:
        self._action: _Action = post.section.action
        self._host, self._folder = post.host, post.folder
        self._reporter, self._expectations = reporter, expectations
        self._clips: set[str] = set()

    def act_on(self, verdict: Verdict, request: Request) -> None:
        """End the suspects of this node that the recipe lets it end.

        Where no process can be named, it is the rank whose heart gave the alarm.

        Args:
            verdict: on the stall.
            request: that of the stall.
        """
        if self._action == "report":
            return
        if _names_nobody(verdict):
            self._act_for_nobody(verdict, request)
        elif verdict.kind == "stuck":
            for suspect in _targets(verdict):
                if suspect.host == self._host and suspect.pid > 0:
                    self._act_on(suspect, verdict)

    def _act_for_nobody(self, verdict: Verdict, request: Request) -> None:
        stall = request.get("stall", {})
        is_ours = stall.get("host") == self._host and stall.get("role") == "rank"
        if self._action == "kill" and is_ours and (pulse := self._end(_alarmed(stall))):
            reason = {"reason": _why_nobody(verdict)}
            self._reporter.tell("killed_rank", **{**_of_rank(pulse, verdict), **reason})

    def _act_on(self, suspect: Suspect, verdict: Verdict) -> None:
        if suspect.role == "decode":
            if suspect.clip in self._clips:
                self._reporter.say(
                    f"process {suspect.pid} is left alone: clip {suspect.clip} has cost a process "
                    "already; it is ended after data.sample_timeout_seconds"
                )
            elif pulse := self._end(suspect):
                self._clips.add(suspect.clip)
                self._reporter.tell("restarted_worker", **_of_worker(pulse, verdict))
        elif suspect.role == "rank" and self._action == "kill" and (pulse := self._end(suspect)):
            self._reporter.tell("killed_rank", **_of_rank(pulse, verdict))

    def _end(self, suspect: Suspect) -> Pulse | None:
        """End it, if it is still there as itself and has not gone on; returns what it said last."""
        pulse = _heart_of(suspect, self._folder)
        if pulse is None or not pulse.is_alive:
            self._reporter.say(f"process {suspect.pid} is gone already")
        elif _has_gone_on(pulse, suspect):
            self._reporter.say(f"process {suspect.pid} has gone on: it is left alone")
        elif wait := self._reason_to_wait(pulse, suspect):
            self._reporter.say(f"process {suspect.pid} is left alone for now: {wait}")
        elif trouble := kill(pulse):
            self._reporter.say(f"process {suspect.pid} cannot be ended: {trouble}")
        else:
            return pulse
        return None

    def _reason_to_wait(self, pulse: Pulse, suspect: Suspect) -> str:
        """Why it is not ended before twice its limit, at the next alarm; empty: it is."""
        limit = self._expectations.limit_of(pulse, time.monotonic())
        if limit is None or pulse.seconds >= 2 * limit:
            return ""
        until = f"until {2 * limit:.0f} s, twice the limit (it has been {pulse.seconds:.0f} s)"
        if pulse.phase in ("checkpoint", "save", "rollback"):
            return f"it may still be in its {pulse.phase} {until}"
        if pulse.role == "decode" and suspect.cpu_share >= _COMPUTES:
            return f"it computes ({suspect.cpu_share:.1f} cores), and may do so {until}"
        return ""


def kill(pulse: Pulse) -> str:
    """End a process that has a heart, and no other that has got its number since.

    The kernel's handle is taken first and the identity checked then, so that the number cannot
    change hands in between. A kernel (before 5.3) or a sandbox without such handles has to do
    without this.

    Returns:
        Why it was not ended; nothing if it was.
    """
    try:
        handle = os.pidfd_open(pulse.pid)
    except OSError as error:
        return _killed_by_number(pulse) if error.errno == errno.ENOSYS else _named(error)
    try:
        if not pulse.is_alive:
            return _named(ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)))
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError as error:
        return _named(error)
    finally:
        os.close(handle)
    return ""


def _killed_by_number(pulse: Pulse) -> str:
    try:
        if not pulse.is_alive:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        os.kill(pulse.pid, signal.SIGKILL)
    except OSError as error:
        return _named(error)
    return ""


def _named(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)}: {error.strerror}"


def _names_nobody(verdict: Verdict) -> bool:
    """Whether the trouble lies between the ranks, or on a node that does not answer."""
    is_silent = verdict.kind == "lost" and all(each.role == "node" for each in verdict.suspects)
    return is_silent or (verdict.kind == "link" and not verdict.suspects)


def _why_nobody(verdict: Verdict) -> str:
    if verdict.kind == "link":
        return _NOBODY
    silent = ", ".join(verdict.silent_nodes) or "a node"
    return f"{silent} gives no answer, and all wait: any rank that ends restarts the job"


def _alarmed(stall: Mapping[str, Any]) -> Suspect:
    """The rank whose heart gave the alarm, as it was then."""
    return Suspect(
        host=str(stall["host"]),
        pid=int(stall["pid"]),
        role="rank",
        rank=int(stall["rank"]),
        doing=str(stall["phase"]),
        seconds=float(stall["seconds"]),
    )


def _targets(verdict: Verdict) -> list[Suspect]:
    """The culprit, and other decoding processes that hang; one rank's end is all ranks' end."""
    others = verdict.suspects[1:]
    also = [each for each in others if each.role == "decode" and not each.moved]
    return [*verdict.suspects[:1], *also]


def _heart_of(suspect: Suspect, folder: Path) -> Pulse | None:
    hearts = (pulse for pulse in read_all(folder) if pulse.pid == suspect.pid)
    return next((pulse for pulse in hearts if pulse.role == suspect.role), None)


def _has_gone_on(pulse: Pulse, suspect: Suspect) -> bool:
    is_elsewhere = pulse.phase != suspect.doing
    is_at_another = suspect.role == "decode" and pulse.detail != suspect.clip
    return is_elsewhere or is_at_another or pulse.seconds < suspect.seconds


def _of_worker(pulse: Pulse, verdict: Verdict) -> dict[str, Any]:
    where = {"clip": pulse.detail, "clip_path": pulse.path_of_clip}
    facts = {"token": verdict.token, "pid": pulse.pid, "rank": pulse.rank, **where}
    text = f"process {pulse.pid} of rank {pulse.rank} was ended; clip {pulse.detail} is read again."
    return {**facts, "seconds": round(pulse.seconds, 3), "reason": text}


def _of_rank(pulse: Pulse, verdict: Verdict) -> dict[str, Any]:
    names = ("pid", "rank", "launch", "step", "phase")
    facts = {name: getattr(pulse, name) for name in names}
    text = f"rank {pulse.rank} (process {pulse.pid}) was ended at step {pulse.step}, {pulse.phase}."
    return {"token": verdict.token, **facts, "seconds": round(pulse.seconds, 3), "reason": text}
