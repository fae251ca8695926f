"""Events, alerts and the hook."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from longtake.config import WatchSection
from longtake.fsio import read_json_lines
from longtake.monitor.reporting import (
    AlertQueue,
    EventReporter,
    RunDirThread,
    WatchTarget,
    run_hook,
)
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RunDirThread]:
    """Where alerts that failed are said."""
    disk = RunDirThread(NodeDirectory(RunDirectory(tmp_path), "node"))
    yield disk
    disk.close(1.0)


def test_a_hook_gets_all_events_in_order(tmp_path: Path, disk: RunDirThread) -> None:
    alerts = AlertQueue(WatchSection(hook=f"cat >> {tmp_path}/got"), disk)
    events = [{"event": "stalled", "step": 7}, {"event": "stall_cleared", "step": 7}]
    for event in events:
        alerts.put(event)
    alerts.close(10.0)
    assert list(read_json_lines(tmp_path / "got")) == events


def test_what_fails_is_said_and_does_not_stop_the_next(
    tmp_path: Path, disk: RunDirThread, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = f'cat >> {tmp_path}/got; echo "no such pager" >&2; exit 3'
    alerts = AlertQueue(WatchSection(hook=hook), disk)
    alerts.put({"event": "stalled"})
    alerts.put({"event": "stall_cleared"})
    alerts.close(10.0)
    disk.close(2.0)
    said = capsys.readouterr().out
    assert "ended with status 3: no such pager" in said
    assert len((tmp_path / "got").read_text().splitlines()) == 2


def test_a_hook_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"
    assert "took longer than 2 s" in run_hook(command, "{}", "stalled", 2.0)
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
    begun = time.monotonic()
    for number in range(150):
        alerts.put({"event": "stalled", "number": number})
    alerts.close(0.2)
    assert time.monotonic() - begun < 60


def test_a_hook_is_on_no_command_line(tmp_path: Path) -> None:
    """Other users of the node read command lines; and what fails is logged without the hook."""
    said = run_hook(
        f"tr '\\0' ' ' < /proc/$$/cmdline > {tmp_path}/line; : s3cret; exit 3", "{}", "x"
    )
    assert "s3cret" not in (tmp_path / "line").read_text()
    assert "s3cret" not in said
    assert "status 3" in said


def test_a_hook_that_no_shell_takes_is_said() -> None:
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
    reporter.close(10.0)
    disk.close(10.0)
    told = ["first", "elsewhere", "later"]
    assert [each["token"] for each in stage.alerts("stalled")] == [*told, "nobody", "nobody"]
    assert [each["token"] for each in stage.alerts("stall_cleared")] == told
    assert len(stage.events("stalled")) == 7
    assert len(stage.events("stall_cleared")) == 5
