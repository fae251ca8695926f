"""People change their minds: what they take away, put back, move and lengthen stays exact."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Media
from longtake.data.course import Course, keep_catalogs, resume, start
from longtake.data.files import refuse_missing
from longtake.data.loader import Loader
from longtake.errors import DataChangedError, DataError

_CatalogOf = Callable[..., Catalog]
_Section = Callable[..., DataSection]
_Seen = dict[tuple[str, int], Counter[str]]


def _train(course: Course, steps: range, seen: _Seen) -> None:
    for step in steps:
        batch = course.batch(step)
        for row, epoch in zip(batch.rows, batch.epochs, strict=True):
            key = (f"{batch.stage}/{batch.source}", epoch)
            seen.setdefault(key, Counter())[batch.catalog.clip(int(row)).identity] += 1


def _again(
    course: Course,
    step: int,
    catalogs: dict[str, Catalog],
    data: DataSection,
    kept: Path | None = None,
) -> Course:
    return resume(course.history, step, catalogs, data, 2, 0, kept)


def _stage(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, **values}


@pytest.fixture(scope="module")
def clips(catalog_of: _CatalogOf) -> Catalog:
    """Twenty clips of one bucket."""
    return catalog_of(range(20), width=lambda _: 16)


def test_a_catalog_that_comes_back_goes_on_where_it_was(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """Its weight was 0 for a while; nothing of its open epoch is trained twice or left out."""
    catalogs = {"a": catalog_of(range(20)), "b": catalog_of(range(100, 120))}
    paths = {"a": "a.parquet", "b": "b.parquet"}
    seen: _Seen = {}
    course = start(catalogs, section(catalogs=paths), 2, 0)
    _train(course, range(8), seen)
    without = section(catalogs=paths, weights={"b": 0}, on_change="merge")
    course = _again(course, 8, catalogs, without)
    _train(course, range(8, 13), seen)
    back = section(catalogs=paths, on_change="merge")
    course = _again(course, 13, catalogs, back)
    _train(course, range(13, 60), seen)
    for key, counts in seen.items():
        assert max(counts.values()) == 1, key
    assert len(seen["all/b", 0]) == len(seen["all/a", 0]) == 20


@pytest.mark.parametrize("policy", ["merge", "finish"])
def test_a_catalog_that_is_renamed_is_refused(
    clips: Catalog, catalog_of: _CatalogOf, section: _Section, policy: str, tmp_path: Path
) -> None:
    """Its epochs would begin anew; the message says which name to keep, and with it all is well."""
    course = start({"catalog": clips}, section(), 2, 0)
    keep_catalogs(course, {"catalog": clips}, tmp_path)
    new = catalog_of(range(50, 60))
    renamed = section(catalogs={"old": "o.parquet", "new": "n.parquet"}, on_change=policy)
    message = r"no longer trains on the catalog catalog, but on new, old.*keep its name"
    with pytest.raises(DataChangedError, match=message):
        _again(course, 5, {"old": clips, "new": new}, renamed, tmp_path)
    same = section(catalogs={"catalog": "o.parquet", "new": "n.parquet"}, on_change=policy)
    seen: _Seen = {}
    _train(course, range(5), seen)
    course = _again(course, 5, {"catalog": clips, "new": new}, same)
    _train(course, range(5, 30), seen)
    assert seen["all/catalog", 0] == Counter({clip.identity: 1 for clip in clips.clips()})


def test_a_stage_that_is_over_does_not_come_again(clips: Catalog, section: _Section) -> None:
    """However the recipe's stages are ordered afterwards."""
    a, b = _stage("a", epochs=1), _stage("b", epochs=1)
    course = start({"catalog": clips}, section(stages=[a, b]), 2, 0)
    seen: _Seen = {}
    _train(course, range(13), seen)
    swapped = section(stages=[b, a], on_change="merge")
    course = _again(course, 13, {"catalog": clips}, swapped)
    assert course.end_step == 20
    _train(course, range(13, 20), seen)
    everyone = Counter({clip.identity: 1 for clip in clips.clips()})
    assert seen == {("a/catalog", 0): everyone, ("b/catalog", 0): everyone}


