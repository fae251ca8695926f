"""Links, disks, load, memory, open files, steps: of the real node, and of made folders."""

import errno
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from longtake.health.network import Ethernet, InfiniBand
from longtake.health.system import (
    CgroupMemory,
    DiskProbe,
    HealthProbe,
    LoadProbe,
    Numbers,
    Rates,
    ThreadedProbe,
    disk_space,
    oom_kills,
    open_files,
    write_sync_seconds,
)
from longtake.heartbeat import HeartbeatWriter
from longtake.monitor.outliers import StepProbe


def _names(numbers: Numbers) -> set[str]:
    return {key.partition(":")[0] for key in numbers}


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def _port(
    root: Path, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **counters: str
) -> None:
    folder = root / "mlx5_0" / "ports" / "1"
    _write(folder, state=state, rate=rate, **counters)


def test_an_infiniband_port_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    counters = {"counters__port_rcv_data": "1000", "counters__symbol_error": "400"}
    _port(tmp_path, **counters, hw_counters__out_of_sequence="7")
    check = InfiniBand(tmp_path)
    first = check.sample()
    assert first["link_up:mlx5_0/1"] == 1
    assert first["link_speed_bits_per_second:mlx5_0/1"] == 400e9
    assert first["link_out_of_sequence_total:mlx5_0/1"] == 7
    assert "link_receive_bytes_per_second:mlx5_0/1" not in first
    counters = {"counters__port_rcv_data": "251000", "counters__symbol_error": "250400"}
    _port(tmp_path, state="1: DOWN", rate="200 Gb/sec (2X NDR)", **counters)
    clock[0] += 0.125
    second = check.sample()
    assert second["link_receive_bytes_per_second:mlx5_0/1"] == 8e6
    assert second["link_symbol_errors_per_second:mlx5_0/1"] == 2e6
    assert second["link_out_of_sequence_per_second:mlx5_0/1"] == 0
    assert second["link_up:mlx5_0/1"] == 0
    assert second["link_speed_bits_per_second:mlx5_0/1"] == 200e9
    assert _names(second) <= set(InfiniBand.numbers)


def test_a_port_with_odd_files_gives_what_it_can(tmp_path: Path) -> None:
    assert InfiniBand(tmp_path / "none").sample() == {}
    _port(tmp_path, state="", rate="", counters__port_rcv_data="N/A")
    assert InfiniBand(tmp_path).sample() == {"link_up:mlx5_0/1": 0.0}


def test_the_nodes_own_cards_are_read_and_all_numbers_explained() -> None:
    check = Ethernet()
    check.sample()
    time.sleep(0.01)
    found = check.sample()
    assert _names(found) <= set(Ethernet.numbers)
    cards = [path.name for path in Path("/sys/class/net").iterdir() if (path / "device").exists()]
    for card in cards:
        assert f"link_up:{card}" in found
        assert found[f"link_receive_bytes_per_second:{card}"] >= 0


def test_beside_a_real_card_virtual_ones_are_not_watched(tmp_path: Path) -> None:
    _write(
        tmp_path / "eth0", operstate="up", speed="100000", device__vendor="x", carrier_changes="2"
    )
    _write(tmp_path / "veth1", operstate="down")
    _write(tmp_path / "lo", operstate="unknown")
    assert Ethernet(tmp_path).sample() == {
        "link_up:eth0": 1.0,
        "link_speed_bits_per_second:eth0": 100e9,
        "link_carrier_changes_total:eth0": 2.0,
    }


def test_a_count_that_falls_gives_no_rate() -> None:
    rates = Rates()
    assert rates.rate("a", "eth0", None) == rates.rate("a", "eth0", 5) == {}
    assert rates.rate("a", "eth0", 4) == rates.rate("a", "eth1", 9) == {}
    time.sleep(0.001)
    assert rates.rate("a", "eth0", 10)["a"] > 0


def test_a_real_disk_is_measured_and_no_file_is_left_on_it(tmp_path: Path) -> None:
    found = DiskProbe(tmp_path, {"run": tmp_path, "gone": tmp_path / "gone"}).sample()
    assert 0 < found["disk_write_seconds:run"] < 30
    assert 0 <= found["disk_read_seconds:run"] < 30
    assert found["disk_is_full:run"] == found["disk_is_failing:run"] == 0
    assert 0 < found["disk_free_bytes:run"] <= found["disk_size_bytes:run"]
    assert "disk_free_bytes:gone" not in found
    assert list(tmp_path.iterdir()) == []
    assert disk_space(tmp_path)["disk_size_bytes"] == found["disk_size_bytes:run"]
    write_sync_seconds(tmp_path / "probe", 5000)
    assert (tmp_path / "probe").stat().st_size == 5000  # so that this is what was timed


def test_a_full_disk_is_no_failing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = DiskProbe(tmp_path / "gone", {}).sample()
    assert gone == {"disk_is_full:run": 0.0, "disk_is_failing:run": 1.0}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert DiskProbe(tmp_path, {}).sample() == {"disk_is_full:run": 1.0, "disk_is_failing:run": 0.0}


def test_memory_and_load_are_those_of_proc() -> None:
    found = LoadProbe().sample()
    assert set(found) <= set(LoadProbe.numbers)
    assert 0 < found["memory_available_bytes"] <= found["memory_size_bytes"]
    assert found["memory_size_bytes"] == pytest.approx(os.sysconf("SC_PHYS_PAGES") * 4096, rel=0.01)
    assert all(0 <= each <= 1 for name, each in found.items() if name.endswith("_share"))


