"""Records of watchers in a run directory: readers see whole records, in order."""

from pathlib import Path

from longtake.fsio import append_json
from longtake.node_dir import (
    NodeDirectory,
    all_nodes,
    read_events,
)
from longtake.run_dir import RunDirectory


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
