"""A run directory belongs to one recipe; its records survive whatever interrupts their writer."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.build import bare_recipe, make_row

from longtake import config
from longtake.config import Recipe
from longtake.errors import RecipeChangedError, RunError
from longtake.fsio import append_json, read_json_lines
from longtake.run_dir import RunDirectory, beside, refuse_moved


def _recipe(out: Path, **training: Any) -> Recipe:
    return bare_recipe(out, training={"steps": 10, "global_batch_size": 2} | training)


def _begin(path: Path, **training: Any) -> RunDirectory:
    run = RunDirectory(path)
    recipe = _recipe(path, **training)
    run.claim(recipe)
    run.create(recipe)
    return run


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_claim_writes_no_record(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new" / "run")
    run.claim(_recipe(run.path))
    assert not run.exists()
    assert list(run.path.iterdir()) == []
    run.claim(_recipe(run.path, steps=20))


def test_a_run_that_is_created_knows_its_recipe(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    assert run.exists()
    assert run.recipe() == _recipe(run.path)
    assert sorted(path.name for path in run.path.iterdir()) == ["recipe.toml", "run.json"]
    record = json.loads(run.record_path.read_text())
    assert re.fullmatch("run-[0-9a-f]{8}", record["id"])
    assert record["launches"] == []


def test_another_recipe_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    run.append_metrics(make_row(1, 0.5))
    before = _contents(run.path)
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(_recipe(run.path, steps=20, global_batch_size=4))
    assert str(caught.value) == (
        f"{run.path} holds a run of another recipe, which is never overwritten. They differ in\n"
        "  training.global_batch_size: 2 there, 4 now\n"
        "  training.steps: 10 there, 20 now\n"
        "To resume with what is new, say how: --set data.on_change=merge (in the rest of the epoch "
        "exactly what it has not seen), finish (end the epoch as it was) or restart (begin the "
        "next epoch at once).\n"
        "To train on from its newest weights with the new recipe, as a run of its own, add to this "
        f"command: --set out={run.path}-2 --from {run.path}\n"
        f"Start beside it, from scratch, with --set out={run.path}-2, or resume with the old "
        f"recipe: longtake train {run.path}/recipe.toml"
    )
    assert _contents(run.path) == before


def test_a_longer_run_is_refused_with_the_command_that_trains_it(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    way = f"\n  {run.resume_command()} --set training.steps=20 --set data.on_change=finish\n"
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(_recipe(run.path, steps=20))
    assert way in str(caught.value)
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(_recipe(run.path, steps=5))
    assert "on_change" not in str(caught.value)
    # Without the new catalog, the run would train the clips of its own recipe again.
    changes = ["training.steps=20", "data.catalog=chunk 2.parquet"]
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(config.changed(run.recipe(), changes))
    assert "data.catalog: 'none.parquet' there, 'chunk 2.parquet' now" in str(caught.value)
    assert "training.steps=20 --set 'data.catalog=chunk 2.parquet' --set" in str(caught.value)


@pytest.mark.parametrize("policy", ["refuse", "finish"])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize(("steps", "epochs"), [(100, 10), (20, 2)])
def test_the_length_of_a_run_of_epochs_is_changed_by_epochs_alone(
    tmp_path: Path, steps: int, epochs: int, schedule: str, policy: str
) -> None:
    """Its steps follow from the data, so that a number of them would be accepted and ignored."""
    run = RunDirectory(tmp_path / "run")
    values = _recipe(run.path).model_dump(exclude_none=True)
    values |= {"training": {"epochs": 3, "global_batch_size": 2}}
    values["optimizer"]["schedule"] = schedule
    recipe = config.parse(values, "test")
    run.claim(recipe)
    run.create(recipe.with_steps(32))
    run.claim(recipe)  # its file, which names no steps
    changes = [f"training.steps={steps}", f"data.on_change={policy}"]
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(config.changed(run.recipe(), changes))
    printed = f"--set training.epochs={epochs} --set data.on_change=finish"
    message = str(caught.value)
    assert f"\n  {run.resume_command()} {printed}\n" in message
    assert f"--set out={run.path}-2 --set training.epochs={epochs} --from" in message
    run.claim(config.changed(run.recipe(), printed.replace("--set ", "").split()))


def test_the_way_on_holds_for_a_run_that_was_moved(tmp_path: Path) -> None:
    moved = RunDirectory(tmp_path / "moved")
    _begin(tmp_path / "run").path.rename(moved.path)
    with pytest.raises(RecipeChangedError, match=f"recipe.toml --set out={moved.path}$"):
        moved.claim(_recipe(moved.path, steps=20))


def test_the_same_recipe_is_accepted(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    before = _contents(run.path)
    run.claim(_recipe(run.path))
    run.claim(_recipe(run.path, micro_batch_size=1, device="cpu"))
    assert _contents(run.path) == before


def test_the_recipe_kept_is_the_newest_launchs(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    changed = _recipe(run.path, micro_batch_size=1, device="cpu")
    run.claim(changed)
    run.adopt(changed)
    assert run.recipe() == changed
    before = run.recipe_path.stat().st_mtime_ns
    run.adopt(changed)
    assert run.recipe_path.stat().st_mtime_ns == before


def test_half_a_run_is_refused(tmp_path: Path) -> None:
    """Metrics without a recipe are somebody's work; they are not mixed with another run's."""
    run = _begin(tmp_path / "run")
    run.append_metrics(make_row(1, 0.5))
    run.recipe_path.unlink()
    with pytest.raises(RunError, match=r"has metrics but no recipe\.toml.*--set out=FOLDER"):
        run.claim(_recipe(run.path))


def test_a_folder_that_cannot_be_written_is_a_run_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "run"):
        run = RunDirectory(path)
        with pytest.raises(RunError, match=r"cannot be written: .*--set out=FOLDER"):
            run.claim(_recipe(path))
        with pytest.raises(RunError, match="cannot be written"):
            run.create(_recipe(path))
        with pytest.raises(RunError, match="cannot be written"):
            run.append_metrics(make_row(1, 0.5))
        with pytest.raises(RunError, match="cannot be written"):
            run.append_event("finished")
    assert file.read_text() == "precious"


def test_a_folder_without_a_run_has_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory: it has no recipe\.toml"):
        RunDirectory(tmp_path).recipe()


def test_launches_are_recorded_one_after_another(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    first = json.loads(run.record_path.read_text())["id"]
    run.record_launch(start_step=0, world_size=2, device="cpu")
    run.record_launch(start_step=7, world_size=1, device="cpu")
    record = json.loads(run.record_path.read_text())
    assert record["id"] == first
    assert [(each["start_step"], each["world_size"]) for each in record["launches"]] == [
        (0, 2),
        (7, 1),
    ]
    assert {"longtake", "python", "torch"} <= record["launches"][0]["versions"].keys()


@pytest.mark.parametrize("damaged", [None, "", "{}", "[]", '{"launches": null}'])
def test_a_damaged_record_is_a_run_error(tmp_path: Path, damaged: str | None) -> None:
    run = _begin(tmp_path / "run")
    run.record_path.unlink()
    if damaged is not None:
        run.record_path.write_text(damaged)
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        run.record_launch(start_step=0)


def test_events_come_back_in_order(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    run.append_event("launched", step=0)
    run.append_event("sample_rejected", path="ä.mp4", reason="line one\nline two")
    first, second = read_json_lines(run.events_path)
    assert (first["event"], first["step"]) == ("launched", 0)
    assert (second["path"], second["reason"]) == ("ä.mp4", "line one\nline two")
    assert first["time"] <= second["time"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_json(path, {"step": 1})
    whole = path.read_bytes()
    append_json(path, {"step": 2})
    data = path.read_bytes()
    for end in range(len(whole), len(data)):
        path.write_bytes(data[:end])
        assert list(read_json_lines(path)) == [{"step": 1}]


def test_appending_after_half_a_line_loses_no_record(tmp_path: Path) -> None:
    """A write that a crash cut off does not swallow the next record after the restart."""
    path = tmp_path / "lines.jsonl"
    append_json(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    append_json(path, {"step": 2})
    append_json(path, {"step": 3})
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_of_a_step_that_was_run_twice_the_later_counts(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    for step, loss in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35), (4, 0.4)]:
        run.append_metrics(make_row(step, loss))
    found = [(row["step"], row["loss"]) for row in run.metrics()]
    assert found == [(1, 0.1), (2, 0.25), (3, 0.35), (4, 0.4)]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.checkpoint_steps() == []
    whole = [run.checkpoint_path(step) for step in (1000, 20, 123456789)]
    others = ["step_00002000.bak", ".step_00003000.partial", "step_4000", "step_", "other"]
    for path in [*whole, *(run.checkpoints_path / name for name in others)]:
        path.mkdir(parents=True)
        (path / "COMMITTED").write_text("{}")
    run.checkpoint_path(5000).mkdir()
    assert run.checkpoint_steps() == [20, 1000, 123456789]
    assert run.checkpoint_path(1000).name == "step_00001000"


def test_a_run_that_begins_beside_another_has_the_first_free_number(tmp_path: Path) -> None:
    out = tmp_path / "run.v1"
    assert beside(out) == out
    out.mkdir()
    assert beside(out) == out
    _begin(out)
    assert beside(out) == tmp_path / "run.v1-2"
    (tmp_path / "run.v1-2").write_text("somebody's")
    assert beside(out) == tmp_path / "run.v1-3"
    assert [path.name for path in tmp_path.iterdir() if path.name == "run.v1-3"] == []


def test_the_recipe_of_a_moved_run_is_refused_with_the_command_that_resumes_it(
    tmp_path: Path,
) -> None:
    """Training by it would resume another run, or begin a new one where the run was before."""
    run, moved = _begin(tmp_path / "run"), tmp_path / "moved"
    refuse_moved(run.recipe_path, run.recipe(), ())
    shutil.copytree(run.path, moved)
    kept = moved / "recipe.toml"
    with pytest.raises(RunError, match="moved or copied") as caught:
        refuse_moved(kept, run.recipe(), ())
    assert f"longtake train {kept} --set out={moved}\n" in str(caught.value)
    assert f"longtake train {run.recipe_path}" in str(caught.value)
    refuse_moved(kept, run.recipe(), [f"out={tmp_path / 'other'}"])


def test_another_learning_rate_is_refused_with_the_way_to_train_on(tmp_path: Path) -> None:
    run = _begin(tmp_path / "run")
    faster = config.changed(run.recipe(), ["optimizer.learning_rate=1e-5"])
    with pytest.raises(RecipeChangedError, match=f"--set out={run.path}-2 --from {run.path}\n"):
        run.claim(faster)
    other = config.changed(run.recipe(), ["model.dtype=bf16"])
    with pytest.raises(RecipeChangedError) as caught:
        run.claim(other)
    assert "--from" not in str(caught.value)
