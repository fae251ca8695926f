"""Steps and slews of the clock, who sets it, and other nodes' clocks."""

import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.health import clock
from longtake.health.clock import (
    Chrony,
    Clock,
    ClockOffsets,
    Clocks,
    ClockSlewed,
    ClockSteady,
    ClockStepped,
    KernelClock,
    parse_tracking,
    time_daemons,
)

_MS = 1_000_000


class _World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real = 1_700_000_000 * 10**9
        self.monotonic = self.raw = 10**12
        monkeypatch.setattr(clock, "read_clocks", self.read)

    def read(self) -> Clocks:
        return Clocks(self.real, self.monotonic, self.raw)

    def go(self, seconds: float, ppm: float = 0.0) -> None:
        nanoseconds = int(seconds * 1e9)
        slewed = int(nanoseconds * (1 + ppm * 1e-6))
        self.raw += nanoseconds
        self.real += slewed
        self.monotonic += slewed


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> _World:
    return _World(monkeypatch)


@pytest.fixture
def watched(world: _World) -> Iterator[Clock]:
    found = Clock()
    yield found
    found.close()


@pytest.mark.parametrize("milliseconds", [-1, -7, -2013, 1, 3_600_000])
def test_a_step_is_one_change_of_its_size(world: _World, watched: Clock, milliseconds: int) -> None:
    world.go(0.25)
    watched.look()
    world.go(0.25)
    world.real += milliseconds * _MS
    watched.look()
    world.go(0.25)
    watched.look()
    assert watched.take_changes() == [ClockStepped(milliseconds / 1e3)]
    assert watched.take_changes() == []
    assert watched.sample()["clock_last_step_seconds"] == milliseconds / 1e3
    assert watched.sample()["clock_backward_steps_total"] == (milliseconds < 0)


@pytest.mark.parametrize("ppm", [500.0, -500.0, 83_333.0])
def test_a_slew_is_found_in_16_seconds_as_no_step(
    world: _World, watched: Clock, ppm: float
) -> None:
    for _ in range(64):
        world.go(0.25, ppm)
        watched.look()
    (slewed,) = watched.take_changes()
    assert isinstance(slewed, ClockSlewed)
    assert slewed.ppm == pytest.approx(ppm, rel=0.01)
    assert slewed.seconds == pytest.approx(15 * ppm * 1e-6, rel=0.03)
    for _ in range(60):
        world.go(0.25)
        watched.look()
    (steady,) = watched.take_changes()
    assert isinstance(steady, ClockSteady)
    assert steady.seconds == pytest.approx(16 * ppm * 1e-6, rel=0.1)


def test_a_correction_that_oscillators_need_is_no_event(world: _World, watched: Clock) -> None:
    for _ in range(200):
        world.go(0.25, 150)
        watched.look()
    assert watched.take_changes() == []
    assert watched.sample()["clock_slew_ppm"] == pytest.approx(150, abs=0.01)


def test_a_step_does_not_spoil_what_is_said_of_a_slew(world: _World, watched: Clock) -> None:
    for number in range(64):
        world.go(0.25, 400)
        world.real -= 5 * _MS * (number == 30)
        watched.look()
    stepped, slewed = watched.take_changes()
    assert stepped == ClockStepped(-0.005)
    assert isinstance(slewed, ClockSlewed)
    assert slewed.ppm == pytest.approx(400, rel=0.01)


def test_the_machines_own_clock_makes_no_steps() -> None:
    watched = Clock()
    offsets = [clock.read_clocks().offset_ns for _ in range(1000)]
    watched.look()
    assert [each for each in watched.take_changes() if abs(each.seconds) >= 1e-3] == []
    assert sorted(offsets)[900] - sorted(offsets)[100] < 50_000
    watched.close()
    watched.close()


