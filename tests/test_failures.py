"""A rank that fails leaves behind who it was, where it was, and why."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.build import not_none

from longtake.config import Recipe
from longtake.errors import DataError
from longtake.failures import (
    error_line,
    failure_of,
    failures_of_launch,
    failures_of_processes,
    find_failed_rank,
)
from longtake.heartbeat import Heartbeat, HeartbeatWriter, heartbeat_dir, read_heartbeat
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory

_OTHER_RANK = """
import sys, time
from pathlib import Path
from longtake.heartbeat import HeartbeatWriter
heart = HeartbeatWriter(Path(sys.argv[1]), "rank", rank=1, local_rank=1, world_size=2)
heart.set_launch("0a1b2c3d")
heart.begin_step(7, "8x32x32")
heart.set_phase("backward")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(small_recipe: Callable[..., Recipe]) -> RunDirectory:
    """A run that was begun."""
    recipe = small_recipe()
    recipe.out.mkdir()
    found = RunDirectory(recipe.out)
    found.create(recipe)
    return found


@pytest.fixture
def own(run: RunDirectory) -> Heartbeat:
    """The heart of rank 0 of 2, at step 7."""
    heart = HeartbeatWriter(heartbeat_dir(run.path), "rank", rank=0, world_size=2)
    heart.set_launch("0a1b2c3d")
    heart.begin_step(7, "8x32x32")
    return not_none(read_heartbeat(heart.path))


def test_what_a_rank_left_is_found_by_those_of_its_launch(
    run: RunDirectory, own: Heartbeat
) -> None:
    for error in (DataError("the catalog is gone"), ValueError("two\nlines ")):
        failure_of(own, "error", error_line(error)).record(run)
    first, second = failures_of_launch(run, "0a1b2c3d")
    assert (first.rank, first.step, first.error) == (0, 7, "DataError: the catalog is gone")
    assert second.error == "ValueError: two lines"
    assert str(first).startswith("Rank 0 of 2 on ")
    assert failures_of_launch(run, "ffffffff") == []


def test_a_rank_that_was_killed_is_known_by_its_heart(run: RunDirectory, own: Heartbeat) -> None:
    """A killed rank leaves no record; its last heartbeat is in memory that outlives it."""
    command = [sys.executable, "-c", _OTHER_RANK, str(heartbeat_dir(run.path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert not_none(other.stdout).readline() == "ready\n"
        assert find_failed_rank(run, own, seconds=0) is None
        other.kill()
    found = not_none(find_failed_rank(run, own))
    assert (found.rank, found.step, found.phase, found.kind) == (1, 7, "backward", "killed")


def test_what_only_a_watcher_saw_counts_less_than_any_other_record(
    run: RunDirectory, own: Heartbeat
) -> None:
    failure_of(own, "killed", "its process is gone", source="watcher").record(run)
    assert failures_of_processes(run, [own.pid], since="") == []
    found = not_none(find_failed_rank(run, own, seconds=0))
    assert (found.source, found.error) == ("watcher", "its process is gone")
    failure_of(own, "killed", "killed by SIGKILL", source="launcher").record(run)
    assert [each.source for each in failures_of_launch(run, "0a1b2c3d")] == ["launcher", "watcher"]
    assert len(failures_of_processes(run, [own.pid], since="")) == 1


def _beat(run: RunDirectory, host: str, beat: int, rank: int) -> None:
    facts = {"rank": rank, "world_size": 3, "launch": "0a1b2c3d", "pid": 9, "step": 7}
    ranks = [{**facts, "phase": "forward"}]
    record = {"pid": 1, "beat": beat, "launch": "0a1b2c3d", "ended": False, "ranks": ranks}
    NodeDirectory(run, host).write_heartbeat(record)


def test_a_node_that_is_lost_is_known_by_its_silence(
    run: RunDirectory, own: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left there to say anything; where all are silent it is the disk, and no node."""
    for rank in range(3):
        _beat(run, f"gpu{rank}", 1, rank)
    assert find_failed_rank(run, own, seconds=0) is None
    clock = [100.0]

    def sleep(seconds: float) -> None:  # meanwhile the others live on
        clock[0] += seconds
        for rank in (0, 1):
            _beat(run, f"gpu{rank}", 2, rank)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    found = not_none(find_failed_rank(run, own))
    assert (found.rank, found.host, found.step) == (2, "gpu2", 7)
    assert "gpu2 has given no sign of life for 3 s" in str(found)
