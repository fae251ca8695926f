"""What somebody still reads is not deleted, and what nobody holds any more is."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.checkpoint import deletion, holds
from longtake.checkpoint.store import abandon
from longtake.evaluation.server import hold
from longtake.run_dir import RunDirectory

Save = Callable[..., Path]


def _hold(run: RunDirectory, step: int, owner: str = "server-1") -> Path:
    path = holds.hold_path(run, step, owner)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def test_a_held_checkpoint_outlives_the_rules(run: RunDirectory, save: Save) -> None:
    """It goes with the first save after it was given back."""
    held = _hold(run, 10)
    save(run, 30, keep=1)
    assert run.checkpoint_steps() == [10, 30]
    held.unlink()
    save(run, 40, keep=1)
    assert run.checkpoint_steps() == [40]


def test_a_hold_that_is_not_renewed_is_stale(run: RunDirectory, save: Save) -> None:
    """By the times of the files alone: older than the newest COMMITTED by a quarter of an hour."""
    held, fresh = _hold(run, 10), _hold(run, 20, "server-2")
    newest = (run.checkpoint_path(20) / "COMMITTED").stat().st_mtime
    os.utime(held, (newest - 901,) * 2)
    os.utime(fresh, (newest - 899,) * 2)
    assert holds.held_steps(run) == {20}
    assert not held.exists()
    assert fresh.exists()


def test_a_run_that_goes_back_waits_for_nobody(run: RunDirectory) -> None:
    """What it went back from must not be there when it is started again."""
    _hold(run, 20)
    abandon(run, 10)
    assert run.checkpoint_steps() == [10]


def test_a_hold_that_comes_while_a_checkpoint_is_taken_away_brings_it_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the deletion; all of its files are where they were."""
    files = sorted(run.checkpoint_path(10).rglob("*"))
    real = deletion.take_away

    def interrupted(path: Path) -> Path:
        hidden = real(path)
        _hold(run, 10)  # the reader's first act
        return hidden

    monkeypatch.setattr(deletion, "take_away", interrupted)
    assert not deletion.delete_unless_held(run, 10)
    assert sorted(run.checkpoint_path(10).rglob("*")) == files


@pytest.mark.parametrize("microseconds", [0, 100, 200, 300, 400, 600, 1000, None])
def test_who_holds_first_and_looks_then_never_reads_what_is_deleted(
    run: RunDirectory, microseconds: int | None
) -> None:
    """A reader and a deletion at once: either it is gone, or it stays whole.

    However the reader is late; None: it comes after the deletion, which then is not in vain.
    """
    checkpoint = run.checkpoint_path(20)
    start = threading.Barrier(2)

    def delete() -> None:
        start.wait()
        deletion.delete_unless_held(run, 20)

    thread = threading.Thread(target=delete)
    thread.start()
    start.wait()
    thread.join() if microseconds is None else time.sleep(microseconds / 1e6)
    with hold.held(run, 20, "server-1"):
        is_there = (checkpoint / "COMMITTED").exists()
        thread.join()
        if is_there:
            assert (checkpoint / "COMMITTED").exists()
            assert (checkpoint / "model").is_dir()
    assert checkpoint.exists() or not is_there
    assert not (microseconds is None and checkpoint.exists())


def test_what_is_gone_already_counts_as_deleted(run: RunDirectory) -> None:
    """Two who delete do not get in each other's way; what is held is not said to be gone."""
    assert deletion.take_away_unless_held(run, 15)
    _hold(run, 20)
    assert not deletion.take_away_unless_held(run, 20)
    assert run.checkpoint_steps() == [10, 20]


def test_a_hold_is_renewed_and_given_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is written again, so that its time moves; at the end it is gone."""
    monkeypatch.setattr(hold, "RENEWED_SECONDS", 0.02)
    path = holds.hold_path(run, 10, "server-1")
    with hold.held(run, 10, "server-1"), hold.held(run, 10, "server-2"):
        first, limit = path.read_text(), time.monotonic() + 20
        while path.read_text() == first:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert holds.held_steps(run) == {10}
    assert not path.parent.exists()
