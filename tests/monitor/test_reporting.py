"""Events, alerts and the hook; and what is done to processes that hang: real ones."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import psutil
import pytest
from tests.build import wait_until
from tests.monitor.build import make_diagnosis

from longtake.config import WatchSection
from longtake.fsio import read_json_lines
from longtake.heartbeat import Heartbeat, read_heartbeats
from longtake.monitor.observe import PhaseTimeouts
from longtake.monitor.reporting import (
    AlertQueue,
    EventReporter,
    QueueThread,
    RunDirThread,
    StallActions,
    Terminal,
    WatchTarget,
    kill_process,
    run_hook,
)
from longtake.monitor.stall_record import Suspect
from longtake.node_dir import DumpRequest, NodeDirectory
from longtake.process import TERMINAL_VARIABLE
from longtake.run_dir import RunDirectory


class _Scene:
    def __init__(self, stage: Any, action: Literal["report", "restart-worker", "kill"]) -> None:
        self.stage = stage
        settings = stage.settings.model_copy(update={"action": action})
        post = WatchTarget(stage.run, settings, "node", stage.folder())
        self.request = cast("DumpRequest", {"reason": "stall"})
        self.disk = RunDirThread(post.node)
        self.expectations = PhaseTimeouts(settings)
        self.actions = StallActions(post, EventReporter(post, self.disk), self.expectations)

    def limit(self, **seconds: float) -> None:
        settings = self.stage.settings.model_copy(update=seconds)
        self.expectations = self.actions._timeouts = PhaseTimeouts(settings)

    def alarm(self, pid: int, **changes: Any) -> None:
        pulse = self.pulse(pid)
        then = {"host": "node", "limit": 1.0, "seconds": pulse.seconds - 0.001}
        stall = {**pulse.as_dict(), **then, **changes}
        self.request = cast("DumpRequest", {"reason": "stall", "stall": stall})

    def suspect(self, pid: int) -> Suspect:
        pulse = self.pulse(pid)
        found = Suspect("node", pid, pulse.role, pulse.rank, doing=pulse.phase)
        found = replace(found, seconds=pulse.seconds, clip_path=pulse.path_of_clip)
        return replace(found, clip=pulse.detail) if pulse.role == "decode" else found

    def pulse(self, pid: int) -> Heartbeat:
        return next(each for each in read_heartbeats(self.stage.folder()) if each.pid == pid)

    def act(
        self, *suspects: Suspect, kind: Any = "stuck", silent: tuple[str, ...] = ()
    ) -> list[dict[str, Any]]:
        self.expectations.learn(read_heartbeats(self.stage.folder()))
        verdict = make_diagnosis(*suspects, kind=kind, silent_nodes=silent)
        self.actions.act_on(verdict, self.request)
        self.disk.ask(lambda: None, 120.0)  # all that was told before is written
        path = self.stage.node().events_path
        found = list(read_json_lines(path))
        path.unlink(missing_ok=True)
        return found


def test_a_frozen_decoding_process_is_ended_once_for_each_clip(stage: Any) -> None:
    """Its pool reads the clip again; a clip that freezes the next one too is left to it."""
    scene = _Scene(stage, "restart-worker")
    pid = stage.worker("sleeps")
    suspect = scene.suspect(pid)
    (event,) = scene.act(suspect)
    assert (event["event"], event["pid"], event["clip"]) == ("restarted_worker", pid, "bad")
    assert event["clip_path"] == "/data/bad.mp4"
    assert stage.is_gone(pid)
    assert scene.act(suspect) == []  # gone already
    second = stage.worker("sleeps")
    assert scene.act(scene.suspect(second)) == []
    assert scene.pulse(second).is_alive


def test_all_decoding_processes_that_hang_are_ended(stage: Any) -> None:
    scene = _Scene(stage, "restart-worker")
    one, two = stage.worker("sleeps"), stage.worker("sleeps", rank=1)
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


def test_who_is_not_stuck_has_gone_on_or_is_elsewhere_is_left_alone(stage: Any) -> None:
    """Between the dumps and the verdict seconds pass; another node's process is not ours."""
    scene = _Scene(stage, "kill")
    pid = stage.rank("sleeps")
    suspect = scene.suspect(pid)
    for kind in ("slow", "lost", "unknown"):
        assert scene.act(suspect, kind=kind) == []
    assert scene.act(replace(suspect, seconds=suspect.seconds + 6000.0)) == []
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
    for elsewhere in ({"host": "other"}, {"seconds": 6000.0}, {"phase": "backward"}):
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
    scene.limit(checkpoint_seconds=600.0, start_seconds=600.0)
    pid = stage.rank("saves")
    scene.alarm(pid)
    assert scene.act(scene.suspect(pid)) == []
    assert scene.act(kind="link") == []
    assert scene.pulse(pid).is_alive
    scene.limit(checkpoint_seconds=0.2, start_seconds=0.3)
    wait_until(lambda: scene.pulse(pid).seconds > 0.6)
    (event,) = scene.act(scene.suspect(pid))
    assert (event["event"], event["phase"]) == ("killed_rank", "checkpoint")


