"""Our own programs, kept processes, signals, periodic work and the identity of processes."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.build import wait_until, wait_until_still

from longtake import process, stacks
from longtake.process import (
    EXIT_CODES,
    STOP_SIGNALS,
    KeptProcess,
    LeftError,
    RestartDelay,
    Stopped,
    StopSignal,
    age_seconds,
    cpu_flags,
    environment,
    leave_on_signals,
    periodic,
    program,
    read_stat,
    start_ticks,
)


def test_periodic_work_is_done_until_the_block_ends() -> None:
    twice, done = threading.Event(), []

    def work() -> None:
        done.append(threading.current_thread().name)
        if len(done) >= 2:
            twice.set()

    with periodic("mine", work, 0.001):
        assert twice.wait(120)
    count = len(done)
    time.sleep(0.02)
    assert len(done) == count
    assert set(done) == {"mine"}
    with periodic("mine", lambda: done.append("at once"), 60.0):
        pass
    assert len(done) == count


def _stop_training() -> StopSignal:
    return StopSignal(STOP_SIGNALS, second="interrupt")


@pytest.mark.parametrize("name", EXIT_CODES)
def test_the_first_signal_is_remembered_and_nothing_else_happens(name: str) -> None:
    with _stop_training() as stop:
        wanted_before = stop.wanted
        signal.raise_signal(signal.Signals[name])
        assert (wanted_before, stop.wanted, stop.reason) == (False, True, name)


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    with _stop_training():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


_HANGS_IN_C = """
import ctypes, signal
from longtake.process import StopSignal
def answer(received):
    print("answer to", received.name, flush=True)
with StopSignal([signal.SIGINT], second="interrupt", answer=answer):
    print("begun", flush=True)
    mutex = ctypes.create_string_buffer(64)  # zeros: an unlocked one
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_ctrl_c_is_answered_and_ends_a_process_that_hangs_in_c() -> None:
    """Python runs no handler until such a call returns, which it may never do."""
    quickly = "import longtake.process as p; p._INTERRUPT_SECONDS = 0.1"
    command = [sys.executable, "-c", quickly + _HANGS_IN_C]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hanging:
        assert hanging.stdout is not None
        assert hanging.stdout.readline() == "begun\n"
        wait_until_still(hanging.pid)
        hanging.send_signal(signal.SIGINT)
        assert hanging.stdout.readline() == "answer to SIGINT\n"
        hanging.send_signal(signal.SIGINT)
        assert hanging.wait(120) == 130


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_twice_means_what_it_meant_once(name: str) -> None:
    with _stop_training() as stop:
        for each in (name, name, "SIGTERM"):
            signal.raise_signal(signal.Signals[each])
        assert stop.reason == name


def test_a_second_signal_can_do_what_it_did_before() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with StopSignal(second="default") as stop:
            signal.raise_signal(signal.SIGTERM)
            assert (stop.reason, received) == ("SIGTERM", [])
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_with_patience_stops_later_and_another_one_sooner() -> None:
    with StopSignal(patience_seconds={signal.SIGTERM: 600.0}) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.is_requested, stop.wanted, stop.reason) == (True, False, "SIGTERM")
        assert not stop.wait(0.0)
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(600.0)
        assert stop.reason == "SIGINT"


def test_a_wait_ends_when_a_stop_is_requested() -> None:
    with StopSignal() as stop:
        assert not stop.wait(0.01)
        stop.check()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.wait(600.0)
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.check()
    with StopSignal() as stop:
        threading.Timer(0.05, stop.request, ("the parent has ended",)).start()
        assert stop.wait(600.0)
        assert stop.reason == "the parent has ended"


def test_each_signal_is_passed_on_to_who_wants_it() -> None:
    received: list[tuple[int, bool]] = []
    with StopSignal(on_signal=lambda number, is_first: received.append((number, is_first))):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [(signal.SIGTERM, True), (signal.SIGINT, False)]


def test_signals_that_are_not_for_it_do_nothing_meanwhile() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal(ignored=(signal.SIGUSR1, signal.SIGHUP)) as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_requested
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_before_there_is_anything_to_save_a_signal_ends_it(name: str, code: int) -> None:
    """The exit code is the one that it would have later, and entered contexts are left."""
    left: list[str] = []
    leaving = ExitStack()
    leaving.callback(left.append, "in order")
    with pytest.raises(LeftError) as ended, leave_on_signals(), leaving:
        signal.raise_signal(signal.Signals[name])
    assert (ended.value.code, ended.value.signal_name, left) == (code, name, ["in order"])


def test_after_a_stop_nothing_cuts_the_rest_short() -> None:
    """The run is saved and says so, though the scheduler repeats itself."""
    with leave_on_signals():
        with _stop_training() as stop:
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert stop.reason == "SIGUSR1"


def test_a_failure_is_not_cut_short_either() -> None:
    """Launchers signal all ranks when one has failed, and each has still to say why it does."""

    def fail() -> None:
        try:
            with _stop_training():
                raise ValueError("it broke")
        finally:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(ValueError, match="it broke"), leave_on_signals():
        fail()


