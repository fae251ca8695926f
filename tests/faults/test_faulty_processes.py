import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longtake.faults import faulty_processes
from longtake.faults.faulty_processes import Hang, read_hang
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
    hang = _wait_for_hang(tmp_path)
    lines = Path(faulty_processes.__file__).read_text().splitlines()
    assert (hang.pid, hang.function, hang.clip) == (process.pid, how, "c0ffee")
    assert hang.at <= time.monotonic()
    wanted = {"asleep": "time.sleep", "stopped": "os.kill"}.get(how, ".read(")
    assert wanted in lines[hang.line - 1]
    deadline = time.monotonic() + 10
    while state_of(process.pid) != ("T" if how == "stopped" else "S"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert start(how).wait(timeout=300) == 0
    assert process.poll() is None


def _wait_for_hang(folder: Path) -> Hang:
    deadline = time.monotonic() + 20
    while (hang := read_hang(folder)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return hang
