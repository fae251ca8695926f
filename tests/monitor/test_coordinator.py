"""Requests, dumps of many nodes, and what a person asks for."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until, wait_until_still
from tests.monitor.build import make_dump, make_heartbeat, make_process

from longtake.errors import RunError
from longtake.fsio import write_once
from longtake.heartbeat import HeartbeatWriter, heartbeat_dir
from longtake.monitor.asked import dump_process_tree, dump_run
from longtake.monitor.coordinator import (
    RequestQueue,
    read_dumps,
    run_step,
    stall_request,
    turn_of,
    write_request,
)
from longtake.monitor.dumps import StackInterner, group_processes
from longtake.monitor.observe import Overdue, WatchSettings
from longtake.monitor.reporting import RunDirThread, WatchTarget
from longtake.node_dir import (
    DumpRequest,
    NodeDirectory,
    NodeDump,
    diagnosis_path,
    has_beaten,
    node_heartbeats,
    read_dump,
    request_path,
)
from longtake.run_dir import RunDirectory


def _request(run: RunDirectory, token: str, launch: str = "one", **fields: Any) -> DumpRequest:
    post = WatchTarget(run, WatchSettings(), "gpu1", run.path)
    request = stall_request(post, token, Overdue(make_heartbeat(), 6.0), launch, 7)
    request.update(fields)  # type: ignore[typeddict-item]
    write_once(request_path(run, token), request)
    return request


def test_a_stall_is_called_the_same_on_all_nodes(tmp_path: Path) -> None:
    here, there = (
        RequestQueue(NodeDirectory(RunDirectory(tmp_path), host)) for host in ("gpu1", "gpu2")
    )
    for number in (0, 1):
        token = f"stall_one_00000042_{number}"
        assert here.new_token("one", 42) == there.new_token("one", 42) == token
        for inbox in (here, there):
            inbox.take(token)
    assert here.new_token("one", 43) == "stall_one_00000043_0"
    assert here.new_token("", 0) == "stall_start_00000000_0"


def test_whoever_asks_second_finds_the_first_one_s_request(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = _request(run, "stall_one_00000007_0")
    second: DumpRequest = {**first, "by": "gpu2"}
    assert write_request(run, second)["by"] == "gpu1"
    assert write_request(run, {**second, "token": "stall_one_00000007_1"})["by"] == "gpu2"


def test_new_requests_are_found_once_taken_no_more(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    inbox = RequestQueue(NodeDirectory(run, "gpu1"))
    assert inbox.look("one") == []
    _request(run, "b", time="2026-01-01T00:00:00.000+00:00")
    _request(run, "a", time="2026-01-01T00:00:01.000+00:00")
    (tmp_path / "requests" / ".half").write_text("{")
    (tmp_path / "requests" / "damaged.json").write_text("{")
    for _ in range(2):
        assert [each["token"] for each in inbox.look("one")] == ["b", "a"]
    inbox.take("b")
    assert [each["token"] for each in inbox.look("one")] == ["a"]


def test_what_lay_there_before_is_left_but_for_a_stall_that_is_open(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    _request(run, "asked", reason="asked")
    _request(run, "former", launch="zero")
    _request(run, "judged")
    write_once(diagnosis_path(run, "judged"), {"token": "judged"})
    _request(run, "open")
    inbox = RequestQueue(NodeDirectory(run, "gpu1"))
    assert [each["token"] for each in inbox.look("one")] == ["open"]
    _request(run, "later", launch="zero")
    assert {each["token"] for each in inbox.look("one")} == {"open", "later"}


def test_what_was_asked_just_before_is_answered(tmp_path: Path) -> None:
    """Its asker waits for this watcher already; what was answered, or is older, is left."""
    run = RunDirectory(tmp_path)
    node = NodeDirectory(run, "gpu1")
    for token in ("asked_old", "asked_late", "asked_answered", "stall_former"):
        reason = "stall" if token.startswith("stall") else "asked"
        _request(run, token, launch="zero", reason=reason)
    long_ago = request_path(run, "asked_late").stat().st_mtime - 60.0
    os.utime(request_path(run, "asked_old"), (long_ago, long_ago))
    node.append_event("watcher_started")
    node.dump_path("asked_answered").parent.mkdir()
    node.dump_path("asked_answered").touch()
    assert [each["token"] for each in RequestQueue(node).look("one")] == ["asked_late"]
    # Which launch runs it does not know yet: a stall without a verdict may be this one's.
    tokens = {each["token"] for each in RequestQueue(node).look("")}
    assert tokens == {"asked_late", "stall_former"}


def test_a_decoding_process_speaks_for_its_rank(tmp_path: Path) -> None:
    """It counts windows and knows no launch; the request has the run's step."""
    ranks = [make_heartbeat(step=7), make_heartbeat(rank=1, step=8)]
    worker = make_heartbeat("decode", rank=1, step=300)
    assert (run_step(ranks[0], ranks), run_step(worker, ranks)) == (7, 8)
    assert run_step(make_heartbeat("decode", rank=5), ranks) == 8
    assert run_step(worker, [worker]) == 0
    post = WatchTarget(RunDirectory(tmp_path), WatchSettings(), "gpu1", tmp_path)
    request = stall_request(post, "t", Overdue(worker, 6.0), "one", 8)
    stall = request["stall"]
    assert (stall["step"], stall["launch"], stall["role"]) == (8, "one", "decode")
    assert (stall["host"], stall["limit"], request["by"]) == ("gpu1", 6.0, "gpu1")


