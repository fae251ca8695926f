"""A node's health as the watcher tells it: what is written, and what is an event."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.build import wait_until

from longtake.fsio import read_json_lines
from longtake.health import clock
from longtake.health import system as apart
from longtake.health.clock import Clocks, ClockSlewed, ClockSteady, ClockStepped
from longtake.health.system import DiskProbe, Numbers
from longtake.heartbeat import HeartbeatWriter, heartbeat_dir
from longtake.monitor.node_health import (
    HealthLog,
    HealthRules,
    NodeHealth,
    PeerNodes,
    clock_event,
    full_disks,
    thin_out,
)
from longtake.monitor.observe import WatchSettings
from longtake.monitor.outliers import Outlier
from longtake.node_dir import NodeDirectory
from longtake.node_numbers import SIGNALS
from longtake.run_dir import RunDirectory


@pytest.fixture
def node(tmp_path: Path) -> NodeDirectory:
    path = tmp_path / "run"
    path.mkdir()
    found = NodeDirectory(RunDirectory(path), "gpu07")
    found.path.mkdir(parents=True)
    return found


@pytest.fixture
def watch(node: NodeDirectory) -> Iterator[NodeHealth]:
    often = WatchSettings.model_construct(health_seconds=0.2)
    found = NodeHealth(node.run, node, often, [node.run.path])
    yield found
    found.close()


def test_real_node(node: NodeDirectory, watch: NodeHealth) -> None:
    heart = HeartbeatWriter(heartbeat_dir(node.run.path), "rank", rank=5)
    watch.start()
    wait_until(lambda: "steps_per_second:5" in watch.latest())
    found = watch.latest()
    heart.close()
    heart.remove()
    assert found["clock_steps_total"] == 0
    assert found["disk_free_bytes:run"] > 0
    assert f"disk_free_bytes:{node.run.path}" in found
    assert found["memory_available_bytes"] > 0
    assert json.loads(json.dumps(found)) == found
    lines = wait_until(lambda: list(read_json_lines(node.health_path)))
    assert {"time", "load_average"} <= lines[0].keys()
    assert watch.take_events() == []


def test_a_step_backwards_is_an_event_with_its_size_and_a_remedy(
    watch: NodeHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, back, reads = clock.read_clocks, threading.Event(), list[Clocks]()

    def read() -> Clocks:
        now = real()
        reads.append(now)
        return now._replace(real_ns=now.real_ns - 2_013_000_000 * back.is_set())

    monkeypatch.setattr(clock, "read_clocks", read)
    watch.start()
    wait_until(lambda: len(reads) > 1)
    back.set()
    ((kind, fields),) = wait_until(watch.take_events)
    assert kind == "clock_stepped"
    assert fields["seconds"] == pytest.approx(-2.013, abs=1e-4)
    assert fields["message"].startswith("gpu07: the clock was set back by 2.01")
    assert "makestep 1.0 3" in fields["message"]


def test_sizes_directions_and_programs_that_set_the_clock_are_told() -> None:
    kind, fields = clock_event("a", ClockStepped(-0.001234), ["chronyd", "ntpd"])
    assert kind == "clock_stepped"
    assert "a: the clock was set back by 1.234 ms." in fields["message"]
    assert "Here chronyd and ntpd run, and work against each other." in fields["message"]
    assert "forward by 3.500000 s" in clock_event("a", ClockStepped(3.5), [])[1]["message"]
    kind, fields = clock_event("a", ClockSlewed(-500.04, -0.0075), ["chronyd"])
    assert (kind, fields["ppm"], fields["seconds"]) == ("clock_slewed", -500.0, -0.0075)
    assert "500 ppm too slow, 7.5 ms so far" in fields["message"]
    assert clock_event("a", ClockSteady(0.01), [])[0] == "recovered"


def test_a_disk_that_hangs_is_an_event_and_stops_no_other_check(
    watch: NodeHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    lets_go = threading.Event()

    def hang(self: DiskProbe) -> Numbers:
        lets_go.wait(600)
        return {}

    monkeypatch.setattr(DiskProbe, "sample", hang)
    monkeypatch.setattr(apart, "HANGING_SECONDS", 0.7)
    watch.start()
    ((kind, fields),) = wait_until(watch.take_events)
    assert kind == "degraded"
    assert fields["reason"].startswith("looking at disk has been hanging for")
    assert watch.latest()["check_hangs_seconds:disk"] >= 0.7
    assert watch.latest()["memory_available_bytes"] > 0
    watch.close()  # which does not wait for it
    lets_go.set()


def _beat(node: NodeDirectory, beat: int, health: Numbers) -> None:
    record = {"host": node.host, "pid": 1, "beat": beat, "launch": "", "wall": time.time()}
    node.write_heartbeat({**record, "health": health})


def test_a_rank_slower_than_those_of_other_nodes_is_named(
    node: NodeDirectory, watch: NodeHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [NodeDirectory(node.run, host) for host in ("gpu08", "gpu09")]
    done = threading.Event()

    def beat() -> None:
        heart = HeartbeatWriter(heartbeat_dir(node.run.path), "rank", rank=4)
        step = 0
        while not done.wait(0.03):
            step += 1
            heart.begin_step(step, "8x32x32")
            heart.end_step(0.13)
            for number, other in enumerate(others):
                _beat(other, step, {f"step_work_seconds:{number}": 0.1})
        heart.close()
        heart.remove()

    thread = threading.Thread(target=beat)
    thread.start()
    watch.start()
    try:
        ((kind, fields),) = wait_until(watch.take_events)
    finally:
        done.set()
        thread.join()
    assert kind == "degraded"
    assert (fields["rank"], fields["percent"]) == (4, pytest.approx(30, abs=1))
    assert fields["message"] == "gpu07: rank 4 step time +30 %."
    assert watch.latest()["clock_lead_seconds:gpu08"] < 0.01


def test_nodes_count_while_their_hearts_beat(node: NodeDirectory) -> None:
    other = NodeDirectory(node.run, "gpu08")
    neighbours = PeerNodes(node.run, node.host)
    _beat(other, 1, {"step_work_seconds:1": 0.5})
    assert neighbours.sample() == {"neighbours": 0.0}
    _beat(other, 2, {"step_work_seconds:1": 0.5})
    found = neighbours.sample()
    assert found["neighbours"] == 1
    assert -600 < found["clock_lead_seconds:gpu08"] <= 0
    assert neighbours.health == {"gpu08": {"step_work_seconds:1": 0.5}}
    assert neighbours.sample() == {"neighbours": 0.0}


def _finding(name: str, device: str, value: float, usual: float) -> Outlier:
    signal = next(each for each in SIGNALS if each.name == name)
    return Outlier(signal, device, value, usual, "others")


def test_what_is_weak_in_a_node_is_one_reason_the_worst_device_first() -> None:
    judge = HealthRules()
    findings = [
        _finding("gpu_power_watts", "0", 430, 655),
        _finding("gpu_power_watts", "1", 412, 655),
        _finding("step_work_seconds", "57", 1.11, 1.0),
    ]
    numbers = {"gpu_throttle_bits:1": float(0x40)}
    for _ in range(3):
        found = judge.wrong(numbers, findings)
    assert ", ".join(found.values()) == (
        "GPU 1 power 412 W against 655 W median (and 1 more), rank 57 step time +11 %, "
        "GPU 1 thermal slowdown"
    )


def test_links_that_go_down_errors_and_shortages_are_told() -> None:
    judge = HealthRules()
    calm = {
        "link_up:eth0": 1.0,
        "link_up:never": 0.0,
        "gpu_xid_errors_total:2": 0.0,
        "cgroup_oom_kills_total": 3.0,
        "memory_size_bytes": 100e9,
        "memory_available_bytes": 50e9,
        "gpu_throttle_bits:0": 4.0,
    }
    assert judge.wrong(calm, []) == {}
    bad = {
        **calm,
        "link_up:eth0": 0.0,
        "gpu_xid_errors_total:2": 1.0,
        "gpu_last_xid:2": 79.0,
        "cgroup_oom_kills_total": 4.0,
        "clock_offset_at_least_seconds:gpu08": 0.5,
    }
    assert sorted(judge.wrong(bad, []).values()) == [
        "its clock and gpu08's differ by at least 0.500 s",
        "the driver reports errors of GPU 2 (XID 79)",
        "the kernel has killed 1 processes for lack of memory",
        "the link eth0 is down",
    ]
    short = {**calm, "memory_available_bytes": 1.5 * 2**30, "gpu_xid_errors_total:2": 1.0}
    told = [judge.wrong({**short, "cgroup_oom_kills_total": 4.0}, []) for _ in range(3)]
    assert "memory" not in told[1]
    assert told[2]["memory"] == "1.50 GiB of memory left"


def test_a_slow_link_is_told_after_three_windows_and_a_cut_one_at_once() -> None:
    judge = HealthRules()
    facts = {"peer_busy_share:b": 0.91, "peer_send_bytes_per_second:b": 0.8e6}
    usual = {**facts, "peer_send_share:b": 0.7, "peer_unanswered_seconds:b": 0.0}
    assert all(judge.wrong(usual, []) == {} for _ in range(4))
    told = [judge.wrong({**usual, "peer_send_share:b": 0.0267}, []) for _ in range(3)]
    assert told[:2] == [{}, {}]
    assert list(told[2].values()) == [
        "the link to b carries 0.8 MB/s, 37 times less than usual, and is busy 91% of the time"
    ]
    cut = judge.wrong({"peer_unanswered_seconds:b": 7.2}, [])
    assert list(cut.values()) == ["b has acknowledged nothing for 7 s of what is sent to it"]


def test_nodes_are_known_by_their_ranks_addresses_without_a_beat(node: NodeDirectory) -> None:
    neighbours = PeerNodes(node.run, node.host)
    record = {"host": "gpu08", "pid": 1, "beat": 1, "launch": "", "addresses": ["10.0.0.8"]}
    NodeDirectory(node.run, "gpu08").write_heartbeat(record)
    neighbours.sample()
    assert neighbours.addresses == {"10.0.0.8": "gpu08"}


def test_a_disk_hangs_after_three_windows_and_a_driver_at_once() -> None:
    judge = HealthRules()
    for seconds in (6.0, 0.0, 12.0, 6.0, 0.0):
        assert judge.wrong({"check_hangs_seconds:disk": seconds}, []) == {}
    told = [judge.wrong({"check_hangs_seconds:disk": each}, []) for each in (10.0, 20.0, 30.0)]
    assert told[:2] == [{}, {}]
    assert list(told[2].values()) == ["looking at disk has been hanging for 30 s"]
    saving = {"checkpoint_is_near": 1.0}
    for seconds in (10.0, 20.0, 30.0, 40.0, 50.0):
        assert judge.wrong({"check_hangs_seconds:disk": seconds, **saving}, []) == {}
    told = [judge.wrong({"check_hangs_seconds:disk": each, **saving}, []) for each in (60, 70, 80)]
    assert list(told[2].values()) == ["looking at disk has been hanging for 80 s"]
    assert judge.wrong({"check_hangs_seconds:gpu": 6.0}, []) != {}


def test_full_is_what_has_little_space_or_few_files_or_could_not_be_written() -> None:
    gib = 2**30
    disks = {
        "run": (100 * gib, 4 * gib, 1e6, 1e6),
        "small": (gib, 0.5 * gib, 1e6, 1e6),
        "large": (10_000 * gib, 6 * gib, 1e6, 1e6),
        "files": (100 * gib, 50 * gib, 1e6, 5e3),
    }
    names = ("disk_size_bytes", "disk_free_bytes", "disk_inodes", "disk_free_inodes")
    numbers = {
        f"{name}:{disk}": float(value)
        for disk, values in disks.items()
        for name, value in zip(names, values, strict=True)
    }
    assert full_disks(numbers).keys() == {"run", "files"}
    assert full_disks({**numbers, "disk_is_full:small": 1.0}).keys() == {"run", "files", "small"}


def test_a_full_disk_is_told_once_with_its_path_and_what_is_left(
    watch: NodeHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DiskProbe, "sample", lambda _: {"disk_is_full:run": 1.0, "disk_free_bytes:run": 0.0}
    )
    watch.start()
    ((kind, fields),) = wait_until(watch.take_events)
    assert kind == "disk_full"
    assert fields["path"].endswith("run")
    assert fields["free_gib"] == 0
    time.sleep(0.6)
    assert watch.take_events() == []


def test_a_journal_too_large_loses_every_second_line_but_never_its_last(tmp_path: Path) -> None:
    path = tmp_path / "health.jsonl"
    path.write_text("".join(f'{{"n":{number}}}\n' for number in range(7)))
    thin_out(path)
    assert [each["n"] for each in read_json_lines(path)] == [0, 2, 4, 6]
    journal = HealthLog(path, max_bytes=1000)
    for number in range(7, 1000):
        journal.put({"n": number})
        if number % 20 == 0:  # few enough to wait in its queue
            wait_until(lambda number=number: _last(path) == number)  # type: ignore[misc]
    journal.close(120)
    found = [each["n"] for each in read_json_lines(path)]
    assert path.stat().st_size <= 1000
    assert found == sorted(found)
    assert found[-1] > 900


def _last(path: Path) -> int:
    return int([*read_json_lines(path)][-1]["n"])


def test_health_adds_less_than_15_mib_to_a_watcher_and_no_torch() -> None:
    program = """
import sys
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024
import longtake.config, longtake.node_dir
before = resident()
import longtake.monitor.node_health, longtake.monitor.exporter
from longtake.health.gpu import GpuProbe
GpuProbe().sample()
assert not {"torch", "rich", "typer", "numpy"} & set(sys.modules)
print(resident() - before)
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert float(said.stdout) < 15