def test_a_system_without_files_of_its_load_gives_nothing(tmp_path: Path) -> None:
    assert LoadProbe(tmp_path).sample() == {}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (
            "0::/job_1\n",
            {
                "job_1__memory.current": "100",
                "job_1__memory.max": "max",
                "job_1__memory.events": "low 0\nhigh 1\nmax 4\noom 2\noom_kill 3",
            },
            (100, None, 3),
        ),
        (
            "5:cpu,cpuacct:/x\n4:memory:/job_2\n0::/\n",
            {
                "memory__job_2__memory.usage_in_bytes": "200",
                "memory__job_2__memory.limit_in_bytes": "4096",
                "memory__job_2__memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5",
            },
            (200, 4096, 5),
        ),
        ("4:memory:/outside\n", {"memory__memory.usage_in_bytes": "300"}, (300, None, None)),
        ("", {}, (None, None, None)),
    ],
)
def test_both_versions_of_control_groups_tell_use_limit_and_kills(
    tmp_path: Path, groups: str, files: dict[str, str], expected: tuple[float | None, ...]
) -> None:
    _write(tmp_path / "root", **files)
    (tmp_path / "groups").write_text(groups)
    found = CgroupMemory(tmp_path / "groups", tmp_path / "root").sample()
    names = ("cgroup_memory_bytes", "cgroup_memory_limit_bytes", "cgroup_oom_kills_total")
    assert tuple(found.get(name) for name in names) == expected


def test_without_a_count_of_the_cgroup_kills_are_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, vmstat="pgfault 17\noom_kill 3\ndrop_pagecache 0")
    monkeypatch.setattr(CgroupMemory, "sample", lambda _: {})
    assert oom_kills(tmp_path / "vmstat") == 3
    assert oom_kills(tmp_path / "absent") == 0
    monkeypatch.setattr(CgroupMemory, "sample", lambda _: {"cgroup_oom_kills_total": 5.0})
    assert oom_kills(tmp_path / "vmstat") == 5


def test_the_process_that_is_nearest_to_its_limit_of_open_files_is_told(tmp_path: Path) -> None:
    before = open_files([os.getpid(), 2**22 + 1])["open_files"]
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        found = open_files([os.getpid()])
    assert found["open_files"] == before + 2
    assert found["open_files_limit"] == os.sysconf("SC_OPEN_MAX")
    assert open_files([2**22 + 1]) == {}


def test_work_and_rate_of_steps_are_those_since_the_last_sample(tmp_path: Path) -> None:
    heart, check = HeartbeatWriter(tmp_path, "rank", rank=3, world_size=4), StepProbe(tmp_path)
    for step in range(10):
        heart.begin_step(step, "8x32x32")
        heart.end_step(9.0)
    assert "step_work_seconds:3" not in check.sample()
    start = time.monotonic()
    for step in range(10, 14):
        heart.begin_step(step, "8x32x32")
        heart.end_step(0.5)
    time.sleep(0.05)
    found = check.sample()
    assert found["step_work_seconds:3"] == pytest.approx(0.5)
    assert 4 / (time.monotonic() - start + 0.5) < found["steps_per_second:3"] < 4 / 0.05
    assert found["open_files"] > 0
    quiet = check.sample()
    assert quiet["steps_per_second:3"] == 0
    assert "step_work_seconds:3" not in quiet
    heart.close()
    assert "steps_per_second:3" not in check.sample()


def test_a_checkpoint_is_near_while_a_rank_saves_and_for_six_samples_more(tmp_path: Path) -> None:
    heart, check = HeartbeatWriter(tmp_path, "rank"), StepProbe(tmp_path)
    for step in range(10):
        heart.begin_step(step, "8x32x32")
        heart.end_step(1.0)
    heart.set_phase("data")
    near = [check.sample()["checkpoint_is_near"] for _ in range(2)]
    heart.set_phase("checkpoint")
    near.append(check.sample()["checkpoint_is_near"])
    heart.set_phase("data")
    near += [check.sample()["checkpoint_is_near"] for _ in range(8)]
    assert near == [0, 0, 1] + [1] * 6 + [0] * 2
    heart.set_phase("save")
    heart.set_phase("data")
    assert [check.sample()["checkpoint_is_near"] for _ in range(8)] == [1] * 6 + [0] * 2


class _Hanging(HealthProbe):
    name = "hanging"
    numbers: Mapping[str, str] = {"answers": "What it says"}

    def __init__(self) -> None:
        self.lets_go = threading.Event()

    def sample(self) -> Numbers:
        self.lets_go.wait(30)
        return {"answers": 42.0}

    def close(self) -> None:
        self.lets_go.set()


def test_numbers_that_come_in_time_are_in_the_same_sample() -> None:
    check = ThreadedProbe(_Hanging(), patience_seconds=10)
    threading.Timer(0.05, lambda: check._probe.close()).start()
    assert check.sample() == {"answers": 42.0, "check_hangs_seconds:hanging": 0.0}
    check.close()


class _Failing(_Hanging):
    def sample(self) -> Numbers:
        raise ValueError("a driver said something that nobody expects")


def test_a_fault_in_a_check_gives_no_numbers_and_does_not_end_it() -> None:
    check = ThreadedProbe(_Failing(), patience_seconds=10)
    for _ in range(2):
        assert check.sample() == {"check_hangs_seconds:hanging": 0.0}
    check.close()
