"""What a run directory has gained is read once, and what is damaged delays nothing."""

import json
from pathlib import Path
from typing import Any

from tests.tracking.build import add_result, add_steps

from longtake.run_dir import RunDirectory
from longtake.tracking.reader import Cursor, UpdateReader
from longtake.tracking.tracker import TrackedRecord

_BAD_EVENTS: list[dict[str, Any]] = [
    {"event": "rolled_back", "step": 3},
    {"event": "rolled_back", "time": "yesterday"},
    {"event": "rolled_back", "time": 5},
    {"event": "rolled_back", "time": "2026-01-02T03:04:05+00:00", "step": "three"},
    {"event": ["rolled_back"], "time": "2026-01-02T03:04:05+00:00"},
]


def _read(reader: UpdateReader, cursor: Cursor | None = None) -> list[TrackedRecord]:
    return reader.read(cursor or Cursor(), thoroughly=True).records


def test_records_carry_what_trackers_show(run: RunDirectory) -> None:
    """Numbers inside of lists have the names of both; what is no number is left out.

    Each bucket has a curve of its speed.
    """
    row = {"step": 1, "time": 5.0, "loss": 2.0, "grad_norm": None, "loss_by_sigma": [1, None]}
    row |= {"bucket": [17, 32, 64], "tokens_per_second": 300.0, "step_seconds": 2.0}
    run.metrics_path.write_text(json.dumps(row) + "\n")
    run.append_event("rolled_back", step=3, message="The loss rose.", reason=None)
    run.append_event("finished", step=4)
    folder = add_result(run, "demo", 6)
    train, event, evaluation = _read(UpdateReader(run))
    assert (train.kind, train.step, train.time) == ("train", 1, 5.0)
    assert train.scalars == {
        "train/loss": 2.0,
        "train/loss_by_sigma/0": 1,
        "train/step_seconds": 2.0,
        "train/step_seconds/17x32x64": 2.0,
        "train/tokens_per_second/17x32x64": 300.0,
    }
    assert (event.step, event.texts) == (3, {"events/rolled_back": "The loss rose. (step 3)"})
    assert (evaluation.kind, evaluation.step) == ("eval", 6)
    assert evaluation.scalars["eval/demo/held_out/0.1"] == 0.75
    assert evaluation.texts == {"eval/demo/alarms": "brightness at 6"}
    files = {name: tuple(file) for name, file in evaluation.media.items()}
    assert files == {
        "eval/demo/00_s0": (folder / "00_s0.mp4", "a red disc (seed 0)"),
        "eval/demo/01_s0": (folder / "01_s0.mp4", "a red disc (seed 0, width 48)"),
        "eval/demo/sheet": (folder / "sheet.png", ""),
    }


def test_what_was_read_is_not_read_again(run: RunDirectory) -> None:
    """A cursor counts it; a checkpoint that was saved anew has another key."""
    reader = UpdateReader(run)
    add_steps(run, range(1, 4))
    folder = add_result(run, "demo", 6)
    first = reader.read(Cursor())
    assert len(first.records) == 4
    assert reader.read(first.cursor, thoroughly=True).records == []
    add_steps(run, range(4, 5))
    folder.rename(folder.with_name("superseded"))
    add_result(run, "demo", 6, key="ffffffff")
    second = reader.read(first.cursor, thoroughly=True)
    assert [each.step for each in second.records] == [4, 6]
    assert second.cursor.evaluations == {("demo", 6, "0a1b2c3d"), ("demo", 6, "ffffffff")}


def test_a_cursor_is_kept_in_a_file(tmp_path: Path) -> None:
    """One that cannot be read is the beginning: trackers know what they have."""
    path = tmp_path / "tracking" / "wandb.json"
    assert Cursor.load(path) == Cursor()
    cursor = Cursor(5, 6, 7, frozenset({("demo", 6, "ab"), ("demo", 12, "cd")}))
    cursor.save(path)
    assert Cursor.load(path) == cursor
    path.write_text(path.read_text().replace("6", '"six"'))
    assert Cursor.load(path) == Cursor()


def test_lines_that_are_no_events_are_left_out(run: RunDirectory) -> None:
    """With one warning; those around them are read."""
    for bad in _BAD_EVENTS:
        run.append_event("rolled_back", step=1, message="before")
        with run.events_path.open("a") as file:
            file.write(json.dumps(bad) + "\n")
    reader = UpdateReader(run)
    assert len(_read(reader)) == len(_read(reader)) == len(_BAD_EVENTS)
    assert reader.warnings == [f"{run.events_path}: lines that are no events are left out."]


def test_half_a_line_waits_until_it_is_whole(run: RunDirectory) -> None:
    """A row is read once its line has ended; the rest of a killed launch's is left out."""
    run.metrics_path.write_bytes(b'{"step": 1, "lo')  # a launch that was killed while writing
    add_steps(run, range(1, 3))
    line = run.metrics_path.read_bytes().splitlines()[-1].replace(b'"step":2', b'"step":3')
    with run.metrics_path.open("ab") as file:
        file.write(line)
    reader = UpdateReader(run)
    first = reader.read(Cursor())
    assert [each.step for each in first.records] == [1, 2]
    with run.metrics_path.open("ab") as file:
        file.write(b"\n")
    assert [each.step for each in _read(reader, first.cursor)] == [3]


def test_a_result_that_is_being_copied_waits_for_its_files(
    run: RunDirectory, monkeypatch: Any
) -> None:
    """Its scores may come first. Files that do not come in a minute were deleted."""
    folder, reader = add_result(run, "demo", 6), UpdateReader(run)
    (folder / "01_s0.mp4").rename(run.path / "on its way")
    assert _read(reader) == []
    (run.path / "on its way").rename(folder / "01_s0.mp4")
    assert len(reader.read(Cursor()).records) == 1
    (folder / "sheet.png").unlink()
    assert _read(reader) == []
    monkeypatch.setattr("longtake.tracking.reader._MAX_SECONDS_INCOMPLETE", -1.0)
    (evaluation,) = reader.read(Cursor()).records
    assert sorted(evaluation.media) == ["eval/demo/00_s0", "eval/demo/01_s0"]


def test_a_damaged_result_delays_no_other_and_is_read_again_when_it_changes(
    run: RunDirectory,
) -> None:
    """It is named once; a file that has just moved away is not damaged."""
    path = add_result(run, "demo", 5) / "scores.json"
    whole, reader = path.read_text(), UpdateReader(run)
    add_result(run, "demo", 6)
    path.write_text('{"preset": "demo"}')
    assert [each.step for each in _read(reader)] == [each.step for each in _read(reader)] == [6]
    (warning,) = reader.warnings
    assert "step_00000005/scores.json cannot be read" in warning
    path.unlink()
    path.symlink_to("nowhere")  # as a listing that is older than the folder shows it
    assert [each.step for each in _read(reader)] == [6]
    assert reader.warnings == [warning]
    path.unlink()
    path.write_text(whole)
    assert [each.step for each in _read(reader)] == [5, 6]
