"""Hearts: what one process says of itself and another reads, whatever becomes of the first."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.build import not_none, wait_until

from longtake import heartbeat
from longtake.errors import DataError
from longtake.heartbeat import (
    Heartbeat,
    HeartbeatWriter,
    PhaseTiming,
    heartbeat_dir,
    heartbeat_session,
    read_heartbeat,
    read_heartbeats,
)


def _read(writer: HeartbeatWriter) -> Heartbeat:
    return not_none(read_heartbeat(writer.path))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    heart = HeartbeatWriter(tmp_path, "rank", rank=3, local_rank=1, world_size=8)
    heart.set_launch("a1b2c3d4")
    heart.begin_step(41, "8x32x32")
    heart.set_phase("backward")
    pulse = _read(heart)
    assert (pulse.role, pulse.rank, pulse.local_rank, pulse.world_size) == ("rank", 3, 1, 8)
    assert (pulse.step, pulse.phase, pulse.detail) == (41, "backward", "8x32x32")
    assert (pulse.pid, pulse.launch) == (os.getpid(), "a1b2c3d4")
    assert pulse.is_alive
    assert 0 <= pulse.seconds < 600


@given(
    identity=st.text(max_size=200).map(lambda text: text.replace("\0", "")),
    clip=st.text(max_size=2000).map(lambda text: text.replace("\0", "")),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_any_clip_can_be_named(tmp_path: Path, identity: str, clip: str) -> None:
    heart = HeartbeatWriter(tmp_path, "decode")
    heart.set_phase("decode", identity, clip)
    pulse = _read(heart)
    if len(identity.encode()) <= 128 and len(clip.encode()) <= 896:
        assert (pulse.detail, pulse.path_of_clip) == (identity, clip)
    else:
        assert clip.encode()[-400:].decode(errors="ignore") in pulse.path_of_clip
    heart.remove()


def test_the_first_steps_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation and allocation are in them; of later ones the longest time is known."""
    clock = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    heart = HeartbeatWriter(tmp_path, "rank")
    for step in range(9):
        heart.begin_step(step, "8x32x32")
        heart.set_phase("forward")
        clock[0] += 200_000_000 if step == 0 else 1_000_000 * step
        heart.set_phase("backward")
        heart.end_step(work_seconds=0.5)
        pulse = _read(heart)
        assert pulse.is_settled == (step >= 5)
    assert pulse.timings["forward"] == PhaseTiming(4, 0.008, 0.026)
    assert (pulse.work_count, pulse.work_seconds) == (4, 2.0)


def test_a_new_shape_is_given_time(tmp_path: Path) -> None:
    """Longer clips take longer, and are no stall for it, however many steps were done."""
    heart = HeartbeatWriter(tmp_path, "rank")

    def is_settled(shape: str) -> bool:
        heart.begin_step(0, shape)
        heart.end_step()
        return _read(heart).is_settled

    assert [is_settled("8x32x32") for _ in range(7)][-1]
    assert [is_settled("102x720x1280") for _ in range(4)] == [False, False, True, True]


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    heart = HeartbeatWriter(tmp_path, "rank")
    heart.begin_step(0, "0")
    is_over = threading.Event()

    def write() -> None:
        step = 0
        while not is_over.is_set():
            heart.begin_step(step := (step + 1) % 50, str(step))
            time.sleep(1e-5)  # without it hardly a moment is left in which the record is whole

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(500):
            pulse = _read(heart)
            assert str(pulse.step) == pulse.detail
    finally:
        is_over.set()
        writer.join()


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from longtake.heartbeat import HeartbeatWriter\n"
        "writer = HeartbeatWriter(Path(sys.argv[1]), 'rank', rank=1)\n"
        "writer.set_phase('forward'); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path) as found:
        try:
            wait_until(lambda: [each.phase for each in read_heartbeats(tmp_path)] == ["forward"])
            yield found
        finally:
            found.kill()


def test_what_a_killed_process_did_is_still_known(
    tmp_path: Path, process: "subprocess.Popen[bytes]"
) -> None:
    assert read_heartbeats(tmp_path)[0].is_alive
    process.kill()
    process.wait()
    (pulse,) = read_heartbeats(tmp_path)
    assert (pulse.pid, pulse.phase, pulse.is_alive) == (process.pid, "forward", False)


def test_ranks_come_first_and_in_order(tmp_path: Path) -> None:
    for rank in (10, 2):
        HeartbeatWriter(tmp_path, "rank", rank=rank)
    HeartbeatWriter(tmp_path, "decode", rank=2)
    (tmp_path / "rank_7_1").write_bytes(b"something else")
    (tmp_path / "watcher.lock").touch()
    assert [(each.role, each.rank) for each in read_heartbeats(tmp_path)] == [
        ("rank", 2),
        ("rank", 10),
        ("decode", 2),
    ]
    assert read_heartbeats(tmp_path / "nothing") == []


def test_the_process_speaks_of_its_own_heart(tmp_path: Path) -> None:
    heartbeat.set_phase("forward")
    heart = HeartbeatWriter(tmp_path, "rank")
    with heartbeat_session(heart):
        heartbeat.begin_step(3, "1x8x8")
        heartbeat.set_phase("optimizer")
        pulse = _read(heart)
        assert (pulse.step, pulse.phase) == (3, "optimizer")
    ended = _read(heart)
    assert ended.phase == "ended"
    heartbeat.set_phase("forward")
    assert _read(heart).phase == "ended"


@pytest.mark.parametrize(("error", "phase"), [(DataError, "ended"), (ValueError, "forward")])
def test_a_crash_leaves_what_was_said_last(
    tmp_path: Path, error: type[Exception], phase: str
) -> None:
    heart = HeartbeatWriter(tmp_path, "rank")

    def fail() -> None:
        with heartbeat_session(heart):
            heartbeat.set_phase("forward")
            raise error("what went wrong")

    with pytest.raises(error):
        fail()
    pulse = _read(heart)
    assert pulse.phase == phase


def test_no_room_is_no_reason_not_to_train(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    heart = HeartbeatWriter(tmp_path / "file" / "below", "rank")
    heart.set_phase("forward")
    assert read_heartbeat(heart.path) is None


def test_each_run_and_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    one, other = heartbeat_dir(tmp_path / "a"), heartbeat_dir(tmp_path / "b")
    assert one != other
    assert one == heartbeat_dir(tmp_path / "b" / ".." / "a")
