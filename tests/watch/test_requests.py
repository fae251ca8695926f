"""Requests: their names, and who answers which."""

import os
from pathlib import Path
from typing import Any

from longtake.config import WatchSection
from longtake.fsio import write_once
from longtake.heartbeat import Pulse, Role
from longtake.node_dir import (
    NodeDirectory,
    Request,
    has_beaten,
    read_heartbeats,
    request_path,
    verdict_path,
)
from longtake.run_dir import RunDirectory
from longtake.watch.post import Lock, Post
from longtake.watch.requests import (
    Inbox,
    ask,
    request_for,
    step_of,
    token_of,
)
from longtake.watch.stall import Overdue


def _pulse(role: Role = "rank", rank: int = 0, step: int = 7) -> Pulse:
    where = (Path(f"{role}_{rank}"), role, 11, 11, rank, rank, 2, "one" if role == "rank" else "")
    return Pulse(*where, step, 7, "forward", 8.0, "", "", True, {}, 0.0, 0)


def _request(run: RunDirectory, token: str, launch: str = "one", **fields: Any) -> Request:
    post = Post(run, WatchSection(), "gpu1", run.path)
    request = request_for(post, token, Overdue(_pulse(), 6.0), launch, 7)
    request.update(fields)  # type: ignore[typeddict-item]
    write_once(request_path(run, token), request)
    return request


def test_a_stall_is_called_the_same_on_all_nodes(tmp_path: Path) -> None:
    """By launch and step, and by how many there were: two inboxes agree."""
    assert token_of("one", 42, 0) == "stall_one_00000042_0"
    assert token_of("", 0, 1) == "stall_start_00000000_1"
    here, there = (Inbox(NodeDirectory(RunDirectory(tmp_path), host)) for host in ("gpu1", "gpu2"))
    assert here.new_token("one", 42) == there.new_token("one", 42) == token_of("one", 42, 0)
    for inbox in (here, there):
        inbox.take(token_of("one", 42, 0))
    assert here.new_token("one", 42) == there.new_token("one", 42) == token_of("one", 42, 1)
    assert here.new_token("one", 43) == token_of("one", 43, 0)


def test_whoever_asks_second_finds_the_first_one_s_request(tmp_path: Path) -> None:
    """Of two nodes that ask for the same at once one becomes the asker."""
    run = RunDirectory(tmp_path)
    first = _request(run, "stall_one_00000007_0")
    second: Request = {**first, "by": "gpu2"}
    assert ask(run, second)["by"] == "gpu1"
    assert ask(run, {**second, "token": "stall_one_00000007_1"})["by"] == "gpu2"


def test_new_requests_are_found_once_taken_no_more(tmp_path: Path) -> None:
    """Until they are taken they are found at each look, the oldest first."""
    run = RunDirectory(tmp_path)
    inbox = Inbox(NodeDirectory(run, "gpu1"))
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
    """A watcher that is started in the middle of a stall takes part in it."""
    run = RunDirectory(tmp_path)
    _request(run, "asked", reason="asked")
    _request(run, "former", launch="zero")
    _request(run, "judged")
    write_once(verdict_path(run, "judged"), {"token": "judged"})
    _request(run, "open")
    inbox = Inbox(NodeDirectory(run, "gpu1"))
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
    node.append_event("watching")
    node.dump_path("asked_answered").parent.mkdir()
    node.dump_path("asked_answered").touch()
    assert [each["token"] for each in Inbox(node).look("one")] == ["asked_late"]
    # Which launch runs it does not know yet: a stall without a verdict may be this one's.
    tokens = {each["token"] for each in Inbox(node).look("")}
    assert tokens == {"asked_late", "stall_former"}


def test_a_decoding_process_speaks_for_its_rank(tmp_path: Path) -> None:
    """It counts windows and knows no launch; the request has the run's step."""
    ranks = [_pulse(step=7), _pulse(rank=1, step=8)]
    worker = _pulse("decode", rank=1, step=300)
    assert (step_of(ranks[0], ranks), step_of(worker, ranks)) == (7, 8)
    assert step_of(_pulse("decode", rank=5), ranks) == 8
    assert step_of(worker, [worker]) == 0
    post = Post(RunDirectory(tmp_path), WatchSection(), "gpu1", tmp_path)
    request = request_for(post, "t", Overdue(worker, 6.0), "one", 8)
    stall = request["stall"]
    assert (stall["step"], stall["launch"], stall["role"]) == (8, "one", "decode")
    assert (stall["host"], stall["limit"], request["by"]) == ("gpu1", 6.0, "gpu1")


def test_a_watcher_lives_if_its_heartbeat_changes(tmp_path: Path) -> None:
    """By its count alone: no clock of another node is compared."""
    run = RunDirectory(tmp_path)
    for host in ("gpu1", "gpu2"):
        NodeDirectory(run, host).write_heartbeat({"pid": 1, "beat": 5})
    before = read_heartbeats(run)
    assert set(before) == {"gpu1", "gpu2"}
    assert not has_beaten(before["gpu2"], read_heartbeats(run)["gpu2"])
    NodeDirectory(run, "gpu2").write_heartbeat({"pid": 1, "beat": 6})
    assert has_beaten(before["gpu2"], read_heartbeats(run)["gpu2"])
    assert has_beaten(None, before["gpu2"])
    assert not has_beaten(before["gpu2"], None)


def test_one_watches_at_a_time(tmp_path: Path) -> None:
    """The next one can, when the first has given back the lock; and says who holds it."""
    first, second = Lock(tmp_path / "hearts"), Lock(tmp_path / "hearts")
    assert first.take()
    assert not second.take()
    assert second.holder() == str(os.getpid())
    first.give_back()
    assert second.take()
    second.give_back()
    assert not (tmp_path / "hearts").exists()
