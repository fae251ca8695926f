"""A process can be asked where it is, from outside, whatever state it is in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longtake import stacks

_PROGRAM = """
import faulthandler, signal, sys, time
if len(sys.argv) > 1:
    faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"))
def stand_still():
    print("here", flush=True)
    time.sleep(600)
stand_still()
"""

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program that stands still in a function, and returns its process id."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> int:
        command = [sys.executable, str(program), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"here\n"
        _await_state(process.pid, "S")
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _await_state(pid: int, states: str) -> None:
    end = time.monotonic() + 10
    while stacks.state_of(pid) not in states:
        assert time.monotonic() < end, stacks.state_of(pid)
        time.sleep(0.01)


def _without_py_spy(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def test_a_waiting_process_says_its_line(start: Start) -> None:
    """py-spy names function, file and line, and C below it where it can; the process lives on."""
    pid = start()
    found = stacks.dump(pid)
    assert found.method in ("py-spy --native", "py-spy")
    assert (found.pid, found.state) == (pid, "S")
    assert found.where == "program.py:7 in stand_still"
    assert found.threads[0].name == "MainThread"
    functions = [frame.function for frame in found.threads[0].frames]
    assert functions.index("stand_still") < functions.index("<module>")
    assert stacks.state_of(pid) == "S"


def test_a_stopped_process_is_read_and_stays_stopped(start: Start) -> None:
    """Within a second or two, where a plain py-spy would hang or fail."""
    pid = start()
    os.kill(pid, signal.SIGSTOP)
    _await_state(pid, "T")
    found = stacks.dump(pid)
    assert (found.method, found.state) == ("py-spy --nonblocking", "T")
    assert found.where == "program.py:7 in stand_still"
    assert stacks.state_of(pid) == "T"


def test_without_py_spy_the_process_writes_itself(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked by SIGUSR1; only what is new in the file is read."""
    file = tmp_path / "stacks.txt"
    pid = start(str(file))
    _without_py_spy(monkeypatch, tmp_path)
    for _ in range(2):
        found = stacks.dump(pid, file)
        assert found.method == "faulthandler"
        assert found.where == "program.py:7 in stand_still"
        assert found.raw.count("most recent call first") == 1
    assert stacks.state_of(pid) == "S"


def test_a_process_without_a_handler_is_not_signalled(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGUSR1 would end it; /proc is read instead."""
    pid = start()
    _without_py_spy(monkeypatch, tmp_path)
    found = stacks.dump(pid, tmp_path / "stacks.txt")
    assert (found.method, found.threads, found.where) == ("proc", (), "")
    assert f"Pid:\t{pid}\n" in found.raw
    assert stacks.state_of(pid) == "S"


def test_a_process_that_is_not_there(start: Start) -> None:
    """Nothing is raised: the dump says that there is none."""
    pid = start()
    os.kill(pid, signal.SIGKILL)
    _await_state(pid, "Z")
    assert stacks.dump(pid).state == "Z"
    os.waitpid(pid, 0)
    assert stacks.dump(pid) == stacks.StackDump(pid, "", "none")


def test_a_process_that_is_not_python() -> None:
    """/proc says something about any process."""
    with subprocess.Popen(["sleep", "60"]) as process:
        found = stacks.dump(process.pid)
        process.kill()
    assert found.method == "proc"
    assert "Name:\tsleep" in found.raw


def test_a_dump_is_json(start: Start) -> None:
    """Every field, and the frames with names."""
    found = stacks.dump(start())
    read = json.loads(json.dumps(found.as_dict()))
    assert read["threads"][0]["name"] == "MainThread"
    assert {"function", "file", "line"} == set(read["threads"][0]["frames"][0])


def test_the_last_words_of_a_crash_are_read() -> None:
    """The text gives threads, the main thread first; other lines are kept in `raw`."""
    program = (
        "import ctypes, faulthandler, threading, time\n"
        "faulthandler.enable()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "def crash():\n"
        "    ctypes.string_at(0)\n"
        "crash()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    found = stacks.from_faulthandler(7, "before\n" + ended.stderr)
    assert found.method == "faulthandler"
    assert len(found.threads) == 2
    assert [frame.function for frame in found.threads[0].frames][-2:] == ["crash", "<module>"]
    assert found.raw.startswith("before")
    assert stacks.from_faulthandler(7, "nothing of the kind").method == "none"


def test_it_needs_no_torch() -> None:
    """A watcher lives where torch does not."""
    program = "import sys, longtake.stacks; assert not {'torch', 'numpy', 'av'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
