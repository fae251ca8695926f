"""Dumps of all processes of a node: who belongs, rounds, old files."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.build import wait_until
from tests.monitor.build import make_dump, make_heartbeat, make_process, make_thread

from longtake import heartbeat, stacks
from longtake.fsio import write_once
from longtake.heartbeat import read_heartbeats
from longtake.monitor import dumps
from longtake.monitor.asked import dump_process_tree
from longtake.monitor.dumps import (
    EarlyRounds,
    ProcessTrace,
    dump_node,
    prune_dumps,
    prune_requests,
    traces,
)
from longtake.monitor.observe import has_moved
from longtake.node_dir import NodeDirectory, NodeDump, ProcessDump, request_path
from longtake.run_dir import RunDirectory
from longtake.stacks import descendants

pytestmark = pytest.mark.usefixtures("patient_dumps")

_PYTHON = sys.executable


def _dump(folder: Path, rounds: int = 1, **wanted: Any) -> NodeDump:
    given = {"round_seconds": 0.3, "native": False, "reason": "stall", **wanted}
    seconds, early = given.pop("round_seconds"), given.pop("early", ())
    names = {"token": "stall_x_00000001_0", "time": "", "by": "here"}
    request: Any = {**names, "rounds": rounds, **given}
    return dump_node(folder, "here", request, seconds, early)


def _by_pid(dump: NodeDump) -> dict[int, ProcessDump]:
    return {each["pid"]: each for each in dump["rounds"][-1]["processes"]}


def _traced(dump: NodeDump) -> dict[int, ProcessTrace]:
    return {each.pid: each for each in traces([dump])}


def _innermost(process: ProcessDump) -> tuple[str, str]:
    frame = process["threads"][0]["frames"][0]
    return Path(frame["file"]).name, frame["function"]


def test_every_process_is_found_and_says_where_it_is(stage: Any) -> None:
    rank = stage.rank("sleeps", 3, child=("sleep", "600"))
    worker = stage.worker("holds", 3)
    [helper] = descendants(rank)
    dump = _dump(stage.folder())
    assert (dump["host"], dump["token"], dump["reason"]) == ("here", "stall_x_00000001_0", "stall")
    assert (dump["launch"], dump["missing"]) == ("abcd1234", [])
    found = _by_pid(dump)
    roles = {pid: (each["role"], each["rank"]) for pid, each in found.items()}
    assert roles == {rank: ("rank", 3), worker: ("decode", 3), helper: ("helper", 3)}
    assert _innermost(found[rank]) == ("beating.py", "sleeps")
    assert _innermost(found[worker]) == ("beating.py", "holds")
    assert found[worker]["threads"][0]["has_gil"]
    heart = found[worker]["heartbeat"]
    assert heart
    assert (heart["phase"], heart["detail"]) == ("decode", "bad")
    assert heart["path_of_clip"] == "/data/bad.mp4"
    assert found[helper]["command"] == "sleep 600"
    assert (found[helper]["heartbeat"], found[helper]["threads"]) == (None, [])
    assert "wchan" in found[helper]["raw"]
    assert {found[pid]["method"] for pid in (rank, worker)} == {"py-spy --nonblocking"}
    assert json.loads(json.dumps(dump)) == dump
    [tree] = dump_process_tree(rank, native=False).dumps()
    assert list(_by_pid(tree)) == [rank, helper]
    assert _innermost(_by_pid(tree)[rank]) == ("beating.py", "sleeps")


def test_rounds_tell_who_moves(stage: Any) -> None:
    works, stopped = stage.rank("steps", 0), stage.rank("sleeps", 1)
    wait_until(lambda: stacks.dump_process(stopped, native=False).where.endswith("in sleeps"))
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: stacks.state_of(stopped) == "T")
    dump = _dump(stage.folder(), rounds=3, round_seconds=1.0)
    assert all(each["seconds"] >= number for number, each in enumerate(dump["rounds"]))
    found = _traced(dump)
    assert found[works].has_moved
    assert not found[stopped].has_moved
    assert found[stopped].last["state"] == stacks.state_of(stopped) == "T"
    assert found[stopped].stack[0][0] == "sleeps"


def test_early_rounds_count_only_if_no_rank_has_begun_a_phase_since(stage: Any) -> None:
    rank = stage.rank("pauses")
    early = EarlyRounds(stage.folder(), rounds=3, round_seconds=0.0)
    for _ in range(3):
        early.collect()
    dump = _dump(stage.folder(), rounds=3, round_seconds=0.0, early=early.take(None))
    assert [bool(each["seconds"]) for each in dump["rounds"]] == [False, True, True]
    assert not _traced(dump)[rank].has_moved
    assert early.take(None) == []  # they count once
    early.collect()
    (before,) = read_heartbeats(stage.folder())
    os.kill(rank, signal.SIGUSR1)
    wait_until(lambda: has_moved(before, read_heartbeats(stage.folder())[0]))
    assert early.take(None) == []


def test_of_a_stall_only_those_that_hang_are_read_with_calls_of_c(stage: Any) -> None:
    """They are paused for it; whoever works or has nothing to do is not."""
    hangs, works = stage.rank("sleeps", 0), stage.rank("steps", 1)
    idles = stage.worker("idles", 0)
    found = _by_pid(_dump(stage.folder(), rounds=2, native=True))
    assert _innermost(found[hangs]) == ("libc.so.6", "clock_nanosleep")
    methods = [found[pid]["method"] for pid in (hangs, works, idles)]
    assert methods == ["py-spy --native", "py-spy --nonblocking", "py-spy --nonblocking"]
    asked = _by_pid(_dump(stage.folder(), native=True, reason="asked"))
    assert asked[idles]["method"] == "py-spy --native"


def test_without_py_spy_processes_write_themselves(
    stage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank to its file, a decoding process to what its pool reads; of others /proc tells."""
    rank = stage.rank("holds", child=("sleep", "600"))
    worker, [helper] = stage.worker("sleeps", 0), descendants(rank)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = _by_pid(_dump(stage.folder()))
    methods = [found[pid]["method"] for pid in (rank, worker, helper)]
    assert methods == ["faulthandler", "faulthandler", "proc"]
    assert _innermost(found[rank]) == ("beating.py", "holds")
    assert _innermost(found[worker]) == ("beating.py", "sleeps")


