"""Drift over checkpoints, and the range of the clips that were trained on."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtake.config import Bucket, Recipe
from longtake.data.buckets import sample_window
from longtake.data.catalog import Catalog
from longtake.data.order import derive
from longtake.data.window import read_window
from longtake.evaluation import measures
from longtake.evaluation.measures import (
    MEASURES,
    Reference,
    Spread,
    base,
    find_drift,
    find_out_of_range,
    last_row,
    measure,
    reference_of,
)
from longtake.evaluation_dir import EvaluationDirectory
from longtake.run_dir import RunDirectory


def _alarms(values: list[float], name: str = "brightness", **changes: float) -> list[str]:
    rules = {"checkpoints": 4, "change": 0.05} | changes
    before = int(rules["checkpoints"]) - 1
    history = [{name: value} for value in [*values[:1] * before, *values]]
    steps = [*range(before), *(100 * (number + 1) for number in range(len(values)))]
    found = find_drift("low4s", history, steps, **rules)  # type: ignore[arg-type]
    return [alarm["message"] for alarm in found]


def test_brightness_that_rises_at_four_checkpoints_is_told_in_one_sentence() -> None:
    """How often, by how much, since when."""
    assert _alarms([120, 100, 102, 104, 107, 109]) == [
        "brightness of low4s rose 4 checkpoints in a row, +9 % (from step 200 to 600)."
    ]


def test_a_fall_is_told_as_one() -> None:
    assert _alarms([100, 95, 93, 91, 80]) == [
        "brightness of low4s fell 4 checkpoints in a row, -20 % (from step 100 to 500)."
    ]


@pytest.mark.parametrize(
    "values",
    [
        [100, 110, 120, 130],  # three times
        [100, 101, 102, 103, 104],  # 4 %
        [100, 110, 120, 120, 130, 140],  # it stood still between
        [100, 110, 120, 130, 140, 139],  # it is over
        [100],
    ],
)
def test_what_is_too_short_too_small_or_over_is_no_drift(values: list[float]) -> None:
    assert _alarms(values) == []


def test_a_checkpoint_without_the_measure_is_passed_over() -> None:
    a, b = "brightness", "contrast"
    history = [{a: 100.0}, {a: 100.0}, {a: 120.0, b: 1.0}, {b: 2.0}, {a: 130.0}]
    (alarm,) = find_drift("p", history, [0, 1, 2, 3, 4], checkpoints=2, change=0.05)
    assert alarm["message"].startswith("brightness of p rose 2 checkpoints in a row")
    assert (alarm["measure"], alarm["kind"]) == (a, "drift")


def test_near_zero_a_change_is_told_as_a_share_of_what_is_no_longer_small() -> None:
    """Motion from 0.01 to 0.05 is no fivefold; nor does 0 divide anything."""
    assert _alarms([0.0, 0.01, 0.02, 0.03, 0.05], "motion") == []
    (message,) = _alarms([4.0, 3, 2, 1, 0], "motion")
    assert "-80 %" in message  # of 5 % of the height a second


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_the_last_row_is_the_longest_monotonic_end(values: list[float]) -> None:
    row = last_row(values)
    assert values[-len(row) :] == row
    signs = {later > earlier for earlier, later in pairwise(row)}
    assert len(signs) <= 1
    assert all(later != earlier for earlier, later in pairwise(row))
    if len(row) < len(values) and len(row) > 1:
        before = values[-len(row) - 1]
        assert before == row[0] or (row[0] > before) != (row[1] > row[0])


@given(
    values=st.lists(st.floats(0, 255), min_size=1, max_size=10),
    seed=st.integers(0, 100),
    checkpoints=st.integers(2, 5),
)
def test_the_order_of_evaluation_makes_no_difference(
    values: list[float], seed: int, checkpoints: int
) -> None:
    rows = [(step, {"brightness": value}) for step, value in enumerate(values)]
    shuffled = [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]
    alarms = [
        find_drift(
            "p", [row for _, row in each], [step for step, _ in each], checkpoints=checkpoints
        )
        for each in (rows, shuffled)
    ]
    assert alarms[0] == alarms[1]


@given(values=st.lists(st.floats(0, 255), min_size=3, max_size=10), checkpoints=st.integers(2, 5))
def test_an_alarm_is_given_exactly_for_rows_that_are_long_and_change_enough(
    values: list[float], checkpoints: int
) -> None:
    rises = [later > earlier for earlier, later in pairwise(values)][-checkpoints:]
    falls = [later < earlier for earlier, later in pairwise(values)][-checkpoints:]
    is_long = len(rises) == checkpoints and (all(rises) or all(falls))
    row = last_row(values)
    is_much = abs(row[-1] - row[0]) >= 0.05 * max(16.0, row[0])
    found = _alarms(values, checkpoints=checkpoints)
    assert bool(found) == (is_long and is_much)


@given(st.sampled_from(sorted(MEASURES)), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
def test_what_changes_are_a_share_of_is_never_zero(name: str, row: list[float]) -> None:
    assert base(name, row) >= MEASURES[name].floor


_REFERENCE = Reference(
    64, {"brightness": Spread(40, 100, 180, 102), "duplicate_frames": Spread(0, 0, 0, 0)}
)


@pytest.mark.parametrize(
    ("measures", "told"),
    [
        ({"brightness": 150.0}, None),
        ({"brightness": 195.0}, None),  # within the margin: 16, the floor
        ({"brightness": 201.0}, "201; of 64 training clips 98 % lie between 40 and 180."),
        ({"brightness": 20.0}, "20; of 64 training clips 98 % lie between 40 and 180."),
        ({"duplicate_frames": 0.05}, None),
        ({"duplicate_frames": 0.5}, "0.5; of 64 training clips 98 % lie between 0 and 0."),
        ({"clip_score": 1e9}, None),
    ],
)
def test_a_mean_outside_of_what_training_clips_have_is_told(
    measures: dict[str, float], told: str | None
) -> None:
    found = find_out_of_range("low4s", measures, _REFERENCE)
    assert [alarm["kind"] for alarm in found] == ["range"] * bool(told)
    if told:
        (name,) = measures
        assert found[0]["message"] == f"{name} of low4s is {told}"


def test_what_comes_nearer_to_the_training_s_clips_is_learnt() -> None:
    reference = Reference(64, {"brightness": Spread(low=20, median=40, high=60, mean=40)})

    def told(values: list[float]) -> int:
        history = [{"brightness": value} for value in [*values[:1] * 3, *values]]
        return len(find_drift("demo", history, range(len(history)), reference))

    assert told([10, 20, 30, 35, 40]) == 0
    assert told([10, 30, 40, 50, 69]) == 0
    assert told([10, 30, 40, 50, 71]) == 1
    assert told([40, 41, 42, 43, 44]) == 1


def test_what_moves_while_a_model_learns_is_no_drift() -> None:
    frame_change = [7.68, 7.85, 8.49, 8.81, 8.97, 9.17]
    contrast = [40.0, 41.0, 42.0, 43.0, 43.5, 44.0]
    history = [
        {"frame_change": a, "contrast": b} for a, b in zip(frame_change, contrast, strict=True)
    ]
    assert find_drift("demo", history, range(6)) == []


def test_a_drift_counts_from_the_checkpoint_at_which_the_measure_had_been_learnt() -> None:
    reference = Reference(64, {"brightness": Spread(low=60, median=70, high=80, mean=70)})

    def told(values: list[float]) -> int:
        history = [{"brightness": value} for value in values]
        return len(find_drift("demo", history, range(len(values)), reference))

    assert told([20, 22, 21, 20, 18, 15, 10, 5]) == 0  # never within the range: a range alarm
    assert told([20, 25, 20, 30, 70, 80, 90, 100]) == 0  # three times since it was within
    assert told([20, 25, 20, 30, 70, 80, 90, 100, 110]) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("frame_change", (0, 0)),
        ("largest_jump", (0, 0)),
        ("flicker", (1, 0)),
        ("sharpness", (0, 1)),
        ("contrast", (1, 1)),
    ],
)
def test_only_a_direction_that_is_a_known_failure_is_told(name: str, told: tuple[int, int]) -> None:
    rising = [100.0, 110, 120, 130, 140]
    assert (len(_alarms(rising, name)), len(_alarms(rising[::-1], name))) == told


def test_a_measure_that_is_not_ours_is_not_judged() -> None:
    assert _alarms([0.1, 0.2, 0.4, 0.6, 0.9], name="adherence") == []


_FPS = 8.0


def _recipe(recipe: Recipe, **changes: object) -> Recipe:
    section = recipe.evaluation.model_copy(update=changes)
    return recipe.model_copy(update={"evaluation": section})


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(tiny_run / "catalogs", tmp_path / "run" / "catalogs")
    return RunDirectory(tmp_path / "run")


def test_it_is_the_measures_of_the_first_clips_by_identity_read_as_in_training(
    run: RunDirectory, tiny_recipe: Recipe, shapes_catalog: Path
) -> None:
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
    bucket = Bucket(num_frames=4, height=32, width=32)
    recipe = _recipe(tiny_recipe, reference_clips=3)
    first, _ = reference_of(run, recipe, "demo", bucket, _FPS)
    path = EvaluationDirectory(run).reference_path("demo")
    assert path.is_file()
    with monkeypatch.context() as patch:
        patch.setattr(measures, "read_window", None)  # nothing is decoded again
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
