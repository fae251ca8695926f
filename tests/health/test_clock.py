"""Steps and slews of the clock: their size, their direction, and what is none."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.health import clock
from longtake.health.clock import Clock, Clocks, Slewed, Steady, Stepped

_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
_MS = 1_000_000


class _World:
    """Clocks that a test moves by hand; they stand still unless it does."""

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
    """Clocks that a test moves."""
    return _World(monkeypatch)


@pytest.fixture
def watched(world: _World) -> Iterator[Clock]:
    """Who watches them."""
    found = Clock()
    yield found
    found.close()


@pytest.mark.parametrize("milliseconds", [-1, -7, -2013, 1, 3_600_000])
def test_step_exact(world: _World, watched: Clock, milliseconds: int) -> None:
    """A step of a millisecond or an hour is one change, of exactly its size and direction."""
    world.go(0.25)
    watched.look()
    world.go(0.25)
    world.real += milliseconds * _MS
    watched.look()
    world.go(0.25)
    watched.look()
    assert watched.take_changes() == [Stepped(milliseconds / 1e3)]
    assert watched.take_changes() == []
    assert watched.sample()["clock_last_step_seconds"] == milliseconds / 1e3
    assert watched.sample()["clock_backward_steps_total"] == (milliseconds < 0)


@pytest.mark.parametrize("ppm", [500.0, -500.0, 83_333.0])
def test_slew(world: _World, watched: Clock, ppm: float) -> None:
    """A clock that is made faster or slower is a slew, found within 16 s, and no step.

    Its end is told of too.
    """
    for _ in range(64):
        world.go(0.25, ppm)
        watched.look()
    (slewed,) = watched.take_changes()
    assert isinstance(slewed, Slewed)
    assert slewed.ppm == pytest.approx(ppm, rel=0.01)
    assert slewed.seconds == pytest.approx(15 * ppm * 1e-6, rel=0.03)
    for _ in range(60):
        world.go(0.25)
        watched.look()
    (steady,) = watched.take_changes()
    assert isinstance(steady, Steady)
    assert steady.seconds == pytest.approx(16 * ppm * 1e-6, rel=0.1)


def test_oscillator_is_no_slew(world: _World, watched: Clock) -> None:
    """A correction of 150 ppm is what an oscillator may need: it is measured, and no event."""
    for _ in range(200):
        world.go(0.25, 150)
        watched.look()
    assert watched.take_changes() == []
    assert watched.sample()["clock_slew_ppm"] == pytest.approx(150, abs=0.01)


def test_step_while_slewed(world: _World, watched: Clock) -> None:
    """A step while the clock is slewed does not spoil what is said of the slew."""
    for number in range(64):
        world.go(0.25, 400)
        world.real -= 5 * _MS * (number == 30)
        watched.look()
    stepped, slewed = watched.take_changes()
    assert stepped == Stepped(-0.005)
    assert isinstance(slewed, Slewed)
    assert slewed.ppm == pytest.approx(400, rel=0.01)


def test_real_clock_is_quiet() -> None:
    """Reading the machine's own clocks a thousand times finds no step, and offsets within 50 us."""
    watched = Clock()
    offsets = [clock.read_clocks().offset_ns for _ in range(1000)]
    watched.look()
    assert [each for each in watched.take_changes() if abs(each.seconds) >= 1e-3] == []
    assert sorted(offsets)[900] - sorted(offsets)[100] < 50_000
    watched.close()
    watched.close()


@pytest.mark.skipif(
    os.environ.get("LONGTAKE_TEST_SETS_CLOCK") != "1",
    reason="sets the machine's clock by a microsecond: needs root and LONGTAKE_TEST_SETS_CLOCK=1",
)
def test_undone_step_is_seen() -> None:
    """A step that is undone before the next look is told of: the kernel has seen it."""
    watched = Clock()
    _set_clock_by(1000)
    _set_clock_by(-1000)
    watched.look()
    (change,) = watched.take_changes()
    watched.close()
    assert isinstance(change, Stepped)
    assert abs(change.seconds) < clock.STEP_SECONDS


def _set_clock_by(nanoseconds: int) -> None:
    now = time.clock_gettime_ns(time.CLOCK_REALTIME)
    time.clock_settime_ns(time.CLOCK_REALTIME, now + nanoseconds)


_WATCHING = """
import json, sys, threading
from pathlib import Path
from longtake.health.clock import Clock
path, offsets = Path(sys.argv[1]), json.loads(sys.argv[2])
watched = Clock()
for offset in offsets:
    for _ in range(3):
        threading.Event().wait(0.05)  # time.sleep fails under libfaketime
        watched.look()
    path.write_text(offset)
    watched.look()
print(json.dumps([(type(each).__name__, each.seconds) for each in watched.take_changes()]))
"""


@pytest.mark.skipif(not _FAKETIME.is_file(), reason=f"there is no libfaketime ({_FAKETIME})")
def test_step_in_a_real_process(tmp_path: Path) -> None:
    """A process whose date is moved back by 2.5 s, and forward by 4 ms, tells of just that."""
    path = tmp_path / "offset"
    path.write_text("+0")
    environment = {
        **os.environ,
        "LD_PRELOAD": str(_FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(path),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    steps = json.dumps(["-2.5", "-2.496"])
    command = [sys.executable, "-c", _WATCHING, str(path), steps]
    said = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(said.stdout)
    assert [name for name, _ in found] == ["Stepped", "Stepped"]
    assert [seconds for _, seconds in found] == pytest.approx([-2.5, 0.004], abs=1e-5)