@pytest.mark.parametrize("interrupted", [False, True])
def test_handlers_are_as_before_afterwards(interrupted: bool) -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} was not meant for this handler")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with _stop_training():
            if interrupted:
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("keeps_ignored", [True, False])
def test_an_ignored_signal_stays_ignored_unless_told_otherwise(keeps_ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal(keeps_ignored=keeps_ignored) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wanted is not keeps_ignored
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SHORT_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(process, "_BEAT_LOOK_SECONDS", 0.1)


_ECHOES = "import sys; print('begun', flush=True); sys.stdin.read(); print('ended', flush=True)"


@pytest.mark.usefixtures("quick_restarts")
def test_a_kept_process_is_replaced_until_its_end(tmp_path: Path) -> None:
    log = tmp_path / "tracking" / "log"
    kept = KeptProcess("kept", [sys.executable, "-c", _ECHOES], log, inside=tmp_path, has_pipe=True)
    assert not kept.wait(0) or kept.pid is None
    kept.start()
    first = kept.pid
    kept.start()
    assert kept.pid == first is not None
    wait_until(lambda: log.exists() and log.read_text() == "begun\n")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: log.read_text() == "begun\nbegun\n")
    wait_until(lambda: kept.pid != first)
    assert kept.is_running
    kept.end()
    assert kept.wait(120)
    assert (kept.is_over, kept.is_running) == (True, False)
    assert log.read_text() == "begun\nbegun\nended\n"


@pytest.mark.usefixtures("quick_restarts")
def test_a_kept_process_does_not_bring_back_a_deleted_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    kept = KeptProcess("kept", [sys.executable, "-c", ""], run / "log", inside=run)
    kept.start()
    assert kept.is_over
    assert kept.wait(120)
    assert not run.exists()


@pytest.mark.usefixtures("quick_restarts")
def test_a_kept_process_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.symlink_to(tmp_path / "elsewhere")
    kept = KeptProcess("kept", [sys.executable, "-c", _ECHOES], log, inside=tmp_path)
    kept.start()
    assert kept.pid is None
    log.unlink()
    wait_until(lambda: log.exists() and log.read_text().startswith("begun"))
    kept.end()
    assert kept.wait(120)
    assert not (tmp_path / "elsewhere").exists()


_BEATS = """
import time
from longtake.process import Beat
beat = Beat()
print("begun", flush=True)
while True:
    beat()
    time.sleep(0.02)
"""


@pytest.mark.usefixtures("quick_restarts")
def test_a_kept_process_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    """Its end is not all that counts, and no file need be read to see that it hangs."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", _BEATS]
    kept = KeptProcess("kept", command, log, inside=tmp_path, silent_seconds=1.0)
    kept.start()
    first = kept.pid
    assert first is not None
    wait_until(lambda: log.exists() and log.read_text() == "begun\n")
    time.sleep(0.2)  # for its first beat
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: log.read_text() == "begun\nbegun\n")
    second = kept.pid
    assert second not in (None, first)
    os.kill(second or 0, signal.SIGSTOP)
    wait_until(lambda: stacks.state_of(second or 0) == "T")
    kept.end()  # it could not see that
    assert kept.wait(120)


@pytest.mark.usefixtures("quick_restarts")
@pytest.mark.parametrize("code", [0, 3])
def test_a_kept_process_may_end_well(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 ends it; with another it is replaced, here once."""
    count = "import pathlib, sys; p = pathlib.Path('log'); print(1, flush=True)"
    program = f"{count}; sys.exit({code} if p.read_text() == '1\\n' else 0)"
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", program]
    kept = KeptProcess("kept", command, tmp_path / "log", inside=tmp_path, until_success=True)
    kept.start()
    wait_until(lambda: kept.is_over)
    assert kept.wait(120)
    assert (tmp_path / "log").read_text() == ("1\n1\n" if code else "1\n")


def test_a_program_that_ends_often_is_left_alone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    delay, seconds = RestartDelay(), []
    for _ in range(5):
        delay.started()
        now[0] += 10.0
        seconds.append(delay.seconds)
    assert seconds == [1.0, 1.0, 1.0, 1.0, 600.0]
    now[0] += 600.0
    assert delay.seconds == 1.0


def test_our_programs_are_found_and_not_shadowed(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('shadowed')")
    command, variables = program("longtake", "--help"), environment(LONGTAKE_MINE="1")
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, check=True)
    assert b"train" in done.stdout
    assert variables["LONGTAKE_MINE"] == "1"


def test_a_process_is_identified_by_when_it_was_started() -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) R (b'); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        wait_until(lambda: (found := read_stat(child.pid)) and found.name == "a) R (b")
        found = read_stat(child.pid)
        assert found is not None
        assert (found.parent, found.is_gone) == (os.getpid(), False)
        assert start_ticks(child.pid) == found.start_ticks
        assert found.start_ticks >= (start_ticks(os.getpid()) or 0)
        assert 0 <= age_seconds(child.pid) < age_seconds(os.getpid()) + 1
        child.kill()
        wait_until(lambda: (found := read_stat(child.pid)) and found.state == "Z")
        assert start_ticks(child.pid) is None
    assert read_stat(child.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/cpuinfo is Linux's")
def test_flags_are_read_from_this_machine() -> None:
    assert ({"fpu", "sse2"} <= cpu_flags()) == (os.uname().machine == "x86_64")


_FAULTS = """
import resource, sys, torch
from longtake.process import keep_freed_memory
print(keep_freed_memory())
def touch(): return torch.ones(4 * 2**20)  # 16 MiB: between glibc's threshold and its limit
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _count_faults(**variables: str) -> tuple[str, int]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", _FAULTS]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, faults = printed.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_blocks_are_used_again_unless_the_user_decides() -> None:
    """The default clears all of twenty blocks of 4,096 pages in turn; kept memory clears few."""
    decided, default_faults = _count_faults(MALLOC_TRIM_THRESHOLD_="131072")
    kept, faults = _count_faults()
    assert (decided, kept) == ("False", "True")
    assert faults < default_faults / 2