def test_a_watcher_lives_if_its_heartbeat_changes(tmp_path: Path) -> None:
    """By its count alone: no clock of another node is compared."""
    run = RunDirectory(tmp_path)
    for host in ("gpu1", "gpu2"):
        NodeDirectory(run, host).write_heartbeat({"pid": 1, "beat": 5})
    before = node_heartbeats(run)
    assert set(before) == {"gpu1", "gpu2"}
    assert not has_beaten(before["gpu2"], node_heartbeats(run)["gpu2"])
    NodeDirectory(run, "gpu2").write_heartbeat({"pid": 1, "beat": 6})
    assert has_beaten(before["gpu2"], node_heartbeats(run)["gpu2"])
    assert has_beaten(None, before["gpu2"])
    assert not has_beaten(before["gpu2"], None)


def test_nodes_conclude_in_turn() -> None:
    """First who asked, then those with a dump by name; one whose dump is not written comes last."""
    answered = ["gpu1", "gpu2", "gpu3"]
    assert [turn_of(host, "gpu2", answered) for host in (*answered, "gpu4")] == [1, 0, 2, 3]
    assert turn_of("gpu1", "gpu9", answered) == 1


def _dump(host: str, line: int = 1, native: str = "") -> NodeDump:
    calls = [(native, "libc.so.6", 0)] if native else []
    return make_dump([make_process(1, 0, [*calls, ("f", "decode.py", line)], "forward")], host=host)


def _frames(dump: NodeDump) -> Any:
    return dump["rounds"][0]["processes"][0]["threads"][0]["frames"]


def test_identical_stacks_are_kept_once() -> None:
    """Those that differ in a line, or in the calls of C alone, are not taken for one another."""
    shelf = StackInterner()
    first, same = shelf.intern(_dump("a")), shelf.intern(_dump("b"))
    assert _frames(first) is _frames(same)
    for other in (_dump("c", line=2), _dump("d", native="read"), _dump("e", native="futex")):
        before = [dict(frame) for frame in _frames(other)]
        assert _frames(shelf.intern(other)) == before


def test_what_is_read_when_time_is_up_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    nodes = [NodeDirectory(run, f"gpu{number}") for number in range(1, 5)]
    for node in nodes[:3]:
        node.write_dump(_dump(node.host))
    nodes[3].path.mkdir()  # it has not answered
    disk = RunDirThread(nodes[0])
    dumps, unread = read_dumps(disk, "t")
    assert ([dump["host"] for dump in dumps], unread) == (["gpu1", "gpu2", "gpu3"], [])
    assert _frames(dumps[0]) is _frames(dumps[2])
    is_over, clock = threading.Event(), [0.0]

    def read(path: Path) -> NodeDump | None:  # a disk that does not answer for one file
        clock[0] = 3.0  # of 3.15 s
        if path == nodes[1].dump_path("t"):
            is_over.wait(600)
        return read_dump(path)

    monkeypatch.setattr("longtake.node_dir.read_dump", read)
    monkeypatch.setattr("longtake.monitor.coordinator.time.monotonic", lambda: clock[0])
    try:
        dumps, unread = read_dumps(disk, "t")
        again = read_dumps(disk, "t")
    finally:
        is_over.set()
        disk.close(5.0)
    assert ([dump["host"] for dump in dumps], unread) == (["gpu1"], ["gpu2", "gpu3"])
    assert again == ([], [])  # the disk was silent still


def test_an_answer_that_is_no_dump_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    nodes = [NodeDirectory(run, f"gpu{number}") for number in range(1, 5)]
    for node in nodes:
        node.write_dump(_dump(node.host))
    nodes[0].dump_path("t").write_text('{"rounds": []}')
    nodes[1].dump_path("t").write_text("[]")
    text = nodes[2].dump_path("t").read_text()
    nodes[2].dump_path("t").write_text(text.replace('"line":1', '"line":"one"'))
    disk = RunDirThread(nodes[0])
    dumps, unread = read_dumps(disk, "t")
    disk.close(5.0)
    assert ([dump["host"] for dump in dumps], unread) == (["gpu4"], [])


Stage = Any
"""Plays a run: see conftest.py."""
pytestmark = pytest.mark.usefixtures("patient_dumps")


