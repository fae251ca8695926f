"""Checkpoints that an evaluation server needs are kept; those of a dead server are not."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.checkpoint import deletion
from longtake.checkpoint.deletion import delete_unless_needed, needed_steps, take_away_unless_needed
from longtake.checkpoint.store import abandon
from longtake.evaluation_dir import ServerDirectory
from longtake.run_dir import RunDirectory

Save = Callable[..., Path]


def _need(run: RunDirectory, *steps: int, server: str = "server-1") -> Path:
    directory = ServerDirectory(run, server)
    directory.write_heartbeat({"server": server, "time": "2026-01-01", "needs": list(steps)})
    return directory.heartbeat_path


def test_a_needed_checkpoint_is_kept_until_it_is_not_needed(run: RunDirectory, save: Save) -> None:
    _need(run, 10)
    save(run, 30, keep=1)
    assert run.checkpoint_steps() == [10, 30]
    _need(run)
    save(run, 40, keep=1)
    assert run.checkpoint_steps() == [40]


def test_a_heartbeat_counts_until_it_is_15_minutes_older_than_the_newest_checkpoint(
    run: RunDirectory,
) -> None:
    """By the times of the files alone."""
    stale, fresh = _need(run, 10), _need(run, 20, server="server-2")
    newest = (run.checkpoint_path(20) / "COMMITTED").stat().st_mtime
    os.utime(stale, (newest - 901,) * 2)
    os.utime(fresh, (newest - 899,) * 2)
    assert needed_steps(run) == {20}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"server": "a", "time": "2026", "needs": ["10"]}', '{"needs": 10}'],
)
def test_a_heartbeat_that_cannot_be_read_needs_nothing(run: RunDirectory, text: str) -> None:
    _need(run, 10, server="whole")
    _need(run, 20).write_text(text)
    (run.path / "evaluations" / "servers" / "a file").write_text("")
    assert needed_steps(run) == {10}


def test_a_run_that_goes_back_waits_for_no_server(run: RunDirectory) -> None:
    _need(run, 20)
    abandon(run, 10)
    assert run.checkpoint_steps() == [10]


def test_a_checkpoint_that_is_needed_while_it_is_taken_away_comes_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the deletion; all of its files are where they were."""
    files = sorted(run.checkpoint_path(10).rglob("*"))
    real = deletion.take_away

    def interrupted(path: Path) -> Path:
        hidden = real(path)
        _need(run, 10)
        return hidden

    monkeypatch.setattr(deletion, "take_away", interrupted)
    assert not delete_unless_needed(run, 10)
    assert sorted(run.checkpoint_path(10).rglob("*")) == files


@pytest.mark.parametrize("microseconds", [0, 100, 200, 300, 400, 600, 1000, None])
def test_a_server_that_needs_first_and_looks_then_never_reads_what_is_deleted(
    run: RunDirectory, microseconds: int | None
) -> None:
    """A server and a deletion at once: the checkpoint is gone, or it stays whole.

    None: the server comes after the deletion, which must have succeeded.
    """
    checkpoint = run.checkpoint_path(20)
    start = threading.Barrier(2)

    def delete() -> None:
        start.wait()
        delete_unless_needed(run, 20)

    thread = threading.Thread(target=delete)
    thread.start()
    start.wait()
    thread.join() if microseconds is None else time.sleep(microseconds / 1e6)
    _need(run, 20)
    is_there = (checkpoint / "COMMITTED").exists()
    thread.join()
    if is_there:
        assert (checkpoint / "COMMITTED").exists()
        assert (checkpoint / "model").is_dir()
    assert checkpoint.exists() or not is_there
    assert not (microseconds is None and checkpoint.exists())


def test_a_checkpoint_that_is_gone_already_counts_as_deleted(run: RunDirectory) -> None:
    assert take_away_unless_needed(run, 15)
    _need(run, 20)
    assert not take_away_unless_needed(run, 20)
    assert run.checkpoint_steps() == [10, 20]
