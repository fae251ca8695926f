"""What cannot be told, or must not be any more, keeps nothing else waiting; and the cursor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.evaluation_dir import cursor_path, writer_path
from longtake.lease import Leases
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor, feed, refusals
from longtake.tracking.cursor import Position
from longtake.tracking.event_file import event_files
from longtake.tracking.feed import Feed
from longtake.tracking.news import Reader
from longtake.tracking.tensorboard import TensorBoard

_BAD_EVENTS: list[dict[str, Any]] = [
    {"event": "rolled_back", "step": 3},
    {"event": "rolled_back", "time": "yesterday"},
    {"event": "rolled_back", "time": 5},
    {"event": "rolled_back", "time": "2026-01-02T03:04:05+00:00", "step": "three"},
    {"event": ["rolled_back"], "time": "2026-01-02T03:04:05+00:00"},
]


def _steps(run: RunDirectory) -> list[int]:
    events = EventAccumulator(str(run.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    return [each.step for each in events.Scalars("train/loss")]


def _cursor(run: RunDirectory) -> Position:
    return cursor.load(cursor_path(run, "tensorboard"))


def test_lines_that_are_no_events_are_passed_over(
    run: RunDirectory,
    add_steps: Callable[..., None],
    tell_tensorboard: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are told of once; those around them are shown, and no file is begun for nothing."""
    for bad in _BAD_EVENTS:
        run.append_event("rolled_back", step=1, message="before")
        with run.events_path.open("a") as file:
            file.write(json.dumps(bad) + "\n")
    add_steps(run, range(1, 4))
    tell_tensorboard(run)
    (path,) = event_files(run.tensorboard_path / "events")
    shown = EventAccumulator(str(path), size_guidance={"tensors": 0}).Reload()
    assert len(shown.Tensors("events/rolled_back")) == len(_BAD_EVENTS)
    assert _steps(run) == [1, 2, 3]
    assert capsys.readouterr().err.count("are no events") == 1


def test_a_row_that_no_tracker_takes_is_passed_over_in_the_end(
    run: RunDirectory,
    add_steps: Callable[..., None],
    tell_tensorboard: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After some attempts, and it is said; a step has no 31 digits in TensorBoard."""
    monkeypatch.setattr(refusals, "_MOST_TIMES", 2)
    monkeypatch.setattr(feed, "_FIRST_PAUSE_SECONDS", 0.001)
    add_steps(run, range(1, 2))
    add_steps(run, range(10**30, 10**30 + 1))
    add_steps(run, range(2, 4))
    tell_tensorboard(run)
    assert _steps(run) == [1, 2, 3]
    said = capsys.readouterr().err
    assert said.count("passed over, as it cannot be told (ValueError") == 1
    assert _cursor(run).metrics_offset == run.metrics_path.stat().st_size


def test_a_result_is_read_again_when_its_file_is_another(
    run: RunDirectory, add_result: Callable[..., Path]
) -> None:
    """What was damaged is left out as long as it is what it was; what moved away is no damage."""
    path = add_result(run, "demo", 6) / "scores.json"
    whole, reader = path.read_text(), Reader(run)

    def found() -> list[int]:
        evaluations = reader.read(Position(), thoroughly=True).evaluations
        return [each.scores["step"] for each in evaluations]

    path.write_text(whole.replace('"brightness"', '"brightness\n'))
    assert found() == found() == []
    assert len(reader.complaints) == 1
    path.unlink()
    path.symlink_to("nowhere")  # as a listing that is older than the folder shows it
    assert found() == []
    assert len(reader.complaints) == 1
    path.unlink()
    path.write_text(whole)
    assert found() == [6]


def test_rows_alone_do_not_move_the_cursor_each_time(
    run: RunDirectory,
    add_steps: Callable[..., None],
    add_result: Callable[..., Path],
    until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is replaced after some seconds, after an evaluation, and at the end."""
    monkeypatch.setattr(feed, "_SECONDS_BETWEEN_SAVES", 3600.0)
    monkeypatch.setattr(feed, "_POLL_SECONDS", 0.02)
    telling = Feed(run, TensorBoard(run), cursor_path(run, "tensorboard"))
    telling.start()
    add_steps(run, range(1, 4))
    until(lambda: _cursor(run).metrics_offset)
    first = _cursor(run)
    add_steps(run, range(4, 7))
    until(lambda: _steps(run)[-1] == 6)
    assert _cursor(run) == first
    add_result(run, "demo", 6)
    until(lambda: _cursor(run).evaluations)
    second = _cursor(run)
    add_steps(run, range(7, 10))
    until(lambda: _steps(run)[-1] == 9)
    assert _cursor(run) == second
    telling.finish()
    assert telling.join(30.0)
    assert _cursor(run).metrics_offset == run.metrics_path.stat().st_size
    assert _steps(run) == list(range(1, 10))


def test_who_has_lost_the_lease_moves_no_cursor(
    run: RunDirectory, add_steps: Callable[..., None]
) -> None:
    """Not even before it has noticed: the cursor is the next writer's."""
    lease = Leases(60.0, {}).take(writer_path(run))
    assert lease is not None
    lease.end("taken over")
    assert Leases(60.0, {}).take(writer_path(run)) is not None
    telling = Feed(run, TensorBoard(run), cursor_path(run, "tensorboard"), lease)
    add_steps(run, range(1, 4))
    telling.start()
    telling.finish()
    assert telling.join(30.0)
    assert _cursor(run) == Position()
