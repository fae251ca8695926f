"""What chrony says of the clock, of a real chronyd; and who else sets clocks."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.health import time_daemons
from longtake.health.chrony import Chrony, parse
from longtake.health.kernel_clock import KernelClock

_CHRONYD = shutil.which("chronyd") or shutil.which("chronyd", path="/usr/sbin")
needs_chrony = pytest.mark.skipif(
    _CHRONYD is None or shutil.which("chronyc") is None, reason="chrony is not installed"
)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _started(folder: Path, name: str, port: int, more: str) -> subprocess.Popen[bytes]:
    """A chronyd of its own that does not touch the clock, and is asked at a port."""
    text = f"{more}\ncmdport {port}\nbindcmdaddress 127.0.0.1\nbindcmdaddress /\n"
    (folder / name).write_text(f"{text}pidfile {folder / name}.pid\n")
    command = [str(_CHRONYD), "-x", "-U", "-d", "-f", str(folder / name)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The command that asks a chronyd which follows another."""
    port, of_server, of_client = _free_port(), _free_port(), _free_port()
    server = f"local stratum 8\nport {port}\nbindaddress 127.0.0.1\nallow 127.0.0.1"
    client = f"server 127.0.0.1 port {port} iburst minpoll -2 maxpoll -2\nport 0"
    started = [
        _started(tmp_path, "server", of_server, server),
        _started(tmp_path, "client", of_client, client),
    ]
    try:
        yield ("chronyc", "-n", "-h", "127.0.0.1", "-p", str(of_client))
    finally:
        for process in started:
            process.kill()
            process.wait()


@needs_chrony
def test_real_chronyd(ask: tuple[str, ...]) -> None:
    """A chronyd that follows another on this machine is microseconds from it, one stratum below.

    Signs are those of what chrony tells people.
    """
    end = time.monotonic() + 15
    found = {"clock_ntp_stratum": 0.0}
    while found.get("clock_ntp_stratum") != 9 and time.monotonic() < end:
        time.sleep(0.3)
        found = Chrony((*ask, "-c", "tracking")).sample()
    assert found["clock_ntp_stratum"] == 9
    assert abs(found["clock_ntp_offset_seconds"]) < 0.01
    assert 0 < found["clock_ntp_error_seconds"] < 0.1
    command = [*ask, "-c", "tracking"]
    for _ in range(20):  # until nothing has changed between the two commands
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        told = subprocess.run([*ask, "tracking"], capture_output=True, text=True, check=True).stdout
        if subprocess.run(command, capture_output=True, text=True, check=True).stdout == line:
            break
    offset = parse(line)["clock_ntp_offset_seconds"]
    frequency = parse(line)["clock_ntp_frequency_ppm"]
    assert ("fast of NTP" in told) == (offset > 0)
    assert abs(frequency) < 1e-3 or (re.search(r"ppm fast", told) is not None) == (frequency > 0)


def test_no_chronyd() -> None:
    """Where no chronyd answers, or no chronyc is installed, there are no numbers and no error."""
    assert (
        Chrony(("chronyc", "-h", "127.0.0.1", "-p", str(_free_port()), "tracking")).sample() == {}
    )
    assert Chrony(("no-such-program", "-c", "tracking")).sample() == {}
    assert parse("506 Cannot talk to daemon") == {}


def test_unsynchronised() -> None:
    """A chronyd without a source that answers says so: stratum 16."""
    line = "00000000,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised"
    assert parse(line)["clock_ntp_stratum"] == 16


def test_asked_once_a_minute(tmp_path: Path) -> None:
    """Samples in quick succession ask chrony once."""
    program = tmp_path / "chronyc"
    program.write_text('#!/bin/sh\necho x >> "$0.asked"\nexit 1\n')
    program.chmod(0o755)
    chrony = Chrony((str(program),))
    chrony.sample()
    chrony.sample()
    assert (tmp_path / "chronyc.asked").read_text() == "x\n"


def test_kernel_clock() -> None:
    """The kernel's corrections are within what it allows: 500 ppm and a tenth by ticks, 16 s."""
    found = KernelClock().sample()
    assert set(found) == set(KernelClock.numbers)
    assert abs(found["clock_kernel_correction_ppm"]) <= 100_500
    assert 0 <= found["clock_kernel_max_error_seconds"] <= 16
    assert abs(found["clock_kernel_offset_seconds"]) <= 0.5


def test_time_daemons(tmp_path: Path) -> None:
    """Two programs that set the clock are named; linuxptp's two are one; others do not count."""
    for pid, name in enumerate(("chronyd", "ptp4l", "phc2sys", "python", "chronyd")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    assert time_daemons.running(tmp_path) == ["chronyd", "linuxptp"]
