"""The watcher: real processes that beat and hang, and a real watcher of them."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.build import wait_until

from longtake.fsio import now, read_json, read_json_lines, write_once
from longtake.heartbeat import read_heartbeats
from longtake.monitor.coordinator import stall_request
from longtake.monitor.observe import Overdue
from longtake.monitor.reporting import WatchTarget
from longtake.monitor.watcher import WatcherLock
from longtake.node_dir import (
    FLIGHT_FILE_PREFIX,
    FLIGHT_PIPE_PREFIX,
    diagnosis_path,
    request_path,
    requests_path,
)


def _line_of(text: str) -> int:
    lines = Path(__file__).with_name("beating.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line) + 2


def test_a_rank_that_hangs_is_named_and_ended(stage: Any) -> None:
    guilty, other = stage.rank("sleeps", rank=1), stage.rank("waits", rank=0)
    # As a launcher does, before the other rank exceeds its limit as well.
    end = f"if [ $LONGTAKE_EVENT = rank_failed ]; then kill -KILL {other}; fi"
    watcher = stage.watcher(action="kill", hook=f"cat >> {stage.path}/alerts; {end}")
    (stalled,) = wait_until(lambda: stage.events("stalled"))
    suspect = stalled["suspects"][0]
    assert (stalled["kind"], stalled["step"], suspect["pid"]) == ("stuck", 11, guilty)
    place = (suspect["rank"], suspect["function"], suspect["line"])
    assert place == (1, "sleeps", _line_of("def sleeps"))
    assert f"rank 1 (process {guilty})" in stalled["sentence"]
    verdict = read_json(stage.run.path / stalled["verdict"])
    assert (verdict["token"], verdict["sentence"]) == (stalled["token"], stalled["sentence"])
    assert read_json(request_path(stage.run, stalled["token"]))["by"] == "node"
    (killed,) = wait_until(lambda: stage.events("killed_rank"))
    assert (killed["pid"], killed["rank"]) == (guilty, 1)
    assert stage.is_gone(guilty)
    assert watcher.wait(120) == 0
    died, _ = stage.events("rank_failed")
    assert (died["pid"], died["phase"], died["out_of_memory"]) == (guilty, "forward", False)
    alerts = [each["event"] for each in read_json_lines(stage.path / "alerts")]
    assert alerts == ["stalled", "killed_rank", "rank_failed"]  # of the second death it is no news
    assert not stage.folder().exists()


@pytest.mark.slow
def test_its_own_lateness_is_said_once_a_minute(stage: Any) -> None:
    """On a machine that is too busy the log would fill; the heartbeat has the sum."""
    rank = stage.rank("waits")
    watcher = stage.watcher(min_seconds=60.0)
    wait_until(lambda: stage.node().read_heartbeat())  # it looks, and can be late
    for _ in range(2):
        watcher.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        watcher.send_signal(signal.SIGCONT)
        time.sleep(1.0)
    wait_until(lambda: stage.node().read_heartbeat()["watch_seconds_late"] > 2.0)
    stage.end(rank)
    assert watcher.wait(120) == 0
    assert watcher.stdout.read().count("the watcher did not run for") == 1


def test_what_goes_on_again_is_told(stage: Any) -> None:
    rank = stage.rank("pauses")
    stage.watcher(min_seconds=2.5)
    (stalled,) = wait_until(lambda: stage.events("stalled"))
    beat = wait_until(lambda: (b := stage.node().read_heartbeat()).get("stalls") and b)
    assert (beat["stall"], beat["stalls"]) == (stalled["token"], 1)
    os.kill(rank, signal.SIGUSR1)
    (event,) = wait_until(lambda: stage.events("stall_cleared"))
    assert (event["token"], event["rank"], event["phase"]) == (stalled["token"], 0, "forward")
    assert event["seconds"] >= stalled["limit"]


def test_a_run_that_ends_well_leaves_nothing_to_tell(stage: Any) -> None:
    stage.rank("ends"), stage.rank("ends", rank=1)
    (stage.folder() / f"{FLIGHT_FILE_PREFIX}0").touch()
    os.mkfifo(stage.folder() / f"{FLIGHT_PIPE_PREFIX}1.pipe")
    os.mkfifo(stage.folder() / f"{FLIGHT_PIPE_PREFIX}7.pipe")  # of a rank without a record
    watcher = stage.watcher()
    assert watcher.wait(120) == 0
    kinds = [each["event"] for each in read_json_lines(stage.node().events_path)]
    assert kinds == ["watcher_started"]
    assert stage.node().read_heartbeat()["ended"]
    assert not stage.folder().exists()


def test_the_heartbeat_says_what_each_process_does_and_requests_are_answered(stage: Any) -> None:
    rank, worker = stage.rank("waits"), stage.worker("idles")
    watcher = stage.watcher(min_seconds=30.0)
    first = wait_until(lambda: stage.node().read_heartbeat())
    second = wait_until(lambda: (b := stage.node().read_heartbeat())["beat"] > first["beat"] and b)
    assert (second["pid"], second["launch"], second["host"]) == (watcher.pid, "abcd1234", "node")
    (entry,), (other,) = second["ranks"], second["workers"]
    assert (entry["pid"], entry["phase"], entry["limit"]) == (rank, "collective", 30.0)
    assert entry["step_seconds"] == pytest.approx(0.001)
    assert (other["pid"], other["phase"], other["limit"]) == (worker, "idle", None)
    process = psutil.Process(watcher.pid)
    assert process.memory_info().rss < 60 * 2**20
    assert not any("torch" in each.path for each in process.memory_maps())
    request = {"token": "asked_1", "time": now(), "by": "laptop", "reason": "asked"}
    write_once(request_path(stage.run, "asked_1"), {**request, "rounds": 2, "native": False})
    dump = wait_until(lambda: read_json(stage.node().dump_path("asked_1")))
    assert len(dump["rounds"]) == 2
    assert {each["pid"] for each in dump["rounds"][0]["processes"]} >= {rank, worker}
    assert not diagnosis_path(stage.run, "asked_1").exists()


@pytest.mark.slow
def test_two_nodes_dump_before_the_alarm_and_pass_one_verdict(stage: Any) -> None:
    for host in "ab":
        stage.watcher(host=host, action="kill", min_seconds=10.0)
    stage.rank("waits", rank=0, host="a")
    guilty = stage.rank("sleeps", rank=1, host="b")
    wait_until(lambda: stage.events("killed_rank", "b"))
    (stalled,) = [event for host in "ab" for event in stage.events("stalled", host)]
    suspect = stalled["suspects"][0]
    assert (suspect["host"], suspect["pid"]) == ("b", guilty)
    assert stage.events("killed_rank", "a") == []
    for host in "ab":
        dump = read_json(stage.node(host).dump_path(stalled["token"]))
        first = [each for each in dump["rounds"][0]["processes"] if each["role"] == "rank"]
        assert len(dump["rounds"]) == stage.settings.rounds
        assert first[0]["heartbeat"]["seconds"] < stalled["limit"]


@pytest.mark.slow
def test_the_verdict_outlives_the_watcher_that_asked(stage: Any) -> None:
    stage.watcher(host="a", min_seconds=60.0)
    asker = stage.watcher(host="b", min_seconds=60.0)
    pid = stage.rank("sleeps", rank=1, host="b")
    stage.rank("waits", rank=0, host="a")
    for host in "ab":
        wait_until(lambda host=host: stage.node(host).read_heartbeat().get("launch"))  # type: ignore[misc]
    asker.kill()
    asker.wait(120)
    pulse = next(each for each in read_heartbeats(stage.folder("b")) if each.pid == pid)
    target = WatchTarget(stage.run, stage.settings, "b", stage.folder("b"))
    request = stall_request(target, "stall_by_b", Overdue(pulse, 1.0), "abcd1234", pulse.step)
    write_once(request_path(stage.run, "stall_by_b"), request)
    (stalled,) = wait_until(lambda: stage.events("stalled", "a"))
    assert stalled["token"] == request["token"]
    verdict = read_json(diagnosis_path(stage.run, "stall_by_b"))
    assert (verdict["host"], verdict["silent_nodes"]) == ("a", ["b"])


def test_a_process_that_moves_on_during_the_dump_is_no_stall(stage: Any) -> None:
    """No event and no alert; the file tells the other nodes that nothing is left to find out."""
    rank = stage.rank("pauses")
    stage.watcher(min_seconds=2.0, round_seconds=6.0)
    (path,) = wait_until(lambda: list(requests_path(stage.run).glob("[!.]*.json")))
    os.kill(rank, signal.SIGUSR1)
    found = wait_until(lambda: read_json(diagnosis_path(stage.run, path.stem)))
    assert (found["kind"], found["suspects"]) == ("cleared", [])
    assert wait_until(lambda: stage.node().read_heartbeat()["stall"] == "")
    assert stage.events("stalled") == stage.events("stall_cleared") == []


def test_a_full_disk_is_told_when_there_is_room(stage: Any) -> None:
    stage.rank("waits", rank=1)
    node = stage.node()
    hook = f"ulimit -S -f unlimited; cat >> {stage.path}/alerts"
    watcher = stage.watcher(hook=hook, min_seconds=60.0)
    limits = resource.prlimit(watcher.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(watcher.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    stage.rank("dies")
    wait_until(lambda: stage.alerts("disk_full") and stage.alerts("rank_failed"))
    assert [each["event"] for each in read_json_lines(node.events_path)] == ["watcher_started"]
    resource.prlimit(watcher.pid, resource.RLIMIT_FSIZE, limits)
    wait_until(lambda: stage.events("disk_full") and stage.events("rank_failed"))


@pytest.mark.slow
def test_one_waits_for_another_and_one_by_hand_says_who_watches(stage: Any) -> None:
    """What `train` starts takes over when the other ends; a person is told and left alone."""
    stage.rank("waits")
    first = stage.watcher(min_seconds=60.0)
    by_hand = stage.watcher("--by-hand", wait=False)
    assert by_hand.wait(120) == 0
    assert f"is watched already, by process {first.pid}" in by_hand.stdout.read()
    second = stage.watcher(min_seconds=60.0, wait=False)
    time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 0
    wait_until(lambda: len(stage.events("watcher_started")) == 2)
    second.send_signal(signal.SIGINT)
    assert second.wait(120) == 0
    assert [event["pid"] for event in stage.events("watcher_started")] == [first.pid, second.pid]


@pytest.mark.slow
def test_by_hand_it_follows_the_next_launch(stage: Any) -> None:
    watcher = stage.watcher("--by-hand")
    pid = stage.rank("steps")
    node = stage.node()
    wait_until(lambda: pid in {rank["pid"] for rank in node.read_heartbeat().get("ranks", ())})
    stage.end(pid)
    wait_until(lambda: stage.events("rank_failed"))
    stage.rank("sleeps", launch="efgh5678")
    wait_until(lambda: "efgh5678" in {each["launch"] for each in stage.events("stalled")})
    assert {pulse.launch for pulse in read_heartbeats(stage.folder())} == {"efgh5678"}
    assert watcher.poll() is None


def test_it_goes_on_when_nobody_reads_what_it_says(stage: Any) -> None:
    stage.rank("sleeps")
    watcher = stage.watcher()
    watcher.stdout.close()
    watcher.send_signal(signal.SIGHUP)
    watcher.send_signal(signal.SIGUSR1)
    assert wait_until(lambda: stage.events("stalled"))
    assert watcher.poll() is None
    stage.started.remove(watcher)
    watcher.kill()
    watcher.wait(120)


def test_a_scheduler_s_signal_to_all_processes_is_only_noted(stage: Any) -> None:
    """Ranks may save for minutes yet: what hangs then is still named, and it ends with the last."""
    rank = stage.rank("sleeps")
    watcher = stage.watcher()
    watcher.send_signal(signal.SIGTERM)
    assert wait_until(lambda: stage.events("stalled"))
    assert watcher.poll() is None
    stage.end(rank)
    assert watcher.wait(120) == 0
    assert "SIGTERM: this ends with the last rank, in 10 minutes" in watcher.stdout.read()


def test_who_waits_for_the_place_ends_with_the_last_rank(stage: Any) -> None:
    """There is nobody left to watch, though the one that holds the place has more to say."""
    lock = WatcherLock(stage.folder())
    assert lock.acquire()
    rank = stage.rank("waits")
    second = stage.watcher(wait=False)
    assert second.poll() is None
    stage.end(rank)  # whether it has seen the rank alive or not
    assert second.wait(50) == 0  # and does not wait the minute in which a rank might appear
    assert stage.events("watcher_started") == []
    lock.release()


def test_the_verb_watches_in_the_foreground_without_torch(stage: Any) -> None:
    command = [sys.executable, "-P", "-m", "longtake", "watch", str(stage.run.path)]
    process = subprocess.Popen(
        command, cwd=stage.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stage.started.append(process)
    assert process.stdout is not None
    assert f"Watching {stage.run.path} on" in process.stdout.readline()
    assert process.stdout.readline() == "No rank of it runs on this node now: this waits for one.\n"
    assert "watcher_started: " in process.stdout.readline()
    assert not any("torch" in each.path for each in psutil.Process(process.pid).memory_maps())
    process.send_signal(signal.SIGTERM)
    assert "ended by SIGTERM" in process.stdout.read()
    assert process.wait(120) == 0
    assert stage.events("watcher_started", socket.gethostname())[0]["by_hand"]
