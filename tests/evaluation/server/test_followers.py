"""Followers of runs last as long as there is something to tell."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from longtake.evaluation import followers
from longtake.evaluation.followers import Followers
from longtake.evaluation_dir import EvaluationDirectory, Scores, cursor_path, writer_path
from longtake.fsio import append_json, now, write_json
from longtake.lease import history
from longtake.run_dir import RunDirectory
from longtake.tracking import cursor


@pytest.fixture
def told(make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that is over, with a TensorBoard; tellers look at it all the time."""
    monkeypatch.setattr(followers, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(followers, "_QUIET_SECONDS", 0.2)
    run = make_run()
    recipe = run.recipe_path.read_text()
    assert "tensorboard = false" in recipe
    run.recipe_path.write_text(recipe.replace("tensorboard = false", "tensorboard = true"))
    append_json(run.events_path, {"time": "1", "event": "finished"})
    return run


def test_a_run_that_is_over_keeps_no_process_but_is_told_of_what_comes(told: RunDirectory) -> None:
    """Its follower ends; another tells of a new result, also at the server's very end."""
    with Followers() as serving:
        for steps in ([10], [10, 20]):
            _add_result(told, steps[-1])
            _serve(serving, [told], until=lambda: _writes(told))
            _serve(serving, [told], until=lambda: not _writes(told))
            assert _steps_told(told) == steps
        _add_result(told, 30)
    assert _steps_told(told) == [10, 20, 30]
    assert len(history(writer_path(told))) == 3


def test_a_run_that_is_deleted_does_not_come_back(told: RunDirectory) -> None:
    """Its follower ends, and makes no folder anew."""
    with Followers() as serving:
        _serve(serving, [told], until=lambda: _writes(told))
        pid = history(writer_path(told))[-1]["pid"]
        shutil.rmtree(told.path)
        _serve(serving, [], until=lambda: not Path(f"/proc/{pid}").exists())
    assert not told.path.exists()


def test_a_run_that_goes_on_keeps_its_follower(told: RunDirectory) -> None:
    """However quiet it is: nobody has said that it has ended."""
    append_json(told.events_path, {"time": "2", "event": "resumed"})
    with Followers() as serving:
        _serve(serving, [told], until=lambda: _writes(told))
        end = time.monotonic() + 1.0  # five times as long as one that is over is left
        _serve(serving, [told], until=lambda: time.monotonic() > end)
        assert _writes(told)
        assert len(history(writer_path(told))) == 1


def _add_result(run: RunDirectory, step: int) -> None:
    """A result without videos, whole."""
    folder = EvaluationDirectory(run).result_path("probe", step)
    aside = folder.with_name(f".{folder.name}.partial")
    aside.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(aside / "sheet.png")
    scores = Scores(
        preset="probe",
        step=step,
        key=f"{step:08d}",
        weights="model",
        time=now(),
        server="here-1",
        settings={"fps": 8.0},
        videos=[],
        measures={"brightness": 1.0},
        alarms=[],
        seconds={},
    )
    write_json(aside / "scores.json", scores)
    aside.rename(folder)


def _writes(run: RunDirectory) -> bool:
    """Whether a follower has the run's trackers."""
    return (history(writer_path(run)) or [{"ended": "never begun"}])[-1]["ended"] is None


def _steps_told(run: RunDirectory) -> list[int]:
    return sorted(step for _, step, _ in cursor.load(cursor_path(run, "tensorboard")).evaluations)


def _serve(serving: Followers, runs: list[RunDirectory], until: Callable[[], object]) -> None:
    """Look at the runs again and again, until something is so."""
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end
        serving.serve(runs)
        time.sleep(0.05)
