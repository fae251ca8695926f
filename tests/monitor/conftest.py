"""Processes of a run that beat and hang, and watchers of them: real ones, with short limits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until, wait_until_still

from longtake.config import WatchSection
from longtake.fsio import read_json_lines
from longtake.monitor.observe import WatchSettings
from longtake.node_dir import NodeDirectory
from longtake.process import SECTION_VARIABLE, SETTINGS_VARIABLE
from longtake.run_dir import RunDirectory

_BEATING = Path(__file__).with_name("beating.py")


class Stage:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = RunDirectory(path / "run")
        self.run.path.mkdir()
        self.started: list[subprocess.Popen[str]] = []
        self.settings = WatchSettings(min_seconds=1.0, round_seconds=0.3, rounds=2)

    def folder(self, host: str = "node") -> Path:
        return self.path / f"hearts_{host}"

    def node(self, host: str = "node") -> NodeDirectory:
        return NodeDirectory(self.run, host)

    def events(self, kind: str, host: str = "node") -> list[dict[str, Any]]:
        found = read_json_lines(self.node(host).events_path)
        return [event for event in found if event["event"] == kind]

    def alerts(self, kind: str) -> list[dict[str, Any]]:
        found = read_json_lines(self.path / "alerts")
        return [event for event in found if event["event"] == kind]

    def rank(
        self, then: str, rank: int = 0, host: str = "node", launch: str = "abcd1234", **more: Any
    ) -> int:
        """Start a rank; returns its process id when it is at what it is to do."""
        return self._beat(host, "rank", rank, launch, then, **more)

    def worker(self, then: str, rank: int = 0, host: str = "node") -> int:
        return self._beat(host, "decode", rank, "", then)

    def watcher(
        self, *options: str, host: str = "node", wait: bool = True, **changes: Any
    ) -> "subprocess.Popen[str]":
        settings = WatchSettings(**{**self.settings.model_dump(), **changes}).model_dump()
        users = {name: settings.pop(name) for name in WatchSection.model_fields}
        section = WatchSection(**users).model_dump_json()
        where = ["--host", host, "--folder", str(self.folder(host))]
        program = ["-m", "longtake.monitor.watcher", str(self.run.path), *where, *options]
        before = len(self.events("watcher_started", host)) if wait else 0
        process = self.start(
            [sys.executable, "-P", *program],
            **{SETTINGS_VARIABLE: json.dumps(settings), SECTION_VARIABLE: section},
        )
        if wait:
            wait_until(lambda: len(self.events("watcher_started", host)) > before)
        return process

    def start(self, command: list[str], **changes: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **changes},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def is_gone(self, pid: int) -> bool:
        process = next(each for each in self.started if each.pid == pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        return process.returncode is not None

    def end(self, pid: int) -> None:
        process = next(each for each in self.started if each.pid == pid)
        process.kill()
        process.wait(120)

    def close(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.wait(120)
            if process.stdout is not None and not process.stdout.closed:
                print(process.stdout.read())  # noqa: T201 - shown where a test fails
                process.stdout.close()

    def _beat(
        self, host: str, *what: object, child: Sequence[str] = (), by: Sequence[str] = ()
    ) -> int:
        """Start a process, which starts `child`; `by`: the command that starts it."""
        arguments = [str(self.folder(host)), *map(str, what), *child]
        process = self.start([*by, sys.executable, "-P", str(_BEATING), *arguments])
        assert process.stdout is not None
        assert process.stdout.readline() == "beating\n"
        wait_until_still(process.pid)
        return process.pid


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()