@pytest.fixture
def run(stage: Stage) -> Iterator[RunDirectory]:
    run: RunDirectory = stage.run
    run.recipe_path.touch()
    yield run
    shutil.rmtree(heartbeat_dir(run.path), ignore_errors=True)


def _watched(stage: Stage, *hosts: str) -> list[Any]:
    watchers = []
    for rank, host in enumerate(hosts):
        stage.rank("waits", rank, host)
        watchers.append(stage.watcher(host=host, min_seconds=100.0, max_seconds=100.0))
    wait_until(lambda: all(stage.node(host).read_heartbeat() for host in hosts))
    first = [stage.node(host).read_heartbeat()["beat"] for host in hosts]
    # A request that is there before a watcher's first look is none for it.
    wait_until(lambda: not _beats(stage, hosts) & set(zip(hosts, first, strict=True)))
    return watchers


def _beats(stage: Stage, hosts: Sequence[str]) -> set[tuple[str, int]]:
    return {(host, stage.node(host).read_heartbeat()["beat"]) for host in hosts}


def _hearts_here(run: RunDirectory) -> HeartbeatWriter:
    heart = HeartbeatWriter(heartbeat_dir(run.path), "rank", rank=4)
    heart.set_launch("abcdefgh")
    heart.set_phase("forward")
    return heart


def test_every_node_with_a_watcher_answers(
    stage: Stage, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("coordinator._ALIVE_SECONDS", "asked._ASKED_SECONDS"):
        monkeypatch.setattr(f"longtake.monitor.{name}", 120.0)
    _watched(stage, "gpu1", "gpu2")
    answers = dump_run(run, native=False)
    facts = group_processes(answers.dumps())
    assert (facts["hosts"], answers.silent) == (["gpu1", "gpu2"], ())
    ranks = [each for each in facts["groups"] if each["role"] == "rank"]
    assert [each["count"] for each in ranks] == [2]
    assert [each["host"] for each in ranks[0]["members"]] == ["gpu1", "gpu2"]
    assert [path.parent.parent.name for path in answers.files] == ["gpu1", "gpu2"]


def test_a_node_whose_watcher_does_not_live_is_not_waited_for(
    stage: Stage, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("coordinator._ALIVE_SECONDS", "asked._ASKED_SECONDS"):
        monkeypatch.setattr(f"longtake.monitor.{name}", 120.0)
    _, frozen = _watched(stage, "gpu1", "gpu2")
    os.kill(frozen.pid, signal.SIGSTOP)
    wait_until_still(frozen.pid)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(dump_run, run, native=False)
        wait_until(lambda: list(stage.node("gpu1").path.glob("stacks/asked_*.json")))
        monkeypatch.setattr("longtake.monitor.coordinator._ALIVE_SECONDS", 0.0)
        answers = asked.result()
    assert group_processes(answers.dumps())["hosts"] == ["gpu1"]
    assert answers.silent == ()


def test_a_watcher_that_lives_and_does_not_answer_is_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeDirectory(run, "gpu1")
    node.write_heartbeat({"pid": 1, "beat": 0})

    def write(path: Path, record: Any) -> bool:
        node.write_heartbeat({"pid": 1, "beat": 1})
        return write_once(path, record)

    monkeypatch.setattr("longtake.monitor.coordinator._ALIVE_SECONDS", -1.0)
    monkeypatch.setattr("longtake.monitor.asked._ASKED_SECONDS", 0.0)
    monkeypatch.setattr("longtake.monitor.asked.write_once", write)
    answers = dump_run(run, native=False)
    assert answers.silent == ("gpu1",)
    assert (answers.files, answers.own) == ((), None)


def test_without_a_watcher_this_nodes_processes_are_read(run: RunDirectory) -> None:
    """Also where the run directory cannot be written."""
    (run.path / "requests").write_text("not a folder")
    heart = _hearts_here(run)
    facts = group_processes(dump_run(run, native=False).dumps())
    assert (facts["hosts"], facts["launch"]) == ([socket.gethostname()], "abcdefgh")
    [rank] = [each for each in facts["groups"] if each["role"] == "rank"]
    assert [(each["pid"], each["rank"]) for each in rank["members"]] == [(os.getpid(), 4)]
    assert rank["stack"]
    heart.close()


def test_nobody_is_there(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"No process of .* runs: .*longtake show"):
        dump_run(run, native=False)


def test_a_process_that_cannot_be_asked() -> None:
    process = subprocess.Popen(["true"])
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z")
    with pytest.raises(RunError, match=f"has ended; its parent, {os.getpid()}, has not reaped it"):
        dump_process_tree(process.pid, native=False)
    process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_users_process_is_not_asked() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        os.seteuid(65534)
        try:
            with pytest.raises(RunError, match=r"belongs to root, and this is nobody: .*by root"):
                dump_process_tree(process.pid, native=False)
        finally:
            os.seteuid(0)
            process.kill()
