"""What is done to processes that hang: real ones."""

import errno
import os
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
from tests.build import wait_until

from longtake.fsio import read_json_lines
from longtake.heartbeat import Heartbeat, read_heartbeats
from longtake.monitor.actions import StallActions, kill_process
from longtake.monitor.diagnosis import StallDiagnosis, Suspect
from longtake.monitor.observe import PhaseTimeouts
from longtake.monitor.reporting import EventReporter, RunDirThread, WatchTarget
from longtake.node_dir import DumpRequest


class _Scene:
    """A verdict that is acted on, and what was told of it."""

    def __init__(self, stage: Any, action: Literal["report", "restart-worker", "kill"]) -> None:
        self.stage = stage
        settings = stage.settings.model_copy(update={"action": action})
        post = WatchTarget(stage.run, settings, "node", stage.folder())
        self.request = cast("DumpRequest", {"reason": "stall"})
        self.disk = RunDirThread(post.node)
        self.expectations = PhaseTimeouts(settings)
        self.actions = StallActions(post, EventReporter(post, self.disk), self.expectations)

    def alarm(self, pid: int, **changes: Any) -> None:
        """Let a process be the one whose heart gave the alarm."""
        pulse = self.pulse(pid)
        then = {"host": "node", "limit": 1.0, "seconds": pulse.seconds - 0.001}
        stall = {**pulse.as_dict(), **then, **changes}
        self.request = cast("DumpRequest", {"reason": "stall", "stall": stall})

    def suspect(self, pid: int) -> Suspect:
        """A process that hangs, as a verdict names it."""
        pulse = self.pulse(pid)
        found = Suspect("node", pid, pulse.role, pulse.rank, doing=pulse.phase)
        found = replace(found, seconds=pulse.seconds, clip_path=pulse.path_of_clip)
        return replace(found, clip=pulse.detail) if pulse.role == "decode" else found

    def pulse(self, pid: int) -> Heartbeat:
        """What a process says."""
        return next(each for each in read_heartbeats(self.stage.folder()) if each.pid == pid)

    def act(
        self, *suspects: Suspect, kind: Any = "stuck", silent: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        """Act; gives the events."""
        self.expectations.learn(read_heartbeats(self.stage.folder()))
        verdict = StallDiagnosis(
            token="stall_x_1_0",
            time="",
            host="node",
            kind=kind,
            launch="x",
            step=1,
            phase="forward",
            seconds=7.0,
            limit=6.0,
            suspects=suspects,
            waiting=(),
            silent_nodes=silent,
            missing_in=(),
            sentence="",
        )
        self.actions.act_on(verdict, self.request)
        self.disk.ask(lambda: None, 5.0)  # all that was told before is written
        path = self.stage.node().events_path
        found = list(read_json_lines(path))
        path.unlink(missing_ok=True)
        return found


def test_a_frozen_decoding_process_is_ended_once_for_each_clip(stage: Any) -> None:
    """Its pool reads the clip again; a clip that freezes the next one too is left to it."""
    scene = _Scene(stage, "restart-worker")
    pid = stage.worker("freezes")
    suspect = scene.suspect(pid)
    (event,) = scene.act(suspect)
    assert (event["event"], event["pid"], event["clip"]) == ("restarted_worker", pid, "bad")
    assert event["clip_path"] == "/data/bad.mp4"
    assert stage.is_gone(pid)
    assert scene.act(suspect) == []  # gone already
    second = stage.worker("freezes")
    assert scene.act(scene.suspect(second)) == []
    assert scene.pulse(second).is_alive


def test_all_decoding_processes_that_hang_are_ended(stage: Any) -> None:
    scene = _Scene(stage, "restart-worker")
    one, two = stage.worker("freezes"), stage.worker("freezes", rank=1)
    suspects = [scene.suspect(pid) for pid in (one, two)]
    (event,) = scene.act(suspects[0], replace(suspects[1], clip="other", moved=True))
    assert event["pid"] == one
    assert scene.pulse(two).is_alive


def test_a_rank_is_ended_only_if_the_recipe_says_kill(stage: Any) -> None:
    """And then only the culprit: torchrun ends the others."""
    one, two = stage.rank("sleeps"), stage.rank("waits", rank=1)
    for action in ("report", "restart-worker"):
        scene = _Scene(stage, action)
        assert scene.act(scene.suspect(one), scene.suspect(two)) == []
    scene = _Scene(stage, "kill")
    (event,) = scene.act(scene.suspect(one), scene.suspect(two))
    assert (event["event"], event["pid"], event["phase"]) == ("killed_rank", one, "forward")
    assert stage.is_gone(one)
    assert scene.pulse(two).is_alive


@pytest.mark.parametrize("kind", ["slow", "lost", "unknown"])
def test_only_what_is_stuck_is_ended(stage: Any, kind: str) -> None:
    scene = _Scene(stage, "kill")
    pid = stage.rank("sleeps")
    assert scene.act(scene.suspect(pid), kind=kind) == []
    assert scene.pulse(pid).is_alive


def test_who_has_gone_on_or_is_elsewhere_is_left_alone(stage: Any) -> None:
    """Between the dumps and the verdict seconds pass; another node's process is not ours."""
    scene = _Scene(stage, "kill")
    pid = stage.rank("sleeps")
    suspect = scene.suspect(pid)
    assert scene.act(replace(suspect, seconds=suspect.seconds + 60.0)) == []
    assert scene.act(replace(suspect, doing="backward")) == []
    assert scene.act(replace(suspect, host="other")) == []
    assert scene.act(replace(suspect, pid=1)) == []  # no heart: no process of the run
    assert scene.pulse(pid).is_alive


def test_another_process_of_the_same_number_is_not_ended(stage: Any) -> None:
    """The number of a process that is gone may be given to anybody's."""
    pid = stage.rank("sleeps")
    pulse = read_heartbeats(stage.folder())[0]
    assert kill_process(replace(pulse, started=pulse.started - 1)).startswith("ESRCH")
    assert pulse.is_alive
    assert kill_process(pulse) == ""
    assert stage.is_gone(pid)
    assert kill_process(pulse).startswith("ESRCH")


@pytest.mark.parametrize(
    ("number", "name"), [(errno.ENOSYS, ""), (errno.EPERM, "EPERM: Operation not permitted")]
)
def test_a_kernel_without_handles_is_done_without(
    stage: Any, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    def _fails(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    pid = stage.rank("sleeps")
    pulse = read_heartbeats(stage.folder())[0]
    monkeypatch.setattr(os, "pidfd_open", _fails)
    if not name:
        assert kill_process(replace(pulse, started=pulse.started - 1)).startswith("ESRCH")
        assert pulse.is_alive
    assert kill_process(pulse) == name
    if name:
        assert pulse.is_alive
    else:
        assert stage.is_gone(pid)


@pytest.mark.parametrize("kind", ["link", "lost"])
def test_where_nobody_is_to_blame_the_rank_that_gave_the_alarm_is_ended(
    stage: Any, kind: str
) -> None:
    """All wait in one collective, or for a node that is silent: any one restarts the job."""
    pid = stage.rank("waits")
    node = [Suspect("gone", 0, "node", None)] if kind == "lost" else []
    for action in ("report", "restart-worker"):
        scene = _Scene(stage, action)
        scene.alarm(pid)
        assert scene.act(*node, kind=kind) == []
    scene = _Scene(stage, "kill")
    for elsewhere in ({"host": "other"}, {"seconds": 60.0}, {"phase": "backward"}):
        scene.alarm(pid, **elsewhere)
        assert scene.act(*node, kind=kind) == []
    scene.alarm(pid)
    (event,) = scene.act(*node, kind=kind, silent=("gone",) if node else ())
    assert (event["event"], event["pid"]) == ("killed_rank", pid)
    words = "none is the cause" if kind == "link" else "gone gives no answer"
    assert words in event["reason"]
    assert event["reason"].endswith("any one that ends restarts the job") or node
    assert stage.is_gone(pid)


def test_a_slow_save_has_twice_its_limit(stage: Any) -> None:
    """A rank that may still be saving is left alone until then, be it suspected or alarmed."""
    scene = _Scene(stage, "kill")
    scene.expectations = scene.actions._timeouts = PhaseTimeouts(
        stage.settings.model_copy(update={"checkpoint_seconds": 0.2, "start_seconds": 0.3})
    )
    pid = stage.rank("saves")
    scene.alarm(pid)
    assert scene.act(scene.suspect(pid)) == []
    assert scene.act(kind="link") == []
    assert scene.pulse(pid).is_alive
    wait_until(lambda: scene.pulse(pid).seconds > 0.6)
    (event,) = scene.act(scene.suspect(pid))
    assert (event["event"], event["phase"]) == ("killed_rank", "checkpoint")


def test_a_decoding_process_that_computes_has_twice_its_limit(stage: Any) -> None:
    """A long decode keeps the same line of Python; who uses no processor is ended at once."""
    scene = _Scene(stage, "restart-worker")
    scene.expectations = scene.actions._timeouts = PhaseTimeouts(
        stage.settings.model_copy(update={"first_steps_seconds": 1.2, "min_seconds": 0.2})
    )
    pid = stage.worker("freezes")
    assert scene.act(replace(scene.suspect(pid), cpu_share=0.95)) == []
    assert scene.pulse(pid).is_alive
    (event,) = scene.act(replace(scene.suspect(pid), cpu_share=0.85))
    assert event["pid"] == pid
    second = stage.worker("freezes", rank=1)
    suspect = replace(scene.suspect(second), cpu_share=0.95, clip="bad")
    scene.actions._clips.clear()
    wait_until(lambda: scene.pulse(second).seconds > 2.4)
    (event,) = scene.act(suspect)
    assert event["pid"] == second