def test_a_decoding_process_that_computes_has_twice_its_limit(stage: Any) -> None:
    """A long decode keeps the same line of Python; who uses no processor is ended at once."""
    scene = _Scene(stage, "restart-worker")
    scene.limit(first_steps_seconds=600.0, min_seconds=600.0)
    pid = stage.worker("sleeps")
    assert scene.act(replace(scene.suspect(pid), cpu_share=0.95)) == []
    assert scene.pulse(pid).is_alive
    (event,) = scene.act(replace(scene.suspect(pid), cpu_share=0.85))
    assert event["pid"] == pid
    second = stage.worker("sleeps", rank=1)
    suspect = replace(scene.suspect(second), cpu_share=0.95, clip="bad")
    scene.actions._clips.clear()
    assert scene.act(suspect) == []
    scene.limit(first_steps_seconds=0.3, min_seconds=0.2)
    wait_until(lambda: scene.pulse(second).seconds > 0.6)
    (event,) = scene.act(suspect)
    assert event["pid"] == second


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RunDirThread]:
    disk = RunDirThread(NodeDirectory(RunDirectory(tmp_path), "node"))
    yield disk
    disk.close(1.0)


def test_a_hook_gets_all_events_in_order(tmp_path: Path, disk: RunDirThread) -> None:
    alerts = AlertQueue(WatchSection(hook=f"cat >> {tmp_path}/got"), disk)
    events = [{"event": "stalled", "step": 7}, {"event": "stall_cleared", "step": 7}]
    for event in events:
        alerts.put(event)
    alerts.close(120.0)
    assert list(read_json_lines(tmp_path / "got")) == events