def test_whoever_watches_is_not_dumped(stage: Any) -> None:
    """A watcher is a rank's child, and starts others in its turn; so does py-spy."""
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    rank = stage.rank("sleeps", child=(_PYTHON, "-c", program, "-m", "longtake.monitor"))
    wait_until(lambda: len(descendants(rank)) == 2)
    assert list(_by_pid(_dump(stage.folder()))) == [rank]


def test_torchruns_process_belongs_to_the_run(stage: Any, tmp_path: Path) -> None:
    """By its name, as a rank's parent; and a rank that has no heart yet, as what it has started."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        "import subprocess, sys\nsubprocess.Popen(['sleep', '600'])\nsubprocess.run(sys.argv[1:])\n"
    )
    agent = stage.rank("sleeps", 1, by=(_PYTHON, str(torchrun)))
    found = _by_pid(_dump(stage.folder()))
    assert sorted((each["role"], each["rank"]) for each in found.values() if each["rank"]) == [
        ("rank", 1)
    ]
    assert (found[agent]["role"], found[agent]["rank"]) == ("agent", None)
    assert [each["command"] for each in found.values() if each["role"] == "helper"] == ["sleep 600"]


def test_whoever_is_gone_is_missed(stage: Any) -> None:
    """Not one that ended as it should, had nothing to do, or is of a launch before this one."""
    stage.rank("sleeps", 0)
    dead, idle = stage.worker("sleeps", 0), stage.worker("idles", 0)
    stage.end(stage.rank("sleeps", 5, launch="earlier."))
    for pid in (dead, idle):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: {stacks.state_of(pid) for pid in (dead, idle)} == {"Z"})
    found = _dump(stage.folder())
    assert [(each["pid"], each["detail"]) for each in found["missing"]] == [(dead, "bad")]
    assert len(_by_pid(found)) == 1


def test_a_rank_that_ends_while_pages_are_read_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages are read before it is seen which processes are gone."""
    pages = [make_heartbeat(pid=2**22 + number) for number in (1, 2)]  # above the kernel's pid_max
    last = {pages[0].path: replace(pages[0], phase="ended"), pages[1].path: None}
    monkeypatch.setattr(dumps, "read_heartbeats", lambda folder: pages)
    monkeypatch.setattr(heartbeat, "read_heartbeat", last.get)
    assert [each["pid"] for each in _dump(Path(), 0)["missing"]] == [pages[1].pid]


