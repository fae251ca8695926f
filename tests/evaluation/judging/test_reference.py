"""Measures of training clips: which, read how, and kept."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from longtake.config import Bucket, Recipe
from longtake.data.catalog import Catalog
from longtake.data.order import derive
from longtake.data.sample import sample_window
from longtake.data.window import read_window
from longtake.evaluation.judging import reference
from longtake.evaluation.judging.reference import reference_of
from longtake.evaluation.measures import measure
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory

_FPS = 8.0


def _recipe(recipe: Recipe, **changes: object) -> Recipe:
    section = recipe.evaluation.model_copy(update=changes)
    return recipe.model_copy(update={"evaluation": section})


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> RunDirectory:
    """A run directory with nothing but copies of its catalogs."""
    shutil.copytree(tiny_run / "catalogs", tmp_path / "run" / "catalogs")
    return RunDirectory(tmp_path / "run")


def test_it_is_the_measures_of_the_first_clips_by_identity_read_as_in_training(
    run: RunDirectory, tiny_recipe: Recipe, shapes_catalog: Path
) -> None:
    """In the preset's size; each number a quantile over those clips."""
    recipe, bucket = (
        _recipe(tiny_recipe, reference_clips=5),
        Bucket(num_frames=4, height=16, width=32),
    )
    found, remark = reference_of(run, recipe, "demo", bucket, _FPS)
    assert remark == ""
    assert found is not None
    assert found.num_clips == 5
    catalog, values = Catalog.load(shapes_catalog), []
    for row in range(5):
        clip = catalog.clip(row)
        seed = derive("reference", clip.identity)
        pixels = read_window(sample_window(clip, bucket, recipe.data, seed))
        assert pixels.shape == (3, 4, 16, 32)
        values.append(measure(pixels.transpose(1, 2, 3, 0), _FPS)["brightness"])
    spread = found.measures["brightness"]
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.median == pytest.approx(np.median(values))
    assert min(values) <= spread.low <= spread.high <= max(values)


def test_it_is_made_once_and_again_when_something_else_is_asked_for(
    run: RunDirectory, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept in reference.json, with what it is of."""
    bucket = Bucket(num_frames=4, height=32, width=32)
    recipe = _recipe(tiny_recipe, reference_clips=3)
    first, _ = reference_of(run, recipe, "demo", bucket, _FPS)
    path = EvaluationDirectory(run).reference_path("demo")
    assert path.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(reference, "read_window", None)  # nothing is decoded again
        assert reference_of(run, recipe, "demo", bucket, _FPS) == (first, "")
    more, _ = reference_of(run, _recipe(tiny_recipe, reference_clips=4), "demo", bucket, _FPS)
    assert more is not None
    assert more.num_clips == 4
    path.write_text("{half")
    assert reference_of(run, recipe, "demo", bucket, _FPS) == (first, "")


def test_each_clip_is_told_of_before_it_is_decoded(run: RunDirectory, tiny_recipe: Recipe) -> None:
    """So that whoever is asked to end can, at any of them; a reference that is kept needs none."""
    bucket = Bucket(num_frames=4, height=16, width=16)
    recipe, told = _recipe(tiny_recipe, reference_clips=3), list[int]()

    def end_at_the_second() -> None:
        told.append(len(told))
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference_of(run, recipe, "demo", bucket, _FPS, end_at_the_second)
    assert not EvaluationDirectory(run).reference_path("demo").exists()
    for expected in (5, 5):
        reference_of(run, recipe, "demo", bucket, _FPS, lambda: told.append(0))
        assert len(told) == expected


def test_where_clips_cannot_be_read_there_is_a_remark_and_no_error(
    run: RunDirectory, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    """On another machine the clips are not there, or the catalogs' copies are not; or too short."""
    bucket = Bucket(num_frames=8, height=32, width=32)
    long = Bucket(num_frames=100, height=32, width=32)
    found, remark = reference_of(run, tiny_recipe, "low16s", long, _FPS)
    assert found is None
    assert remark.startswith("low16s is compared with no training clips: no clip has 100 frames")
    (path,) = run.catalogs_path.glob("*.parquet")
    catalog = Catalog.load(path)
    table = catalog.table
    gone = ["/nowhere/" + Path(each).name for each in table["path"].to_pylist()]
    table = table.set_column(table.column_names.index("path"), "path", [gone])
    Catalog(table, catalog.set_aside).save(path)
    found, remark = reference_of(run, tiny_recipe, "demo", bucket, _FPS)
    assert found is None
    assert "demo is compared with no training clips: /nowhere/" in remark
    assert not EvaluationDirectory(run).reference_path("demo").exists()
    found, remark = reference_of(RunDirectory(tmp_path), tiny_recipe, "demo", bucket, _FPS)
    assert found is None
    assert "has no copies of the catalogs" in remark


def test_a_clip_that_cannot_be_read_is_replaced_by_the_next(
    run: RunDirectory, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    """One damaged file among many costs nothing but itself."""
    (path,) = run.catalogs_path.glob("*.parquet")
    clips = list(Catalog.load(path).clips())[:4]
    folder = tmp_path / "clips"
    folder.mkdir()
    for clip in clips[1:]:
        shutil.copy(clip.path, folder)
    table = Catalog.of(clips).table
    paths = [str(folder / Path(clip.path).name) for clip in clips]
    table = table.set_column(table.column_names.index("path"), "path", [paths])
    Catalog(table, Catalog.of([]).set_aside).save(path)
    bucket = Bucket(num_frames=8, height=32, width=32)
    found, _ = reference_of(run, _recipe(tiny_recipe, reference_clips=4), "demo", bucket, _FPS)
    assert found is not None
    assert found.num_clips == 3


def test_no_clips_wanted_is_no_reference_and_no_remark(
    run: RunDirectory, tiny_recipe: Recipe
) -> None:
    """reference_clips = 0 turns it off."""
    bucket = Bucket(num_frames=8, height=32, width=32)
    recipe = _recipe(tiny_recipe, reference_clips=0)
    assert reference_of(run, recipe, "demo", bucket, _FPS) == (None, "")
