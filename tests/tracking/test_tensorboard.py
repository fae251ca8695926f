"""TensorBoard shows what the run directory says, each step and each evaluation once."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.tracking.build import add_result, add_steps, scalars, send_to_tensorboard

from longtake.evaluation_dir import cursor_path
from longtake.run_dir import RunDirectory
from longtake.tracking.tensorboard import event_files, events_in

_SCALARS = ("epoch", "loss", "grad_norm", "learning_rate", "step_seconds", "data_seconds")


def _read(run: RunDirectory, folder: str = ".") -> EventAccumulator:
    path = run.tensorboard_path / folder
    return EventAccumulator(str(path), size_guidance={"scalars": 0, "images": 0}).Reload()


def test_every_value_can_be_read_back(run: RunDirectory) -> None:
    """Each number of each row is a scalar of its step and time, in single precision."""
    add_steps(run, range(1, 6))
    send_to_tensorboard(run)
    events = _read(run)
    assert sorted(events.Tags()["scalars"]) == sorted(f"train/{name}" for name in _SCALARS)
    rows = [dict(row) for row in run.metrics()]
    for name in _SCALARS:
        found = events.Scalars(f"train/{name}")
        assert [(e.step, e.wall_time) for e in found] == [(r["step"], r["time"]) for r in rows]
        assert [e.value for e in found] == pytest.approx([r[name] for r in rows], rel=1e-6)
    assert not (run.tensorboard_path / "events").exists()  # no file is begun for nothing


def test_a_step_that_is_run_again_counts_once(run: RunDirectory) -> None:
    """After a resume from step 3 the first launch's steps are forgotten; no evaluation is."""
    add_steps(run, range(1, 6))
    add_result(run, "demo", 5)
    send_to_tensorboard(run)
    add_steps(run, range(4, 8), loss=2.0)
    add_steps(run, range(6, 9), loss=3.0)  # within one file, as after a rollback
    send_to_tensorboard(run)
    losses = _read(run).Scalars("train/loss")
    assert [e.step for e in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [e.value for e in losses] == pytest.approx([r["loss"] for r in run.metrics()], rel=1e-6)
    assert list(scalars(run, "eval/demo/motion", "eval")) == [5]


def test_evaluations_come_at_the_steps_of_their_checkpoints(run: RunDirectory) -> None:
    """In whatever order they come: measures, the sheet, the alarms."""
    add_result(run, "demo", 12)
    send_to_tensorboard(run)
    sheet = add_result(run, "demo", 6) / "sheet.png"
    send_to_tensorboard(run)
    assert scalars(run, "eval/demo/brightness", "eval") == {6: 6.25, 12: 12.25}
    events = _read(run, "eval")
    (picture,) = [each for each in events.Images("eval/demo/sheet") if each.step == 6]
    assert picture.encoded_image_string == sheet.read_bytes()
    assert (picture.width, picture.height) == (40, 20)
    alarms = {e.step: e.tensor_proto.string_val[0] for e in events.Tensors("eval/demo/alarms")}
    assert alarms == {6: b"brightness at 6", 12: b"brightness at 12"}


def test_what_a_killed_writer_has_written_is_not_written_again(run: RunDirectory) -> None:
    """Its cursor stands before the last rows: neither they nor evaluations are there twice."""
    add_steps(run, range(1, 4))
    send_to_tensorboard(run)
    before = cursor_path(run, "tensorboard").read_bytes()
    add_steps(run, range(4, 6))
    add_result(run, "demo", 3)
    run.append_event("rolled_back", step=3, message="The loss rose.")
    send_to_tensorboard(run)
    cursor_path(run, "tensorboard").write_bytes(before)  # killed before it could be written
    add_result(run, "demo", 6)
    send_to_tensorboard(run)
    assert [e.step for e in _read(run).Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert sorted(e.step for e in _read(run, "eval").Scalars("eval/demo/motion")) == [3, 6]
    (event,) = _read(run, "events").Tensors("events/rolled_back")
    assert (event.step, event.tensor_proto.string_val) == (3, [b"The loss rose. (step 3)"])


def test_a_damaged_event_file_delays_no_row(run: RunDirectory) -> None:
    """A length of 2**63 bytes, say: what comes after it in that file is left out."""
    add_steps(run, range(1, 4))
    send_to_tensorboard(run)
    (path,) = event_files(run.tensorboard_path)
    whole = path.read_bytes()
    cursor_path(run, "tensorboard").unlink()
    for damage in (b"\xff" * 8 + bytes(4), whole[:12] + b"\xff" * (len(whole) - 12)):
        path.write_bytes(whole + damage)
        add_steps(run, range(4, 5))
        send_to_tensorboard(run)
    assert 4 in [
        event.step for each in event_files(run.tensorboard_path) for event in events_in(each)
    ]