_CALL, _CALLER = ("f", "a.py", 2), ("main", "a.py", 1)


@pytest.mark.parametrize(
    "later",
    [{"phase": "backward"}, {"step": 6}, {"steps_done": 6}, {"detail": "b"}, {"seconds": 0.2}],
    ids=str,
)
def test_a_heart_that_went_on_has_moved(later: dict[str, Any]) -> None:
    """Though it is in the same place again: in another phase, step or clip, or in it anew."""
    still = make_process(7, 0, [_CALL], "forward", seconds=2.5)
    went_on: Any = {**still, "heartbeat": {**(still["heartbeat"] or {}), **later}}
    assert [each.has_moved for each in traces([make_dump([still], [still])])] == [False]
    assert [each.has_moved for each in traces([make_dump([still], [went_on])])] == [True]


def test_a_round_without_stacks_says_nothing() -> None:
    unread = make_process(7, 0, [], "forward")
    decoding = make_thread("decoding", [_CALLER])
    read = make_process(7, 0, [_CALL, _CALLER], "forward", threads=[decoding])
    [found] = traces([make_dump([read], [unread])])
    assert (found.stack, found.has_moved) == ((_CALL, _CALLER), False)
    assert found.stacks_of("decoding") == [(_CALLER,)]
    [found] = traces([make_dump([unread], [unread])])
    assert (found.stack, found.has_moved) == ((), False)


def _at(path: Path, moment: float) -> None:
    os.utime(path, (moment, moment))


def test_the_newest_answers_stay(tmp_path: Path) -> None:
    node = NodeDirectory(RunDirectory(tmp_path), "gpu1")
    folder = node.dump_path("x").parent
    folder.mkdir(parents=True)
    theirs = {"2026-01-01T00-00-00_worker_7.json", "2026-01-01T00-00-00_worker_7.txt"}
    for name in theirs:
        (folder / name).touch()
        _at(folder / name, 1.0)
    tokens = [f"stall_one_0000000{number}_0" for number in range(3)] + ["asked_1", "asked_2"]
    for number, token in enumerate(tokens):
        node.dump_path(token).touch()
        node.flight_path(token).mkdir()
        (node.flight_path(token) / "rank_0").touch()
        for path in (node.dump_path(token), node.flight_path(token)):
            _at(path, 100.0 + number)
    prune_dumps(node, most=3)
    kept = {f"{token}{suffix}" for token in tokens[2:] for suffix in (".json", ".fr")}
    assert {path.name for path in folder.iterdir()} == kept | theirs
    prune_dumps(NodeDirectory(RunDirectory(tmp_path), "gpu2"))  # that has no folder


def test_requests_of_days_ago_go(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    prune_requests(run, "one")  # there is no folder
    for name, launch, days in (
        ("old", "zero", 3.9),
        ("ours", "one", 3.9),
        ("recent", "zero", 5.0),
        ("asked", "", 3.9),
    ):
        stall = {"stall": {"launch": launch}} if launch else {}
        write_once(request_path(run, name), {"token": name, **stall})
        _at(request_path(run, name), days * 86400.0)
    prune_requests(run, "one")
    names = {path.stem for path in (tmp_path / "requests").iterdir()}
    assert names == {"recent", "ours"}
