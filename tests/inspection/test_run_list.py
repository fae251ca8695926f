"""Lists of runs: which are found, what is said of each, and what is damaged."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fuzz.mutations import damage_json, damage_lines

from longtake.errors import RunError
from longtake.inspection import run_list
from longtake.inspection.rows import read_rows
from longtake.inspection.run_list import RunSummary, list_runs
from longtake.inspection.timeline import goodput, share_of_training
from longtake.run_dir import RunDirectory


def _one(folder: Path) -> RunSummary:
    (found,) = list_runs(folder)
    return found


def test_what_is_said_of_a_run(told: RunDirectory) -> None:
    found = _one(told.path.parent)
    assert found.problem is None
    created = told.record()["created"]
    assert (found.path, found.family, found.created) == ("run", "tubelet", created)
    assert (found.steps, found.total_steps, found.state) == (24, 40, "interrupted")
    newest = told.metrics()[-1]
    assert found.loss == newest["loss"]
    assert found.step_seconds == newest["step_seconds"]
    assert found.seconds_left is None
    assert found.last_seen == pytest.approx(told.events_path.stat().st_mtime, abs=60)


def test_a_run_that_is_trained_says_how_long_it_will_take(told: RunDirectory) -> None:
    lines = told.events_path.read_text().splitlines(keepends=True)
    told.events_path.write_text("".join(lines[:-1]))  # without its end
    os.utime(told.events_path, (2**35, 2**35))  # it stays fresh, however long this takes
    found = _one(told.path.parent)
    assert found.state == "running"
    assert found.step_seconds is not None
    assert found.seconds_left == pytest.approx((40 - 24) * found.step_seconds)


def test_what_a_run_recovered_from_is_said(told: RunDirectory) -> None:
    assert _one(told.path.parent).recovered == "Rolled back from step 20 to step 12."
    told.append_event("resumed", step=18, lost_steps=6)
    assert _one(told.path.parent).recovered == "Restarted; 6 steps had not been saved."


def test_steps_are_those_that_count(killed: RunDirectory) -> None:
    assert _one(killed.path.parent).steps == 12


def test_the_share_of_training_is_that_of_the_timeline(
    told: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none, where a list would read too much for it."""
    line = told.metrics()[-1]
    with told.metrics_path.open("w") as file:
        for step in range(1, 3001):
            times = {"step_seconds": 1.0, "data_seconds": 0.2, "time": 1.8e9 + step}
            file.write(json.dumps({**line, "step": step, "batch": step, **times}) + "\n")
    assert told.metrics_path.stat().st_size > 2**18
    started = {"event": "startup_timing", "step": 1, "total": 100}
    started |= {"seconds": {}, "slowest": {}, "down_seconds": None}
    events = [
        {"time": "2027-01-15T08:00:00+00:00", "event": "launched", "step": 0},
        {"time": "2027-01-15T08:00:01+00:00", **started},
    ]
    told.events_path.write_text("".join(json.dumps(each) + "\n" for each in events))
    told.rollbacks_path.unlink()
    exact = share_of_training(goodput(told, read_rows(told)))
    found = _one(told.path.parent).goodput
    assert exact == pytest.approx(0.8 * 3000 / 3099)
    assert found == exact
    monkeypatch.setattr(run_list, "_MOST_READ", 2**18)
    assert _one(told.path.parent).goodput is None


def test_runs_are_found_below_other_folders_and_sorted(told: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for name in ("b/run10", "b/run2", "a", "b/.hidden", "1/2/3/deep", "1/2/deeper"):
        shutil.copytree(told.path, folder / name)
    shutil.copytree(told.path, folder / "a" / "inside")
    (folder / "1" / "2" / "3" / "deep").rename(folder / "1" / "2" / "3" / "too deep")
    (folder / "recipes").mkdir()
    shutil.copy(told.recipe_path, folder / "recipes")
    (folder / "link").symlink_to(told.path)
    (folder / "loop").symlink_to(folder)
    (folder / os.fsdecode(b"not \xff UTF-8")).mkdir()
    found = [each.path for each in list_runs(folder)]
    assert found == ["1/2/deeper", "a", "b/run2", "b/run10"]
    assert _one(told.path).path == "."


def test_at_most_so_many_runs_are_listed(
    told: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_list, "MAX_RUNS", 2)
    for name in "abc":
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(told.record_path, tmp_path / "runs" / name)
    assert [each.path for each in list_runs(tmp_path / "runs")] == ["a", "b"]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"is not a folder\. Expected one that has runs in it"):
        list_runs(tmp_path / name)


def _sample(run: RunDirectory, preset: str, step: int, *names: str) -> Path:
    folder = run.evaluation_path(preset, step)
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_the_newest_sample_is_named_and_alarms_of_each_preset(
    told: RunDirectory, add_scores: Callable[..., Path]
) -> None:
    _sample(told, "big", 9, "00_s0.mp4", "sheet.png")
    _sample(told, "small", 12, "sheet.png", "01_s0.mp4", "00_s0.mp4", "scores.json", "x.txt")
    assert _one(told.path.parent).sample == "run/evaluations/small/step_00000012/00_s0.mp4"
    alarm = {"measure": "brightness", "kind": "drift", "message": "brightness rose"}
    folder = add_scores(told, "small", 20, alarms=[alarm, {**alarm, "kind": "range"}])
    (folder / "sheet.png").touch()
    found = _one(told.path.parent)
    assert found.sample == "run/evaluations/small/step_00000020/sheet.png"
    assert found.alarms == ("brightness rose",)


def test_samples_behind_links_are_not_named(told: RunDirectory, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "00_s0.mp4").touch()
    (told.path / "evaluations" / "small").mkdir(parents=True)
    (told.path / "evaluations" / "small" / "step_00000009").symlink_to(other)
    folder = _sample(told, "small", 5)
    (folder / "00_s0.mp4").symlink_to(other / "00_s0.mp4")
    assert _one(told.path.parent).sample is None


def test_records_behind_links_are_not_read(told: RunDirectory, tmp_path: Path) -> None:
    told.metrics_path.rename(tmp_path / "elsewhere.jsonl")
    told.metrics_path.symlink_to(tmp_path / "elsewhere.jsonl")
    assert _one(told.path.parent) == RunSummary(
        "run", "metrics.jsonl is a symbolic link; links are not followed."
    )


def test_of_a_damaged_run_the_rest_is_said(told: RunDirectory) -> None:
    told.recipe_path.write_text("steps = ")
    found = _one(told.path.parent)
    assert found.problem is not None
    assert "recipe.toml" in found.problem
    assert (found.family, found.total_steps, found.steps) == (None, None, 24)
    assert found.state == "interrupted"
    told.recipe_path.unlink()
    told.metrics_path.unlink()
    told.metrics_path.mkdir()
    found = _one(told.path.parent)
    assert found.problem is not None
    assert "it has no recipe.toml" in found.problem
    assert found.created is not None


@pytest.mark.parametrize("seed", range(60))
def test_no_damage_ends_a_list(told: RunDirectory, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable
    _sample(told, "small", 12, "00_s0.mp4", "scores.json")
    lines = [told.events_path, told.metrics_path, told.rollbacks_path]
    for path in chance.sample([*lines, told.record_path, told.recipe_path], chance.randint(1, 3)):
        (damage_lines if path in lines else damage_json if path == told.record_path else _cut)(
            chance, path
        )
    found = list_runs(told.path.parent)
    assert all(each.problem is None or each.problem.strip() for each in found)


def _cut(chance: random.Random, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])
