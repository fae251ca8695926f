"""Stack dumps of real processes, by each method."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until

from longtake import stacks
from longtake.process import read_stat
from longtake.stacks import common_calls, descendants, native_stack, parents, python_stack

pytestmark = pytest.mark.usefixtures("patient_dumps")

_PROGRAM = """
import ctypes, sys, threading, time
from pathlib import Path
from longtake.stacks import enable_stack_dumps
if len(sys.argv) > 2:
    enable_stack_dumps(Path(sys.argv[2]))
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
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def await_state(pid: int, states: str) -> None:
    wait_until(lambda: (found := stacks.state_of(pid)) and found in states)


Start = Callable[..., int]


def test_a_waiting_process_says_its_line(start: Start) -> None:
    pid = start()
    found = stacks.dump_process(pid)
    assert found.method == "py-spy --native"
    assert (found.pid, found.state) == (pid, "S")
    assert found.where == "program.py:9 in stand_still"
    assert found.threads[0].name == "MainThread"
    functions = [frame.function for frame in found.threads[0].frames]
    assert "clock_nanosleep" in functions
    assert functions.index("stand_still") < functions.index("<module>")
    await_state(pid, "S")  # it was paused, and goes on


def test_a_process_that_holds_the_lock_says_its_line(start: Start) -> None:
    """A call of C does not give Python's lock back; the process is not paused to read it."""
    found = stacks.dump_process(start("hold_the_lock"), native=False)
    assert (found.method, found.where) == (
        "py-spy --nonblocking",
        "program.py:12 in hold_the_lock",
    )
    assert found.threads[0].has_gil


def test_a_process_that_runs_fast_is_read(start: Start) -> None:
    """Frames read while it runs may not fit together; it is then read again, or paused."""
    pid = start("run_fast")
    for _ in range(10):
        found = stacks.dump_process(pid, native=False)
        assert found.method in ("py-spy --nonblocking", "py-spy")
        assert found.threads[0].frames


def test_a_stopped_process_is_read_and_stays_stopped(start: Start) -> None:
    """A plain py-spy would hang or fail."""
    pid = start()
    os.kill(pid, signal.SIGSTOP)
    await_state(pid, "T")
    for native in (True, False):
        found = stacks.dump_process(pid, native=native)
        assert (found.method, found.state) == ("py-spy --nonblocking", "T")
        assert found.where == "program.py:9 in stand_still"
    assert stacks.read_native_stacks([pid], 120.0) == {}
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
        found = stacks.dump_process(pid, file)
        assert found.method == "faulthandler"
        assert found.where == f"program.py:{line} in {function}"
        assert found.raw.count("most recent call first") == 1
        await_state(pid, "S")


@pytest.mark.usefixtures("no_py_spy")
def test_a_process_without_a_handler_is_not_signalled(start: Start, tmp_path: Path) -> None:
    """SIGUSR2 would end it; /proc is read instead."""
    pid = start()
    found = stacks.dump_process(pid, tmp_path / "stacks.txt")
    assert (found.method, found.threads, found.where) == ("proc", (), "")
    assert f"Pid:\t{pid}\n" in found.raw
    assert stacks.state_of(pid) == "S"


def test_a_process_that_is_not_there(start: Start) -> None:
    pid = start()
    os.kill(pid, signal.SIGKILL)
    await_state(pid, "Z")
    assert stacks.dump_process(pid).state == "Z"
    os.waitpid(pid, 0)
    assert stacks.dump_process(pid) == stacks.StackDump(pid, "", "none")


def test_calls_of_c_are_read_as_long_as_there_is_time(start: Start) -> None:
    """Nobody waits longer: who could not be read in time is left out."""
    pids = [start(), start("hold_the_lock")]
    found = stacks.read_native_stacks(pids, 120.0)
    assert [found[pid][0].frames[0].function for pid in pids] == ["clock_nanosleep"] * 2
    assert stacks.read_native_stacks(pids, 0.0) == {}


