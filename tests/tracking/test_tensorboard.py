"""TensorBoard shows what metrics.jsonl says, each step once."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtake.run_dir import Metrics, RunDirectory
from longtake.tracking.tensorboard import TensorBoardMirror

_SCALARS = ("epoch", "loss", "grad_norm", "learning_rate", "step_seconds", "data_seconds")


def _launch(run: RunDirectory, steps: range, loss: float) -> None:
    """Metrics of some steps, mirrored one by one."""
    mirror = TensorBoardMirror(run)
    for step in steps:
        row = Metrics(
            step=step,
            epoch=0,
            loss=loss / step,
            grad_norm=1.0,
            learning_rate=1e-3,
            step_seconds=0.25,
            data_seconds=0.5,
            time=1000.0 + step,
        )
        run.append_metrics(row)
        mirror.catch_up()
    mirror.close()


def _read(run: RunDirectory) -> EventAccumulator:
    return EventAccumulator(str(run.tensorboard_path), size_guidance={"scalars": 0}).Reload()


def test_every_value_can_be_read_back(tmp_path: Path) -> None:
    """Each number of each row is a scalar of its step and time, in single precision."""
    run = RunDirectory(tmp_path)
    _launch(run, range(1, 6), loss=1.0)
    events = _read(run)
    assert sorted(events.Tags()["scalars"]) == sorted(f"train/{name}" for name in _SCALARS)
    rows = [dict(row) for row in run.metrics()]
    for name in _SCALARS:
        found = events.Scalars(f"train/{name}")
        assert [(e.step, e.wall_time) for e in found] == [(r["step"], r["time"]) for r in rows]
        assert [e.value for e in found] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_a_step_that_is_run_again_counts_once(tmp_path: Path) -> None:
    """After a resume from step 3 the first launch's steps 4 and 5 are forgotten."""
    run = RunDirectory(tmp_path)
    _launch(run, range(1, 6), loss=1.0)
    _launch(run, range(4, 8), loss=2.0)
    losses = _read(run).Scalars("train/loss")
    assert [e.step for e in losses] == [1, 2, 3, 4, 5, 6, 7]
    assert [e.value for e in losses] == pytest.approx([r["loss"] for r in run.metrics()], rel=1e-6)


def test_half_a_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    """A row is mirrored once its line has ended; the rest of a killed launch's is passed over."""
    run = RunDirectory(tmp_path)
    run.metrics_path.write_bytes(b'{"step": 1, "lo')  # a launch that was killed while writing
    _launch(run, range(1, 3), loss=1.0)
    mirror = TensorBoardMirror(run)
    line = run.metrics_path.read_bytes().splitlines()[-1].replace(b'"step":2', b'"step":3')
    with run.metrics_path.open("ab") as file:
        file.write(line)
    mirror.catch_up()
    with run.metrics_path.open("ab") as file:
        file.write(b"\n")
    mirror.catch_up()
    mirror.close()
    assert [e.step for e in _read(run).Scalars("train/loss")] == [1, 2, 3]


def test_it_never_imports_torch() -> None:
    """Whoever only mirrors a run does not wait for torch, and needs no accelerator."""
    code = "import sys, longtake.tracking.tensorboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_mirror_that_cannot_be_written_ends_quietly(tmp_path: Path) -> None:
    """No mirror is worth a run: neither a full disk nor a file in its way is an error."""
    run = RunDirectory(tmp_path / "full")
    run.path.mkdir()
    mirror = TensorBoardMirror(run)
    rows = (f'{{"step":{step},"time":1.0,"loss":0.5}}\n' for step in range(1, 200))
    run.metrics_path.write_text("".join(rows))
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, most))  # as on a full disk
    try:
        mirror.catch_up()
        mirror.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    (written,) = run.tensorboard_path.iterdir()
    assert written.stat().st_size <= 2048
    blocked = RunDirectory(tmp_path / "blocked")
    blocked.path.mkdir()
    blocked.tensorboard_path.write_text("in the way")
    _launch(blocked, range(1, 3), loss=1.0)
    assert len(blocked.metrics()) == 2
