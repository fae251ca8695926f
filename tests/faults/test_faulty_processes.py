import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.build import wait_until

from longtake.faults import faulty_processes
from longtake.faults.faulty_processes import WrongClock, read_hang
from longtake.health.clock import Clocks
from longtake.stacks import state_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that hangs in some way, if none has in its folder."""
    started: list[subprocess.Popen[bytes]] = []

    def start_(how: str) -> subprocess.Popen[bytes]:
        program = (
            f"from longtake.faults import faulty_processes as f; f.hang_once(f.{how}, 'c0ffee')"
        )
        started.append(subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path))
        return started[-1]

    yield start_
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.parametrize("how", ["asleep", "in_c", "holding_gil", "stopped"])
def test_a_process_says_where_it_hangs_before_it_does(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path, how: str
) -> None:
    process = start(how)
    hang = wait_until(lambda: read_hang(tmp_path))
    lines = Path(faulty_processes.__file__).read_text().splitlines()
    assert (hang.pid, hang.function, hang.clip) == (process.pid, how, "c0ffee")
    assert hang.at <= time.monotonic()
    wanted = {"asleep": "time.sleep", "stopped": "os.kill"}.get(how, ".read(")
    assert wanted in lines[hang.line - 1]
    wait_until(lambda: state_of(process.pid) == ("T" if how == "stopped" else "S"))
    assert start(how).wait(timeout=300) == 0
    assert process.poll() is None


def test_a_wrong_clock_steps_and_drifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the raw oscillator run fast, and the date is set besides."""
    readings = iter([Clocks(10**12, 10**9, 0), Clocks(10**12, 10**9, 4 * 10**9)])
    monkeypatch.setattr(faulty_processes, "read_clocks", lambda: next(readings))
    clock = WrongClock(2.0, 500.0, after_seconds=1.0, file=tmp_path / "clock.json")
    assert clock.read() == Clocks(10**12, 10**9, 0)
    assert not clock.file.exists()
    drift = 3 * 500_000  # nanoseconds, in 3 s
    assert clock.read() == Clocks(10**12 + drift + 2 * 10**9, 10**9 + drift, 4 * 10**9)
    assert clock.file.exists()