def test_a_py_spy_that_hangs_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever it waits for: /proc is read instead, and it is not tried again."""
    pid = start()
    frozen = tmp_path / "py-spy"
    frozen.write_text("#!/bin/sh\nexec sleep 600\n")
    frozen.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(stacks, "_OTHER_SECONDS", 0.1)
    assert stacks.dump_process(pid, native=False).method == "proc"


def test_the_last_words_of_a_crash_are_read() -> None:
    program = (
        "import ctypes, faulthandler, threading, time\n"
        "faulthandler.enable()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def crash():\n"
        "    ctypes.string_at(0)\n"
        "crash()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    found = stacks.parse_faulthandler(7, "before\n" + ended.stderr)
    assert found.method == "faulthandler"
    assert len(found.threads) == 2
    assert [frame.function for frame in found.threads[0].frames][-2:] == ["crash", "<module>"]
    assert found.raw.startswith("before")
    assert stacks.parse_faulthandler(7, "nothing of the kind").method == "none"


_PROGRAM_ALLOW = """
import os, signal, sys
from pathlib import Path
from longtake.stacks import enable_stack_dumps
enable_stack_dumps(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize("has_file", [False, True])
def test_stacks_go_to_a_file_or_stderr_and_a_crash_to_stderr(
    has_file: bool, tmp_path: Path
) -> None:
    """The file's former content is of another process with the same number."""
    file = tmp_path / "stacks.txt"
    file.write_text("of another process")
    command = [sys.executable, "-c", _PROGRAM_ALLOW, *([str(file)] if has_file else [])]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=300)
    assert ended.returncode == -signal.SIGSEGV
    assert b"Segmentation fault" in ended.stderr
    assert ended.stderr.count(b"most recent call first") == (1 if has_file else 2)
    assert file.read_text().startswith("Current thread" if has_file else "of another")


def test_a_schedulers_warning_is_not_taken_for_a_question() -> None:
    program = (
        "import signal, time\n"
        "from longtake.stacks import enable_stack_dumps\n"
        "enable_stack_dumps()\n"
        "print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"True\n"
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(120) == -signal.SIGUSR1


_MAIN, _TRAIN, _WAIT = ("main", "a.py", 1), ("train", "a.py", 7), ("wait", "b.py", 3)


def _thread(*calls: tuple[str, str, int]) -> dict[str, Any]:
    frames = [dict(zip(("function", "file", "line"), call, strict=True)) for call in calls]
    return {"name": "MainThread", "is_active": True, "has_gil": False, "frames": frames}


def test_what_does_not_move_is_counted_from_the_outermost_call() -> None:
    assert common_calls([(_WAIT, _TRAIN, _MAIN), (_WAIT, _TRAIN, _MAIN)]) == (_WAIT, _TRAIN, _MAIN)
    assert common_calls([(_WAIT, _TRAIN, _MAIN), (_TRAIN, _MAIN)]) == (_TRAIN, _MAIN)
    assert common_calls([(_WAIT, _TRAIN, _MAIN), (_WAIT, ("train", "a.py", 8), _MAIN)]) == (_MAIN,)
    assert common_calls([(_WAIT,), ()]) == ()
    assert common_calls([]) == ()


def test_calls_of_c_do_not_tell_stacks_apart() -> None:
    """A stack that was read with them equals one that was not."""
    sleep, ffi = ("clock_nanosleep", "/usr/lib/libc.so.6", 0), ("ffi_call", "libffi.so.8", 0)
    frozen = ("_run_code", "<frozen runpy>", 88)
    native = _thread(sleep, _WAIT, ffi, _MAIN, frozen, ("0x7f", "/usr/lib/libc.so.6", 0))
    assert (
        python_stack(native)
        == python_stack(_thread(_WAIT, _MAIN, frozen))
        == (_WAIT, _MAIN, frozen)
    )
    assert native_stack(native) == (sleep,)
    assert native_stack(_thread(_WAIT, _MAIN)) == ()
    assert python_stack(_thread()) == ()


def test_facts_of_a_process() -> None:
    program = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", program, "a name (with) words"]) as process:
        found = wait_until(lambda: (f := read_stat(process.pid)) and f.cpu_seconds > 0.05 and f)
        assert found.command == f"{sys.executable} -c {program} a name (with) words"
        os.kill(process.pid, signal.SIGSTOP)
        await_state(process.pid, "T")
        stopped = read_stat(process.pid)
        process.kill()
    assert found
    assert (found.pid, found.parent) == (process.pid, os.getpid())
    assert stopped
    assert stopped.state == "T"
    assert stopped.cpu_seconds >= found.cpu_seconds


def test_a_dead_process_has_its_name_alone() -> None:
    """Its memory, in which the command line lay, is gone; and then all of it is."""
    process = subprocess.Popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGKILL)
    await_state(process.pid, "Z")
    found = read_stat(process.pid)
    assert found
    assert (found.command, found.state) == ("[sleep]", "Z")
    process.wait()
    assert read_stat(process.pid) is None


def test_descendants() -> None:
    """Children and theirs, parents first; whoever is left out takes along what it has started."""
    inner = "import subprocess; subprocess.run(['sleep', '600'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], start_new_session=True) as process:
        found = wait_until(lambda: len(each := descendants(process.pid)) == 2 and each)
        known = parents()
        assert [known[pid] for pid in found] == [process.pid, found[0]]
        assert descendants(process.pid, known) == found
        assert descendants(process.pid, known, without={found[0]}) == []
        assert descendants(process.pid, known, without={found[1]}) == found[:1]
        assert set(found) < set(descendants(os.getpid(), known))
        os.killpg(process.pid, signal.SIGKILL)
