"""TensorBoard shows what the run directory says, each step and each evaluation once."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.evaluation_dir import cursor_path
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor
from longtake.tracking.event_file import event_files, events_in
from longtake.tracking.feed import Feed
from longtake.tracking.tensorboard import TensorBoard

_SCALARS = ("epoch", "loss", "grad_norm", "learning_rate", "step_seconds", "data_seconds")


def _read(run: RunDirectory, folder: str = ".") -> EventAccumulator:
    path = run.tensorboard_path / folder
    return EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0}).Reload()


def test_every_value_can_be_read_back(
    run: RunDirectory, add_steps: Callable[..., None], tell_tensorboard: Callable[..., None]
) -> None:
    """Each number of each row is a scalar of its step and time, in single precision."""
    add_steps(run, range(1, 6))
    tell_tensorboard(run)
    events = _read(run)
    assert sorted(events.Tags()["scalars"]) == sorted(f"train/{name}" for name in _SCALARS)
    rows = [dict(row) for row in run.metrics()]
    for name in _SCALARS:
        found = events.Scalars(f"train/{name}")
        assert [(e.step, e.wall_time) for e in found] == [(r["step"], r["time"]) for r in rows]
        assert [e.value for e in found] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_a_step_that_is_run_again_counts_once(
    run: RunDirectory,
    add_steps: Callable[..., None],
    add_result: Callable[..., Path],
    tell_tensorboard: Callable[..., None],
) -> None:
    """After a resume from step 3 the first launch's steps are forgotten; no evaluation is."""
    add_steps(run, range(1, 6))
    add_result(run, "demo", 5)
    tell_tensorboard(run)
    add_steps(run, range(4, 8), loss=2.0)
    add_steps(run, range(6, 9), loss=3.0)  # within one file, as after a rollback
    tell_tensorboard(run)
    losses = _read(run).Scalars("train/loss")
    assert [e.step for e in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [e.value for e in losses] == pytest.approx([r["loss"] for r in run.metrics()], rel=1e-6)
    assert [e.step for e in _read(run, "eval").Scalars("eval/demo/motion")] == [5]


def test_evaluations_come_at_the_steps_of_their_checkpoints(
    run: RunDirectory, add_result: Callable[..., Path], tell_tensorboard: Callable[..., None]
) -> None:
    """In whatever order they come: measures, held-out losses, the sheet, the alarms."""
    add_result(run, "demo", 12)
    tell_tensorboard(run)
    sheet = add_result(run, "demo", 6) / "sheet.png"
    tell_tensorboard(run)
    events = _read(run, "eval")
    found = {event.step: event.value for event in events.Scalars("eval/demo/brightness")}
    assert found == {6: 6.25, 12: 12.25}
    assert [e.value for e in events.Scalars("eval/demo/held_out/0.1")] == [0.75, 0.75]
    (picture,) = [each for each in events.Images("eval/demo/sheet") if each.step == 6]
    assert picture.encoded_image_string == sheet.read_bytes()
    assert (picture.width, picture.height) == (40, 20)
    alarms = {e.step: e.tensor_proto.string_val[0] for e in events.Tensors("eval/demo/alarms")}
    assert alarms == {6: b"brightness at 6", 12: b"brightness at 12"}


def test_a_checkpoint_that_was_saved_anew_is_shown_anew(
    run: RunDirectory, add_result: Callable[..., Path], tell_tensorboard: Callable[..., None]
) -> None:
    """Its result has another key; the one before it stays where it is."""
    folder = add_result(run, "demo", 6)
    tell_tensorboard(run)
    folder.rename(folder.with_name("superseded"))
    add_result(run, "demo", 6, key="ffffffff")
    tell_tensorboard(run)
    found = cursor.load(cursor_path(run, "tensorboard"))
    assert found.evaluations == {("demo", 6, "0a1b2c3d"), ("demo", 6, "ffffffff")}


def test_what_a_killed_writer_has_written_is_not_written_again(
    run: RunDirectory,
    add_steps: Callable[..., None],
    add_result: Callable[..., Path],
    tell_tensorboard: Callable[..., None],
) -> None:
    """Its cursor stands before the last rows: neither they nor evaluations are there twice."""
    add_steps(run, range(1, 4))
    tell_tensorboard(run)
    before = cursor_path(run, "tensorboard").read_bytes()
    add_steps(run, range(4, 6))
    add_result(run, "demo", 3)
    run.append_event("rolled_back", step=3, message="The loss rose.")
    tell_tensorboard(run)
    cursor_path(run, "tensorboard").write_bytes(before)  # killed before it could be written
    add_result(run, "demo", 6)
    tell_tensorboard(run)
    assert [e.step for e in _read(run).Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert sorted(e.step for e in _read(run, "eval").Scalars("eval/demo/motion")) == [3, 6]
    (event,) = _read(run, "events").Tensors("events/rolled_back")
    assert (event.step, event.tensor_proto.string_val) == (3, [b"The loss rose. (step 3)"])


def test_a_damaged_event_file_keeps_no_row_from_being_told(
    run: RunDirectory, add_steps: Callable[..., None], tell_tensorboard: Callable[..., None]
) -> None:
    """A length of 2**63 bytes, say: what comes after it in that file is passed over."""
    add_steps(run, range(1, 4))
    tell_tensorboard(run)
    (path,) = event_files(run.tensorboard_path)
    whole = path.read_bytes()
    cursor_path(run, "tensorboard").unlink()  # so that the files say how far it was told
    for damage in (b"\xff" * 8 + bytes(4), whole[:12] + b"\xff" * (len(whole) - 12)):
        path.write_bytes(whole + damage)
        add_steps(run, range(4, 5))
        tell_tensorboard(run)
    assert 4 in [
        event.step for each in event_files(run.tensorboard_path) for event in events_in(each)
    ]


def test_half_a_line_waits_until_it_is_whole(
    run: RunDirectory, add_steps: Callable[..., None], tell_tensorboard: Callable[..., None]
) -> None:
    """A row is told once its line has ended; the rest of a killed launch's is passed over."""
    run.metrics_path.write_bytes(b'{"step": 1, "lo')  # a launch that was killed while writing
    add_steps(run, range(1, 3))
    line = run.metrics_path.read_bytes().splitlines()[-1].replace(b'"step":2', b'"step":3')
    with run.metrics_path.open("ab") as file:
        file.write(line)
    tell_tensorboard(run)
    assert [e.step for e in _read(run).Scalars("train/loss")] == [1, 2]
    with run.metrics_path.open("ab") as file:
        file.write(b"\n")
    tell_tensorboard(run)
    assert [e.step for e in _read(run).Scalars("train/loss")] == [1, 2, 3]


def test_a_result_that_is_being_copied_waits_for_its_files(
    run: RunDirectory, add_result: Callable[..., Path], tell_tensorboard: Callable[..., None]
) -> None:
    """Its scores may come before its videos and its sheet."""
    folder = add_result(run, "demo", 6)
    (folder / "01_s0.mp4").rename(run.path / "on its way")
    tell_tensorboard(run)
    assert not cursor.load(cursor_path(run, "tensorboard")).evaluations
    (run.path / "on its way").rename(folder / "01_s0.mp4")
    tell_tensorboard(run)
    assert [e.step for e in _read(run, "eval").Images("eval/demo/sheet")] == [6]


def test_a_result_that_cannot_be_read_keeps_no_other_waiting(
    run: RunDirectory,
    add_result: Callable[..., Path],
    tell_tensorboard: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named once, and the rest is shown."""
    (add_result(run, "demo", 5) / "scores.json").write_text('{"preset": "demo"}')
    add_result(run, "demo", 6)
    tell_tensorboard(run)
    assert [e.step for e in _read(run, "eval").Scalars("eval/demo/motion")] == [6]
    said = capsys.readouterr().err
    assert said.count("step_00000005/scores.json cannot be read") == 1


def test_what_could_not_be_written_is_written_later(
    run: RunDirectory,
    add_steps: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    until: Callable[..., None],
) -> None:
    """Neither a full disk nor a file in its way loses a row; the reason is said."""
    run.tensorboard_path.write_text("in the way")
    add_steps(run, range(1, 200))
    feed = Feed(run, TensorBoard(run), cursor_path(run, "tensorboard"))
    feed.start()
    until(lambda: feed.trouble)
    assert "NotADirectoryError" in feed.trouble or "FileExistsError" in feed.trouble
    assert feed.is_settled
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, most))  # as on a full disk
    try:
        run.tensorboard_path.unlink()
        until(lambda: "too large" in feed.trouble)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    feed.finish()
    assert feed.join(60.0)
    assert [e.step for e in _read(run).Scalars("train/loss")] == list(range(1, 200))
    assert capsys.readouterr().err.count("It is tried again") == 2


def test_it_never_imports_torch_nor_what_is_not_wanted() -> None:
    """Whoever only follows a run does not wait for torch, nor for W&B."""
    code = (
        "import sys, longtake.tracking.__main__, longtake.tracking.tensorboard;"
        "sys.exit(bool({'torch', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
