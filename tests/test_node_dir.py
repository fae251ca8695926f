"""What watchers keep in a run directory: who reads it sees whole records, in order."""

import threading
from pathlib import Path

from longtake.fsio import append_json, read_json, write_once
from longtake.node_dir import (
    DumpRequest,
    NodeDirectory,
    all_nodes,
    diagnosis_path,
    read_events,
    request_path,
)
from longtake.run_dir import RunDirectory


def test_of_many_who_write_once_one_succeeds(tmp_path: Path) -> None:
    path = diagnosis_path(RunDirectory(tmp_path), "stall_1")
    won: list[int] = []

    def write(number: int) -> None:
        if write_once(path, {"by": number}):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert f'"by": {won[0]}' in path.read_text()
    assert list(path.parent.iterdir()) == [path]


def test_nodes_are_counted_as_people_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for host in ("gpu10", "gpu2", "head"):
        NodeDirectory(run, host).append_event("watcher_started")
    assert [node.host for node in all_nodes(run)] == ["gpu2", "gpu10", "head"]
    assert all_nodes(RunDirectory(tmp_path / "none")) == []


def test_events_of_run_and_nodes_are_one_story(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    append_json(run.events_path, {"time": "2026-01-01T00:00:01", "event": "launched"})
    append_json(run.events_path, {"time": "2026-01-01T00:00:05", "event": "finished"})
    node = NodeDirectory(run, "gpu1")
    node.path.mkdir(parents=True)
    append_json(node.events_path, {"time": "2026-01-01T00:00:03", "event": "stalled"})
    with node.events_path.open("a") as file:
        file.write('{"time": "2026-01-')
    assert [event["event"] for event in read_events(run)] == ["launched", "stalled", "finished"]


def test_requests_and_answers_meet_by_their_token(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    request = DumpRequest(
        token="asked_1",
        time="2026",
        by="here",
        reason="asked",
        rounds=2,
        native=False,
    )
    assert write_once(request_path(run, "asked_1"), request)
    assert not write_once(request_path(run, "asked_1"), request)
    assert read_json(request_path(run, "asked_1")) == dict(request)
    for host, token in (("gpu1", "asked_1"), ("gpu2", "asked_0")):
        NodeDirectory(run, host).write_dump(
            {
                "token": token,
                "time": "2026",
                "host": host,
                "reason": "asked",
                "launch": "",
                "rounds": [],
                "missing": [],
            }
        )
    answers = [read_json(node.dump_path("asked_1")) for node in all_nodes(run)]
    assert [answer.get("host") for answer in answers] == ["gpu1", None]