@pytest.mark.parametrize(
    ("before", "after", "end"),
    [({"epochs": 2}, {"epochs": 3}, 30), ({"steps": 20}, {"steps": 30}, 30)],
)
def test_a_curriculum_that_has_ended_can_be_made_longer(
    clips: Catalog,
    section: _Section,
    before: dict[str, int],
    after: dict[str, int],
    end: int,
    tmp_path: Path,
) -> None:
    """At its end, and also after a change there that left nothing to do."""
    data = section(stages=[_stage("one", **before)])
    course = start({"catalog": clips}, data, 2, 0)
    assert course.end_step == 20
    keep_catalogs(course, {"catalog": clips}, tmp_path)
    seen: _Seen = {}
    _train(course, range(20), seen)
    idle = section(stages=[_stage("one", **before)], on_change="merge")
    fewer = Catalog.of(list(clips.clips())[:19])
    course = _again(course, 20, {"catalog": fewer}, idle, tmp_path)
    assert course.end_step == 20
    keep_catalogs(course, {"catalog": fewer}, tmp_path)
    longer = section(stages=[_stage("one", **after)], on_change="merge")
    course = _again(course, 20, {"catalog": clips}, longer, tmp_path)
    assert course.end_step == end
    _train(course, range(20, end), seen)
    assert sorted(epoch for _, epoch in seen) == [0, 1, 2]
    assert all(set(counts.values()) == {1} and len(counts) == 20 for counts in seen.values())


def test_steps_are_those_of_the_whole_stage(clips: Catalog, section: _Section) -> None:
    """Whatever said before how long it was."""
    for before in ({"steps": 40}, {"epochs": 9}):
        course = start({"catalog": clips}, section(stages=[_stage("one", **before)]), 2, 0)
        data = section(stages=[_stage("one", steps=25)], on_change="merge")
        assert _again(course, 15, {"catalog": clips}, data).end_step == 25


def test_a_change_shortly_before_a_ramp_shortens_it(clips: Catalog, section: _Section) -> None:
    """There is no longer room for all of it."""
    stages = [_stage("a", steps=100), _stage("b", steps=100, ramp_steps=40)]
    course = start({"catalog": clips}, section(stages=stages), 2, 0)
    for step in range(75, 100):
        data = section(stages=stages, on_change="merge", frame_stride=2)
        assert _again(course, step, {"catalog": clips}, data).end_step == 200


def test_a_second_score_is_no_change(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """Although `difficulty` now could mean either: the run knows what it was."""
    one = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    two = catalog_of(range(20), attributes=lambda n: {"nouns": float(n), "motion": 1.0})
    stages = [_stage("easy", where=["difficulty <= q50"])]
    course = start({"catalog": one}, section(stages=stages), 2, 0)
    keep_catalogs(course, {"catalog": one}, tmp_path)
    data = section(stages=stages, difficulty="nouns", on_change="merge")
    again = resume(course.history, 3, {"catalog": two}, data, 2, 0, tmp_path)
    seen: _Seen = {}
    _train(again, range(5), seen)
    assert sum(seen["easy/catalog", 0].values()) == len(seen["easy/catalog", 0]) == 10


def test_finishing_reads_clips_where_they_lie_now(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """They were moved, and the kept catalog knows only the old place."""
    before = catalog_of(range(10), media=lambda n: Media(f"/old/{n}.mp4"))
    after = catalog_of(range(1, 10), media=lambda n: Media(f"/new/{n}.mp4"))
    course = start({"catalog": before}, section(), 2, 0)
    keep_catalogs(course, {"catalog": before}, tmp_path)
    data = section(on_change="finish")
    course = resume(course.history, 2, {"catalog": after}, data, 2, 0, tmp_path)
    batches = [course.batch(step) for step in range(2, 5)]
    paths = {batch.catalog.clip(int(row)).path for batch in batches for row in batch.rows}
    assert len(paths) == 6
    assert all(path.startswith("/new/") for path in paths - {"/old/0.mp4"})


def test_a_refused_state_leaves_the_loader_as_it_was(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """Whoever catches the error does not go on somewhere else without knowing."""
    path = tmp_path / "c.parquet"
    catalog_of(range(10)).save(path)
    state = Loader(section(catalog=path), batch_size=2).state_dict() | {"global_step": 3}
    catalog_of(range(12)).save(path)
    loader = Loader(section(catalog=path), batch_size=2)
    with pytest.raises(DataChangedError):
        loader.load_state_dict(state)
    assert (loader.step, loader.quarantined) == (0, {})


def test_files_that_are_gone_are_counted_and_named(catalog_of: _CatalogOf, tmp_path: Path) -> None:
    """Few are said, too many are refused; none are no word."""
    for number in range(5):
        (tmp_path / f"{number}.mp4").touch()
    clips = catalog_of(range(5), media=lambda n: Media(str(tmp_path / f"{n}.mp4")))
    assert refuse_missing(clips, allowed=0) == []
    (tmp_path / "3.mp4").unlink()
    (said,) = refuse_missing(clips, allowed=1)
    assert said == f"1 of the catalog's 5 files are gone, such as {tmp_path}/3.mp4"
    with pytest.raises(DataError, match=r"1 of the catalog's 5 files are gone.*At most 0"):
        refuse_missing(clips, allowed=0)
