"""Does what the recipe says about a process that hangs, on the node on which it is.

Only processes of the run are touched, and only if they are still the ones that the verdict names,
still in the phase in which they hung.
"""

import os
import signal
from pathlib import Path
from typing import Any, Literal

from longtake.heartbeat import Pulse, read_all
from longtake.watch.post import Post
from longtake.watch.report import Reporter
from longtake.watch.verdict import Suspect, Verdict

_Action = Literal["report", "restart-worker", "kill"]


class Actions:
    """Carries out `watch.action`.

    Args:
        post: the watcher's.
        reporter: is told what was done.
    """

    def __init__(self, post: Post, reporter: Reporter) -> None:
        self._action: _Action = post.section.action
        self._host, self._folder = post.host, post.folder
        self._reporter = reporter
        self._clips: set[str] = set()

    def act_on(self, verdict: Verdict) -> None:
        """End the suspects of this node that the recipe lets it end."""
        if self._action == "report" or verdict.kind not in ("stuck", "link"):
            return
        for suspect in _targets(verdict):
            if suspect.host == self._host and suspect.pid > 0:
                self._act_on(suspect, verdict)

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
        elif kill(pulse):
            return pulse
        else:
            self._reporter.say(f"process {suspect.pid} cannot be ended by this user")
        return None


def kill(pulse: Pulse) -> bool:
    """End a process that has a heart, and no other that has got its number since; whether it was.

    The kernel's handle is taken first and the identity checked then, so that the number cannot
    change hands in between.
    """
    try:
        handle = os.pidfd_open(pulse.pid)
    except OSError:
        return False
    try:
        if not pulse.is_alive:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


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
