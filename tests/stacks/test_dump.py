"""A process can be asked where it is, from outside, whatever state it is in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake import stacks

Start = Callable[..., int]
AwaitState = Callable[[int, str], None]


def test_a_waiting_process_says_its_line(start: Start) -> None:
    """py-spy names function, file and line, and C below it where it can; the process lives on."""
    pid = start()
    found = stacks.dump(pid)
    assert found.method == "py-spy --native"
    assert (found.pid, found.state) == (pid, "S")
    assert found.where == "program.py:9 in stand_still"
    assert found.threads[0].name == "MainThread"
    functions = [frame.function for frame in found.threads[0].frames]
    assert "clock_nanosleep" in functions
    assert functions.index("stand_still") < functions.index("<module>")
    assert stacks.state_of(pid) == "S"


def test_a_process_that_holds_the_lock_says_its_line(start: Start) -> None:
    """In a call of C that does not give Python's lock back; it is not paused for it."""
    found = stacks.dump(start("hold_the_lock"), native=False)
    assert (found.method, found.where) == (
        "py-spy --nonblocking",
        "program.py:12 in hold_the_lock",
    )
    assert found.threads[0].has_gil


def test_a_process_that_runs_fast_is_read(start: Start) -> None:
    """What is read of it while it runs may not fit together; then it is read again, or paused."""
    pid = start("run_fast")
    for _ in range(10):
        found = stacks.dump(pid, native=False)
        assert found.method in ("py-spy --nonblocking", "py-spy")
        assert found.threads[0].frames


def test_a_stopped_process_is_read_and_stays_stopped(
    start: Start, await_state_of: AwaitState
) -> None:
    """Within a second or two, where a plain py-spy would hang or fail."""
    pid = start()
    os.kill(pid, signal.SIGSTOP)
    await_state_of(pid, "T")
    for native in (True, False):
        found = stacks.dump(pid, native=native)
        assert (found.method, found.state) == ("py-spy --nonblocking", "T")
        assert found.where == "program.py:9 in stand_still"
    assert stacks.read_natively([pid], 2.0) == {}
    assert stacks.state_of(pid) == "T"


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize(("function", "line"), [("stand_still", 9), ("hold_the_lock", 12)])
def test_without_py_spy_the_process_writes_itself(
    start: Start, tmp_path: Path, function: str, line: int
) -> None:
    """Asked by SIGUSR2, even if it holds Python's lock; only what is new in the file is read."""
    file = tmp_path / "stacks.txt"
    pid = start(function, file)
    for _ in range(2):
        found = stacks.dump(pid, file)
        assert found.method == "faulthandler"
        assert found.where == f"program.py:{line} in {function}"
        assert found.raw.count("most recent call first") == 1
    assert stacks.state_of(pid) == "S"


@pytest.mark.usefixtures("no_py_spy")
def test_a_process_without_a_handler_is_not_signalled(start: Start, tmp_path: Path) -> None:
    """SIGUSR2 would end it; /proc is read instead."""
    pid = start()
    found = stacks.dump(pid, tmp_path / "stacks.txt")
    assert (found.method, found.threads, found.where) == ("proc", (), "")
    assert f"Pid:\t{pid}\n" in found.raw
    assert stacks.state_of(pid) == "S"


def test_a_process_that_is_not_there(start: Start, await_state_of: AwaitState) -> None:
    """Nothing is raised: the dump says that there is none."""
    pid = start()
    os.kill(pid, signal.SIGKILL)
    await_state_of(pid, "Z")
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


def test_several_are_dumped_at_once(start: Start) -> None:
    """Each by itself; one that is gone is in the answer, as gone."""
    first, second = start(), start("hold_the_lock")
    found = stacks.dump_all({first: None, second: None, 2**22 + 1: None})
    assert [each.where for each in found.values()] == [
        "program.py:9 in stand_still",
        "program.py:12 in hold_the_lock",
        "",
    ]
    assert found[2**22 + 1].method == "none"


def test_calls_of_c_are_read_as_long_as_there_is_time(start: Start) -> None:
    """Nobody waits longer: who could not be read in time is left out."""
    pids = [start(), start("hold_the_lock")]
    found = stacks.read_natively(pids, 10.0)
    assert [found[pid][0].frames[0].function for pid in pids] == ["clock_nanosleep"] * 2
    assert stacks.read_natively(pids, 0.0) == {}


def test_a_py_spy_that_hangs_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever it waits for: /proc is read instead, and it is not tried again."""
    pid = start()
    frozen = tmp_path / "py-spy"
    frozen.write_text("#!/bin/sh\nexec sleep 600\n")
    frozen.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    begun = time.monotonic()
    assert stacks.dump(pid, native=False).method == "proc"
    assert time.monotonic() - begun < 60


def test_a_dump_is_json(start: Start) -> None:
    """Every field, and the frames with names."""
    found = stacks.dump(start(), native=False)
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
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    found = stacks.from_faulthandler(7, "before\n" + ended.stderr)
    assert found.method == "faulthandler"
    assert len(found.threads) == 2
    assert [frame.function for frame in found.threads[0].frames][-2:] == ["crash", "<module>"]
    assert found.raw.startswith("before")
    assert stacks.from_faulthandler(7, "nothing of the kind").method == "none"


def test_it_needs_no_torch() -> None:
    """A watcher lives where torch does not, and a decoding process starts with little."""
    program = (
        "import sys, longtake.stacks\n"
        "assert not {'torch', 'numpy', 'av', 'psutil', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
