"""Programs to ask where they are."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longtake import stacks

_PROGRAM = """
import ctypes, sys, threading, time
from pathlib import Path
from longtake.stacks import allow_inspection
if len(sys.argv) > 2:
    allow_inspection(Path(sys.argv[2]))
def stand_still():
    print("here", flush=True)
    time.sleep(600)
def hold_the_lock():
    print("here", flush=True)
    while True: ctypes.PyDLL(None).sleep(600)
def run_fast():
    print("here", flush=True)
    while True:
        step(3)
def step(depth):
    return step(depth - 1) if depth else sum(range(20))
globals()[sys.argv[1]]()
"""
_PYTHON = sys.executable


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a Python program in one of its functions, and returns its process id."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    started: list[subprocess.Popen[bytes]] = []

    def start(function: str = "stand_still", *arguments: object) -> int:
        command = [_PYTHON, str(program), function, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"here\n"
        await_state(process.pid, "RS" if function == "run_fast" else "S")
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no py-spy to be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


@pytest.fixture
def await_state_of() -> Callable[[int, str], None]:
    """Waits until a process is in one of some states."""
    return await_state


def await_state(pid: int, states: str) -> None:
    """Wait until a process is in one of some states."""
    end = time.monotonic() + 10
    while stacks.state_of(pid) not in states:
        assert time.monotonic() < end, stacks.state_of(pid)
        time.sleep(0.01)
