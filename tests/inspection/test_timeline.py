"""Marks of what happened, and where the hours of a run went."""

import json
import random
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.build import bare_recipe, make_row
from tests.fuzz.mutations import damage_json, damage_lines

from longtake import fsio
from longtake.errors import LongtakeError, RecordError
from longtake.inspection.rows import read_rows
from longtake.inspection.series import SERIES, abandoned_branches, read_series
from longtake.inspection.timeline import (
    PARTS,
    Mark,
    goodput,
    share_of_training,
    timeline,
)
from longtake.run_dir import RunDirectory

_BEGIN = 1_800_000_000.0


class Writer:
    """Writes metrics and events with the times that it is given, in seconds after `_BEGIN`."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.run = RunDirectory(path)
        self.run.create(bare_recipe(path))

    def event(self, time: float, event: str, /, path: Path | None = None, **facts: Any) -> None:
        when = datetime.fromtimestamp(_BEGIN + time, UTC).isoformat()
        path = path or self.run.events_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"time": when, "event": event, **facts}) + "\n")

    def node_event(self, time: float, event: str, /, **facts: Any) -> None:
        path = self.run.path / "nodes" / "vm" / "events.jsonl"
        self.event(time, event, path, host="vm", **facts)

    def started(self, time: float, step: int, total: float) -> None:
        facts: dict[str, Any] = {"seconds": {}, "slowest": {}, "down_seconds": None}
        self.event(time, "startup_timing", step=step, total=total, **facts)

    def step(self, step: int, time: float, seconds: float = 1.0, **more: Any) -> None:
        times = {"step_seconds": seconds, "data_seconds": 0.25, "time": _BEGIN + time}
        self.run.append_metrics(make_row(step, batch=step - 1, **times, **more))

    def marks(self) -> list[Mark]:
        return timeline(self.run, read_rows(self.run))

    def parts(self) -> dict[str, float]:
        """Those that are not 0."""
        found = goodput(self.run, read_rows(self.run))
        assert tuple(each.part for each in found) == PARTS
        return {part: seconds for part, seconds in found if seconds}


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "run")


def test_marks_of_a_run_that_skipped_and_went_back(told: RunDirectory) -> None:
    marks = [
        each for each in timeline(told, read_rows(told)) if each.kind not in ("epoch", "checkpoint")
    ]
    assert [(each.step, each.kind, each.lane, each.level) for each in marks] == [
        (0, "launch", "launches", "info"),
        (1, "stage", "stages", "info"),
        (9, "skip", "guard", "warn"),
        (20, "spike", "guard", "warn"),
        (20, "rollback", "guard", "error"),
        (24, "end", "launches", "info"),
    ]
    rollback = marks[4]
    assert rollback.span == (12, 20)
    assert rollback.text.startswith("went back from step 20 to the checkpoint of step 12")
    assert all(each.time is not None and each.count == 1 for each in marks)


def test_marks_of_nodes_and_launches(writer: Writer) -> None:
    writer.event(0, "launched", step=0, world_size=2, device="cuda")
    for step in range(1, 10):
        writer.step(step, step)
    failed: dict[str, Any] = {"rank": 1, "world_size": 2, "launch": "a", "pid": 7}
    failed |= {"phase": "forward", "kind": "killed", "error": "killed by SIGKILL", "step": 9}
    for source in ("watcher", "launcher"):
        writer.node_event(10, "rank_failed", **failed, source=source)
    writer.node_event(5.5, "disk_full", message="the disk is full")
    sentence = "rank 0 waits for a clip"
    writer.node_event(7.5, "stalled", launch="a", token="t", step=6, sentence=sentence)
    writer.node_event(8, "stall_cleared", token="t", seconds=120.0)
    writer.event(20, "resumed", step=5, lost_steps=4, world_size=2, device="cuda")
    writer.event(21, "data_changed", step=5, changes="6 clips added")
    servers = writer.run.path / "evaluations" / "servers" / "s" / "events.jsonl"
    writer.event(30, "drift_alert", servers, step=5, message="brightness rose")
    writer.event(31, "something_new", step=5)
    seconds = {"1": 0.1875, "2": 0.586}
    writer.event(32, "threads_chosen", step=8, threads=1, before=2, seconds=seconds, bitwise=True)
    marks = [(each.step, each.kind, each.text, each.span) for each in writer.marks()]
    resumed = "resumed at step 5: world size 2, device cuda"
    assert marks == [
        (0, "launch", "launched at step 0: world size 2, device cuda", None),
        (5, "restart", f"{resumed}; 4 steps had not been saved", (6, 9)),
        (5, "data", "data changed at step 5: changes 6 clips added", None),
        (5, "drift", "drift alert at step 5: message brightness rose", None),
        (6, "disk", "disk full on vm: the disk is full", None),
        (7, "stall", "stalled for 2 min 0 s on vm: rank 0 waits for a clip", None),
        (8, "threads", "step 8: computed by 1 thread (0.188 s with 1, 0.586 s with 2)", None),
        (10, "failure", "rank failed on vm: rank 1 (phase forward): killed by SIGKILL", None),
    ]


def test_many_marks_of_a_kind_become_few(writer: Writer) -> None:
    writer.step(1, 1)
    skipped: dict[str, Any] = {"verdict": "skip", "reason": "spike", "message": "The loss is high"}
    for step in range(1, 3001):
        writer.event(step, "update_skipped", step=step - 1, **skipped)
    writer.event(9, "stage", step=0, stage="all")
    marks = writer.marks()
    skips = [each for each in marks if each.kind == "skip"]
    assert len(marks) == len(skips) + 1 == 201
    assert sum(each.count for each in skips) == 3000
    assert skips[0].span == (1, 15)
    assert skips[0].text == "15 times from step 1 to 15; the first: step 1: skip: The loss is high"
    assert skips[-1].span == (2986, 3000)


def test_seconds_of_a_run_that_crashed_and_went_back_add_up(writer: Writer) -> None:
    writer.event(10, "launched", step=0)
    writer.step(1, 14, 1.5)  # 0.5 more than usual: still starting
    writer.started(14, 1, 14)  # processes began at 0
    for step in range(2, 6):
        writer.step(step, 13 + step)
    writer.event(18, "checkpoint", step=5)
    writer.step(6, 21, 3.0)  # waited 2 s for the save
    writer.step(7, 22)
    writer.node_event(30, "stalled", step=7, token="t")
    # 18 s later the next launch's processes begin.
    writer.event(50, "resumed", step=5, lost_steps=2)
    writer.step(6, 52)
    writer.started(52, 6, 4)
    writer.step(7, 53)
    writer.event(58, "sampled", step=7, preset="small", seconds=5.0)
    writer.step(8, 59)
    writer.step(9, 60, verdict="roll_back")
    rolled_back = {"from_step": 9, "to_step": 7, "skipped": [7, 9], "reason": "spike"}
    when = datetime.fromtimestamp(_BEGIN + 60, UTC).isoformat()
    writer.run.append_rollback({"time": when, **rolled_back, "message": ""})  # type: ignore[typeddict-item]
    writer.event(61, "rolled_back", step=7, from_step=9, skipped=[7, 9], reason="", message="")
    writer.step(8, 64, 4.0)  # loaded the checkpoint
    writer.step(9, 65)
    writer.event(67, "finished", step=9)
    parts = writer.parts()
    assert parts == pytest.approx(
        {
            "training": 9 * 0.75,
            "waiting for data": 9 * 0.25,
            "saving": 2,  # at the end
            "sampling": 5,
            "starting": 12.5 + 0.5 + 3,
            "trained again": 4,  # with the wait for the save
            "rolled back": 2 + 3,
            "stuck": 8,
            "down": 18,
        }
    )
    assert sum(parts.values()) == pytest.approx(67)
    assert share_of_training(goodput(writer.run, read_rows(writer.run))) == pytest.approx(
        9 * 0.75 / 67
    )


def test_a_stall_that_ended_is_not_training(writer: Writer) -> None:
    writer.event(0, "launched", step=0)
    for step, (time, seconds) in enumerate([(1, 1.0), (2, 1.0), (103, 101.0), (104, 1.0)], 1):
        writer.step(step, time, seconds)
    writer.node_event(30, "stalled", step=2, token="t")
    writer.node_event(103, "stall_cleared", token="t", seconds=100.0)
    assert writer.parts() == {"training": 3.0, "waiting for data": 1.0, "stuck": 100.0}


def test_a_launch_without_steps_is_starting_and_the_rest_is_named_other(writer: Writer) -> None:
    assert writer.parts() == {}
    assert share_of_training(goodput(writer.run, read_rows(writer.run))) is None
    writer.event(0, "launched", step=0)
    writer.event(8, "interrupted", step=0)
    assert writer.parts() == {"starting": 8.0}
    writer.event(10, "launched", step=0)
    writer.step(1, 12)
    writer.step(2, 22)  # of 10 seconds, only 1 is the step's
    steps = {"training": 1.5, "waiting for data": 0.5}
    assert writer.parts() == {**steps, "starting": 9.0, "down": 2.0, "other": 9.0}
    writer.run.events_path.unlink()
    writer.run.metrics_path.unlink()
    writer.step(1, 1)
    writer.step(2, 2)
    assert writer.parts() == steps  # without events they are a launch


def test_a_clock_that_was_set_back_loses_no_seconds(writer: Writer) -> None:
    writer.event(3600, "launched", step=0)
    for step in range(1, 11):
        writer.step(step, 3600 + step if step < 5 else step)
    parts = writer.parts()
    assert parts["training"] == 7.5
    assert parts["waiting for data"] == 2.5


def test_a_save_without_its_step_counts_for_none(told: RunDirectory) -> None:
    before = goodput(told, read_rows(told))
    (*_, last) = fsio.read_json_lines(told.events_path)
    fsio.append_json(told.events_path, {"time": last["time"], "event": "checkpoint"})
    assert goodput(told, read_rows(told)) == before


def test_a_real_run_adds_up(told: RunDirectory) -> None:
    events = told.events()
    first, last = (datetime.fromisoformat(events[place]["time"]) for place in (0, -1))
    parts = dict(goodput(told, read_rows(told)))
    assert parts["rolled back"] > 0
    assert sum(parts.values()) >= (last - first).total_seconds() - 1e-3


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_run_has_a_timeline_and_series_or_one_sentence(
    told: RunDirectory, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable
    files = [told.events_path, told.metrics_path, told.rollbacks_path, told.record_path]
    for path in chance.sample(files, chance.randint(1, 3)):
        (damage_json if path == told.record_path else damage_lines)(chance, path)
    try:
        rows = read_rows(told)
        marks, parts = timeline(told, rows), goodput(told, rows)
        branches = abandoned_branches(rows)
    except LongtakeError:
        return
    for some in (
        *(each.read(list(SERIES), 0, 99, 50) for each in branches),
        read_series(rows, list(SERIES), 0, 2**60, 50),
    ):
        assert all((np.diff(each.x) > 0).all() for each in some)
    assert Counter(each.level for each in marks).keys() <= {"info", "warn", "error"}
    assert all(seconds >= 0 for _, seconds in parts)


def test_events_that_cannot_be_read_are_named(told: RunDirectory) -> None:
    told.events_path.unlink()
    told.events_path.mkdir()
    with pytest.raises(RecordError, match=r"events\.jsonl cannot be read: it is a folder"):
        timeline(told, read_rows(told))
