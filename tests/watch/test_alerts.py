"""Alerts: a real command and a real server, and what becomes of those that fail."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from longtake.config import WatchSection
from longtake.node_dir import NodeDirectory
from longtake.records import read_json_lines
from longtake.run_dir import RunDirectory
from longtake.watch.alerts import Alerts, post, run_hook
from longtake.watch.disk import Disk


class _Server(HTTPServer):
    """Takes down what is posted, and answers with a status, after a while."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.posted: list[Any] = []
        self.status, self.seconds = 200, 0.0
        self.address = f"http://127.0.0.1:{self.server_port}/alert"


class _Answer(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
        time.sleep(self.server.seconds)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[_Server]:
    """A server that takes down what is posted."""
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Where alerts that failed are said."""
    disk = Disk(NodeDirectory(RunDirectory(tmp_path), "node"))
    yield disk
    disk.close(1.0)


def test_both_get_all_events_in_order(tmp_path: Path, server: _Server, disk: Disk) -> None:
    """The hook one line of JSON each on stdin, the address the same as a body."""
    section = WatchSection(hook=f"cat >> {tmp_path}/got", webhook=server.address)
    alerts = Alerts(section, disk)
    events = [{"event": "stalled", "step": 7}, {"event": "went_on", "step": 7}]
    for event in events:
        alerts.send(event)
    alerts.close(10.0)
    assert list(read_json_lines(tmp_path / "got")) == events
    assert server.posted == [("/alert", "application/json", event) for event in events]


def test_what_fails_is_said_and_does_not_stop_the_next(
    tmp_path: Path, server: _Server, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook that ends with an error, a server that answers with one."""
    server.status = 500
    hook = f'cat >> {tmp_path}/got; echo "no such pager" >&2; exit 3'
    alerts = Alerts(WatchSection(hook=hook, webhook=server.address), disk)
    alerts.send({"event": "stalled"})
    alerts.send({"event": "went_on"})
    alerts.close(10.0)
    disk.close(2.0)
    said = capsys.readouterr().out
    assert "ended with status 3: no such pager" in said
    assert f"webhook: {server.address}: HTTP Error 500" in said
    assert len((tmp_path / "got").read_text().splitlines()) == 2
    assert len(server.posted) == 2


def test_a_hook_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """After its time, also where it has started something that would hang on."""
    begun = time.monotonic()
    command = f"(sleep 1; touch {tmp_path}/late) & sleep 60"
    assert "took longer than 0.5 s" in run_hook(command, "{}", "stalled", 0.5)
    assert time.monotonic() - begun < 2.0
    time.sleep(max(0.0, begun + 1.4 - time.monotonic()))
    assert not (tmp_path / "late").exists()


def test_a_hook_knows_the_event_and_need_not_read_it(tmp_path: Path) -> None:
    """It may end before it has read what it was given, and still be content."""
    assert run_hook(f"printf $LONGTAKE_EVENT > {tmp_path}/kind", "x" * 300_000, "stalled") == ""
    assert (tmp_path / "kind").read_text() == "stalled"


def test_a_server_that_hangs_is_left(server: _Server) -> None:
    """After its time, with the reason."""
    server.seconds = 1.0
    assert "timed out" in post(server.address, "{}", 0.2)
    assert "refused" in post("http://127.0.0.1:1/", "{}", 1.0)


def test_alerts_never_wait(tmp_path: Path, disk: Disk) -> None:
    """Sending is instant while a hook hangs; what is too much is dropped."""
    alerts = Alerts(WatchSection(hook=f"touch {tmp_path}/begun; sleep 20"), disk)
    begun = time.monotonic()
    for number in range(150):
        alerts.send({"event": "stalled", "number": number})
    alerts.close(0.2)
    assert time.monotonic() - begun < 1.5