def test_what_fails_is_said_and_does_not_stop_the_next(
    tmp_path: Path, disk: RunDirThread, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = f'cat >> {tmp_path}/got; echo "no such pager" >&2; exit 3'
    alerts = AlertQueue(WatchSection(hook=hook), disk)
    alerts.put({"event": "stalled"})
    alerts.put({"event": "stall_cleared"})
    alerts.close(120.0)
    disk.close(120.0)
    said = capsys.readouterr().out
    assert "ended with status 3: no such pager" in said
    assert len((tmp_path / "got").read_text().splitlines()) == 2


def test_a_hook_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"
    for seconds in (1.0, 10.0, 100.0):  # so long that it has begun
        said = run_hook(command, "{}", "stalled", seconds)
        assert f"took longer than {seconds:g} s" in said
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
            break
    child = int((tmp_path / "child").read_text())
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        while process.status() != psutil.STATUS_ZOMBIE:  # dead, if nobody has waited for it yet
            time.sleep(0.01)


def test_a_hook_knows_the_event_and_need_not_read_it(tmp_path: Path) -> None:
    """It may end before it has read what it was given, and still be content."""
    assert run_hook(f"printf $LONGTAKE_EVENT > {tmp_path}/kind", "x" * 300_000, "stalled") == ""
    assert (tmp_path / "kind").read_text() == "stalled"


def test_alerts_never_wait(tmp_path: Path, disk: RunDirThread) -> None:
    alerts = AlertQueue(WatchSection(hook=f"touch {tmp_path}/begun; sleep 600"), disk)
    for number in range(150):
        alerts.put({"event": "stalled", "number": number})
    alerts.close(0.2)  # the hook would take ten minutes


def test_a_hook_is_on_no_command_line(tmp_path: Path) -> None:
    """Other users of the node read command lines; and what fails is logged without the hook."""
    said = run_hook(
        f"tr '\\0' ' ' < /proc/$$/cmdline > {tmp_path}/line; : s3cret; exit 3", "{}", "x"
    )
    assert "s3cret" not in (tmp_path / "line").read_text()
    assert "s3cret" not in said
    assert "status 3" in said
    assert "cannot be run" in run_hook("true\0", "{}", "x")


def _stalled(token: str, **changes: Any) -> dict[str, Any]:
    suspect = {"host": "node", "pid": 7, "file": "decode.py", "line": 88, "seconds": 9.0}
    return {"token": token, "sentence": "", "suspects": [{**suspect, **changes}]}


def test_the_same_culprit_at_the_same_place_is_alerted_to_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ten minutes; so is that it went on. All of it is written down."""
    settings = stage.settings.model_copy(update={"hook": f"cat >> {stage.path}/alerts"})
    post = WatchTarget(stage.run, settings, "node", stage.folder())
    disk = RunDirThread(post.node)
    reporter, now = EventReporter(post, disk), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for at, token, changes in (
        (1000.0, "first", {}),
        (1300.0, "again", {"seconds": 12.0}),
        (1301.0, "elsewhere", {"line": 89}),
        (1599.0, "still", {}),
        (1601.0, "later", {}),
    ):
        now[0] = at
        reporter.emit("stalled", **_stalled(token, **changes))
        reporter.emit("stall_cleared", token=token)
    for _ in range(2):
        reporter.emit("stalled", **{**_stalled("nobody"), "suspects": []})
    monkeypatch.undo()
    reporter.close(120.0)
    disk.close(120.0)
    told = ["first", "elsewhere", "later"]
    assert [each["token"] for each in stage.alerts("stalled")] == [*told, "nobody", "nobody"]
    assert [each["token"] for each in stage.alerts("stall_cleared")] == told
    assert len(stage.events("stalled")) == 7
    assert len(stage.events("stall_cleared")) == 5


def test_a_full_queue_is_emptied_and_its_thread_ends() -> None:
    handled, may_go_on = list[str](), threading.Event()

    def handle(item: str) -> None:
        may_go_on.wait(120)
        handled.append(item)

    queue = QueueThread("full queue", handle, max_items=1)
    assert queue.put("first")
    wait_until(lambda: queue.put("second"), 120)  # once the thread has taken the first
    assert not queue.put("dropped")
    threading.Timer(0.1, may_go_on.set).start()
    queue.close(120)
    assert handled == ["first", "second"]
    assert "full queue" not in {each.name for each in threading.enumerate()}


def test_a_terminal_gets_a_line_of_its_own_beside_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bar's line is erased; it is drawn again in the next one."""
    ours, theirs = os.openpty()
    monkeypatch.setenv(TERMINAL_VARIABLE, str(theirs))
    terminal = Terminal()
    os.write(theirs, b"train ---- 26/200")
    terminal.put("rank 0 is\x1b[31m in forward")
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(ours, 4096)
    assert shown.decode() == (
        "train ---- 26/200\r\x1b[2Klongtake: rank 0 is\\x1b[31m in forward\r\n"
    )
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_takes_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(TERMINAL_VARIABLE, str(writer))
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    terminal = Terminal()
    for _ in range(3):
        terminal.put("rank 0 is in forward")
    terminal.close(0.01)
    os.close(reader)  # lets its thread go
    terminal.close(120)
    os.close(writer)
