"""Checks of a plan's data: drift, small buckets, missing files and columns, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.build import catalog_of, section, shape

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.checks import Drift, drifts, refuse_missing, refuse_wrong_catalogs, review
from longtake.data.clip import Media
from longtake.data.plan import begin
from longtake.errors import DataError


@pytest.fixture(scope="module")
def clips() -> Catalog:
    """Forty clips of 4 to 43 frames; the longer, the more nouns."""
    return catalog_of(
        range(40), num_frames=lambda n: 4 + n, attributes=lambda n: {"nouns": float(n)}
    )


def _reviewed(
    catalog: Catalog, data: DataSection, num_steps: int | None = None, batch_size: int = 4
) -> list[str]:
    return review(begin({"catalog": catalog}, data, batch_size, 0), data, num_steps)


_JUMP = [
    {"name": "easy", "epochs": 1, "where": ["nouns <= q50"]},
    {"name": "hard", "where": ["nouns > q50"]},
]


def test_a_plan_that_is_well_has_no_warnings(clips: Catalog) -> None:
    similar = [{"name": "a", "epochs": 1, "where": ["nouns > 2"]}, {"name": "b"}]
    assert _reviewed(clips, section()) == []
    assert _reviewed(clips, section(stages=similar), num_steps=100) == []


def test_stages_that_are_too_different_are_named_or_refused(clips: Catalog) -> None:
    frames = "stage hard: mean num_frames changes from 13.5 to 33.5, 3.5 standard deviations"
    nouns = "stage hard: mean nouns changes from 9.5 to 29.5, 3.5 standard deviations"
    assert _reviewed(clips, section(stages=_JUMP)) == [frames, nouns]
    assert _reviewed(clips, section(stages=_JUMP, drift_limit=3.5)) == []
    refusing: dict[str, Any] = {"on_drift": "refuse", "drift_limit": 2.0}
    with pytest.raises(DataError) as caught:
        _reviewed(clips, section(stages=_JUMP, **refusing))
    assert nouns in str(caught.value)
    assert "data.drift_limit = 2.0" in str(caught.value)
    near = section(stages=[_JUMP[0], {"name": "all"}], **refusing)
    assert _reviewed(clips, near) == []


def test_buckets_that_are_empty_or_smaller_than_a_batch_are_named() -> None:
    one, two, none = map(shape, (16, 32, 300))
    warnings = _reviewed(catalog_of(range(9)), section(buckets=[one, two, none]))
    assert warnings == [
        "stage all: no clip is for 4 frames of 300x16",
        "stage all: fewer clips than a batch of 4 are for 4 frames of 32x16 (3 clips): its batches "
        "reach over several epochs, and a clip may be in one batch twice",
    ]
    once = section(buckets=[one, two], stages=[{"name": "once", "epochs": 1}])
    assert _reviewed(catalog_of(range(9)), once) == [
        "stage once: fewer clips than a batch of 4 are for 4 frames of 32x16 (3 clips): its one "
        "batch is padded"
    ]


def test_stages_that_would_not_be_reached_are_named(clips: Catalog) -> None:
    stages = [{"name": "a", "steps": 50}, {"name": "b"}]
    data = section(stages=stages)
    assert _reviewed(clips, data, num_steps=51) == []
    assert _reviewed(clips, data, num_steps=None) == []
    (warning,) = _reviewed(clips, data, num_steps=50)
    assert warning == "stage b would begin at step 50; training ends before"


def test_stages_that_end_before_the_training_are_an_error(clips: Catalog) -> None:
    stages = [{"name": "a", "steps": 50}, {"name": "b", "epochs": 2}]
    data = section(stages=stages)
    end = begin({"catalog": clips}, data, 4, 0).end_step
    assert end == 50 + 20  # 26 and 14 clips, twice, by four
    assert _reviewed(clips, data, num_steps=end) == []
    message = (
        rf"end after step {end} \(a: 50, b: 20\), but training.steps is 71. Set training.steps"
    )
    with pytest.raises(DataError, match=message):
        _reviewed(clips, data, num_steps=end + 1)


def _drifts(catalogs: dict[str, Catalog], data: DataSection) -> dict[str, Drift]:
    return {drift.attribute: drift for drift in drifts(begin(catalogs, data, 4, 0).stages)}


def test_drift_is_measured_in_standard_deviations() -> None:
    clips = catalog_of(
        range(40),
        num_frames=lambda n: 4 + n,
        attributes=lambda n: {"nouns": float("nan") if n % 5 == 0 else float(n)},
    )
    stages = [
        {"name": "a", "where": ["num_frames < 12"], "epochs": 1},
        {"name": "b", "where": ["num_frames >= 12"]},
    ]
    found = _drifts({"catalog": clips}, section(stages=stages))
    frames, nouns = found["num_frames"], found["nouns"]
    assert (frames.before, frames.after) == (7.5, 27.5)
    assert frames.distance == pytest.approx(20 / np.std(np.arange(4, 12)))
    assert nouns.before == pytest.approx(np.mean([1, 2, 3, 4, 6, 7]))
    assert {drift.stage for drift in found.values()} == {"b"}
    assert found["fps"].distance == 0


def test_a_constant_that_moves_is_an_infinite_drift() -> None:
    """There is no scale to measure it by, but it must not pass for nothing."""
    clips = catalog_of(range(6), fps=lambda n: 8.0 if n < 3 else 16.0)
    stages = [
        {"name": "a", "where": ["fps < 10"], "epochs": 1},
        {"name": "b", "where": ["fps > 10"]},
    ]
    drift = _drifts({"catalog": clips}, section(stages=stages))["fps"]
    assert drift.distance == np.inf
    assert str(drift).endswith("changes from 8 to 16, and it was the same for all clips before")


def test_a_stage_of_other_catalogs_is_compared_too() -> None:
    short = catalog_of(range(30), num_frames=lambda n: 10)
    long = catalog_of(range(100, 110), num_frames=lambda n: 20)
    stages = [
        {"name": "a", "steps": 5, "weights": {"long": 0}},
        {"name": "b", "steps": 5, "weights": {"short": 3, "long": 1}},
        {"name": "c", "steps": 5, "weights": {"short": 0}},
    ]
    data = section(catalogs={"short": "s.parquet", "long": "l.parquet"}, stages=stages)
    plan = begin({"short": short, "long": long}, data, 4, 0)
    b, c = (drift for drift in drifts(plan.stages) if drift.attribute == "num_frames")
    assert (b.stage, b.before, b.after, b.distance) == ("b", 10, 12.5, np.inf)
    assert (c.stage, c.before, c.after) == ("c", 12.5, 20)
    assert c.distance == pytest.approx(7.5 / np.std([10, 10, 10, 20]))


def test_files_that_are_gone_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (tmp_path / f"{number}.mp4").touch()
    clips = catalog_of(range(5), media=lambda n: Media(str(tmp_path / f"{n}.mp4")))
    assert refuse_missing(clips, allowed=0) == []
    (tmp_path / "3.mp4").unlink()
    (said,) = refuse_missing(clips, allowed=1)
    assert said == f"1 of the catalog's 5 files are gone, such as {tmp_path}/3.mp4"
    with pytest.raises(DataError, match=r"1 of the catalog's 5 files are gone.*At most 0"):
        refuse_missing(clips, allowed=0)
    monkeypatch.setattr(
        "longtake.data.checks._MAX_PATHS", 3
    )  # of very many clips some speak for all
    for number in {0, 1, 2, 4}:
        (tmp_path / f"{number}.mp4").unlink()
    assert "3 of the catalog's 3 files that were looked for" in refuse_missing(clips, allowed=5)[0]
    with pytest.raises(DataError, match="At most 4"):
        refuse_missing(clips, allowed=4)


def test_a_trigger_that_nothing_replaces_is_refused() -> None:
    """The model would be trained on the letters of "[trigger]"."""
    catalogs = {
        "plain": catalog_of(range(3)),
        "mine": catalog_of([4], caption=lambda _: "a [trigger]"),
    }
    names = {"plain": "p.parquet", "mine": "m.parquet"}
    with pytest.raises(DataError, match=r"catalog mine 1 captions have \[trigger\]"):
        refuse_wrong_catalogs(catalogs, section(catalogs=names))
    refuse_wrong_catalogs(catalogs, section(catalogs=names, trigger="sks"))
    with pytest.raises(DataError, match=r"catalog mine"):
        refuse_wrong_catalogs(
            catalogs, section(catalogs=names, trigger="sks", captions={"mine": {"trigger": ""}})
        )
    with pytest.raises(DataError, match=r"catalog plain a prefix has \[trigger\]"):
        refuse_wrong_catalogs(
            catalogs, section(catalogs=names, captions={"plain": {"prefixes": ["a [trigger]"]}})
        )


def test_the_catalog_that_lacks_a_column_is_named() -> None:
    data = section(conditioning={"pose": {"kind": "picture", "column": "pose"}})
    with pytest.raises(DataError, match="the catalog plain has no column 'pose'"):
        refuse_wrong_catalogs({"plain": catalog_of(range(3))}, data)