_CHRONYD = shutil.which("chronyd") or shutil.which("chronyd", path="/usr/sbin")
needs_chrony = pytest.mark.skipif(
    _CHRONYD is None or shutil.which("chronyc") is None, reason="chrony is not installed"
)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _started(folder: Path, name: str, port: int, more: str) -> subprocess.Popen[bytes]:
    text = f"{more}\ncmdport {port}\nbindcmdaddress 127.0.0.1\nbindcmdaddress /\n"
    (folder / name).write_text(f"{text}pidfile {folder / name}.pid\n")
    command = [str(_CHRONYD), "-x", "-U", "-d", "-f", str(folder / name)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[tuple[str, ...]]:
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
    """A chronyd that follows another on this machine is microseconds from it, one stratum below."""
    end = time.monotonic() + 15
    found = {"clock_ntp_stratum": 0.0}
    while found.get("clock_ntp_stratum") != 9 and time.monotonic() < end:
        time.sleep(0.3)
        found = Chrony((*ask, "-c", "tracking")).sample()
    assert found["clock_ntp_stratum"] == 9
    assert abs(found["clock_ntp_offset_seconds"]) < 0.01
    assert 0 < found["clock_ntp_error_seconds"] < 10  # it begins large, and shrinks with time
    command = [*ask, "-c", "tracking"]
    for _ in range(20):  # until nothing has changed between the two commands
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        told = subprocess.run([*ask, "tracking"], capture_output=True, text=True, check=True).stdout
        if subprocess.run(command, capture_output=True, text=True, check=True).stdout == line:
            break
    offset = parse_tracking(line)["clock_ntp_offset_seconds"]
    frequency = parse_tracking(line)["clock_ntp_frequency_ppm"]
    assert ("fast of NTP" in told) == (offset > 0)
    assert abs(frequency) < 1e-3 or (re.search(r"ppm fast", told) is not None) == (frequency > 0)


def test_without_chrony_there_are_no_numbers_and_no_error() -> None:
    assert (
        Chrony(("chronyc", "-h", "127.0.0.1", "-p", str(_free_port()), "tracking")).sample() == {}
    )
    assert Chrony(("no-such-program", "-c", "tracking")).sample() == {}
    assert parse_tracking("506 Cannot talk to daemon") == {}


def test_a_chronyd_without_a_source_is_of_stratum_16() -> None:
    line = "00000000,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised"
    assert parse_tracking(line)["clock_ntp_stratum"] == 16


def test_samples_in_quick_succession_ask_chrony_once(tmp_path: Path) -> None:
    program = tmp_path / "chronyc"
    program.write_text('#!/bin/sh\necho x >> "$0.asked"\nexit 1\n')
    program.chmod(0o755)
    chrony = Chrony((str(program),))
    chrony.sample()
    chrony.sample()
    assert (tmp_path / "chronyc.asked").read_text() == "x\n"


def test_the_kernels_corrections_are_within_what_it_allows() -> None:
    found = KernelClock().sample()
    assert set(found) == set(KernelClock.numbers)
    assert abs(found["clock_kernel_correction_ppm"]) <= 100_500
    assert 0 <= found["clock_kernel_max_error_seconds"] <= 16
    assert abs(found["clock_kernel_offset_seconds"]) <= 0.5


def test_programs_that_set_the_clock_are_named_and_linuxptps_two_are_one(tmp_path: Path) -> None:
    for pid, name in enumerate(("chronyd", "ptp4l", "phc2sys", "python", "chronyd")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    assert time_daemons(tmp_path) == ["chronyd", "linuxptp"]


def _exchange(ahead: float, reads: int, seed: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    rng = random.Random(seed)  # noqa: S311 - delays
    a, b = ClockOffsets("a"), ClockOffsets("b")
    of_a: dict[str, float] = {}
    of_b: dict[str, float] = {}
    for read in range(reads):
        now = 1e9 + 10.0 * read
        age_a, age_b = rng.uniform(0, 1), rng.uniform(0, 1)
        heart_a = {"wall": now - age_a, "health": dict(of_a)}
        heart_b = {"wall": now - age_b + ahead, "health": dict(of_b)}
        of_a = a.look("b", heart_b, now)
        of_b = b.look("a", heart_a, now + ahead)
    return of_a, of_b


@pytest.mark.parametrize("ahead", [0.0, 0.03, -0.03, 3.0, -3.0])
@pytest.mark.parametrize("seed", range(5))
def test_both_bounds_of_an_offset_hold_on_both_nodes(ahead: float, seed: int) -> None:
    for known, other in zip(_exchange(ahead, 30, seed), "ba", strict=True):
        at_least = known.get(f"clock_offset_at_least_seconds:{other}", 0.0)
        at_most = known[f"clock_offset_at_most_seconds:{other}"]
        assert at_least <= abs(ahead) + 1e-5
        assert at_most >= abs(ahead) - 1e-5
        assert at_most - at_least < 0.3


def test_only_a_date_that_is_still_to_come_proves_an_offset_by_itself() -> None:
    ahead = ClockOffsets("a").look("b", {"wall": 105.0}, 100.0)
    assert ahead["clock_offset_at_least_seconds:b"] == 5
    assert "clock_offset_at_most_seconds:b" not in ahead
    behind = ClockOffsets("a").look("b", {"wall": 95.0}, 100.0)
    assert set(behind) == {"clock_lead_seconds:b"}
    assert ClockOffsets("a").look("b", {}, 100.0) == {}


def test_what_was_known_before_this_clock_was_set_does_not_count() -> None:
    offsets = ClockOffsets("a")
    offsets.look("b", {"wall": 105.0}, 100.0)
    offsets.forget()
    assert offsets.look("b", {"wall": 104.9}, 105.0)["clock_lead_seconds:b"] == pytest.approx(-0.1)
