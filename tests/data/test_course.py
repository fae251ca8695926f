"""A run's record rebuilds its plans; whatever changed is refused, or gone on with exactly."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.course import Course, keep_catalogs, resume, start
from longtake.data.plan import PlannedBatch
from longtake.errors import DataChangedError, DataError

_CatalogOf = Callable[..., Catalog]
_Section = Callable[..., DataSection]
_ONCE = {"name": "only", "epochs": 3}


def _catalogs(catalog: Catalog) -> dict[str, Catalog]:
    return {"catalog": catalog}


def _begun(
    catalogs: Mapping[str, Catalog], data: DataSection, kept: Path, batch_size: int = 4
) -> Course:
    course = start(catalogs, data, batch_size, 0)
    keep_catalogs(course, catalogs, kept)
    return course


def _gone_on(
    course: Course,
    step: int,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    kept: Path,
    batch_size: int = 4,
) -> Course:
    """What another process makes of the record, as a checkpoint holds it."""
    history = json.loads(json.dumps(course.history))
    found = resume(history, step, catalogs, data, batch_size, 0, kept)
    keep_catalogs(found, catalogs, kept)
    return found


def _identities(course: Course, steps: range) -> list[list[str]]:
    return [_names(course.batch(step)) for step in steps]


def _names(planned: PlannedBatch) -> list[str]:
    found = planned.catalog.identities.take(pa.array(planned.rows)).to_pylist()
    return [identity.hex() for identity in found]


def _epoch_end(course: Course, epoch: int) -> int:
    """The step after an epoch's last one."""
    end = course.end_step
    assert end is not None
    return next(step for step in range(end) if course.batch(step).epoch > epoch)


def test_where_a_run_stands_is_small_and_json(
    changed_catalogs: dict[str, Catalog], section: _Section
) -> None:
    """Stage, epoch, step in the epoch and cursors; an epoch's end is the next one's beginning."""
    course = start(_catalogs(changed_catalogs["same"]), section(stages=[_ONCE]), 4, 0)
    end = _epoch_end(course, 0)
    before, after = course.position(end - 1), course.position(end)
    assert (before["epoch"], before["step_in_epoch"]) == (0, end - 1)
    assert (after["epoch"], after["step_in_epoch"]) == (1, 0)
    assert after["cursors"] == {"only/catalog": end}
    assert course.end_step == 31  # 3 x 26 and 3 x 14 clips
    assert course.position(31) == {
        "stage": None,
        "epoch": None,
        "step_in_epoch": 0,
        "cursors": {"only/catalog": 31},
    }
    assert len(json.dumps([after, course.history])) < 1500


def test_nothing_changed_is_the_same_course(
    changed_catalogs: dict[str, Catalog], section: _Section, tmp_path: Path
) -> None:
    """Neither the record nor a batch is another, whatever `on_change` says."""
    catalogs = _catalogs(changed_catalogs["same"])
    data = section(stages=[_ONCE])
    course = start(catalogs, data, 4, 0)
    for policy in ("refuse", "merge", "finish", "restart"):
        again = _gone_on(course, 7, catalogs, section(stages=[_ONCE], on_change=policy), tmp_path)
        assert again.history == course.history
        assert not again.changes
        assert _identities(again, range(31)) == _identities(course, range(31))


def test_a_change_is_refused_with_names_and_counts(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """What was added, removed and changed, with examples, and the three ways to go on."""
    old = catalog_of(range(10))
    new = catalog_of(
        [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23],
        caption=lambda n: "renamed" if n == 1 else f"clip {n}",
        num_frames=lambda n: 9 if n in (2, 3) else 8,
        media=lambda n: catalog_of([8 if n == 20 else n]).clip(0).media,
    )
    course = _begun(_catalogs(old), section(), tmp_path)
    with pytest.raises(DataChangedError) as caught:
        resume(course.history, 3, _catalogs(new), section(), 2, 0, tmp_path)
    message = str(caught.value)
    assert message.startswith("What is trained on has changed since step 3:\n")
    assert (
        "the catalog c.parquet: 4 clips added, 2 removed, 1 with another caption, 2 of another "
        "shape; 1 files have another content\n" in message
    )
    assert message.count("added: ") == 3
    assert message.count("changed: ") == 3
    assert message.count("removed: ") == 2
    assert "training.batch_size was 4 and is 2" in message
    for policy in ("merge", "finish", "restart"):
        assert f"\n  {policy} " in message


def test_without_the_kept_catalog_a_change_is_refused_still(
    changed_catalogs: dict[str, Catalog], section: _Section, tmp_path: Path
) -> None:
    """It can be told by the fingerprint alone; going on cannot do without what it held then."""
    course = start(_catalogs(changed_catalogs["same"]), section(), 4, 0)
    grown = _catalogs(changed_catalogs["grown"])
    for kept in (None, tmp_path):
        with pytest.raises(DataChangedError, match=r"c\.parquet: its clips have changed"):
            resume(course.history, 3, grown, section(), 4, 0, kept)
        with pytest.raises(DataChangedError, match=r"not keep it\. Restore the catalog"):
            resume(course.history, 3, grown, section(on_change="merge"), 4, 0, kept)


def _all(catalogs: Mapping[str, Catalog]) -> set[str]:
    return {each.hex() for catalog in catalogs.values() for each in catalog.identities.to_pylist()}


_Moment = Literal["mid-epoch", "before its last batch", "after its last batch"]
_WORLDS = (1, 2, 4)


def _train(course: Course, steps: range, world_size: int, oracle: Any) -> None:
    """Consume batches as ranks share them."""
    for step in steps:
        planned = course.batch(step)
        local, samples = planned.batch_size // world_size, _names(planned)
        for rank in range(world_size):
            mine = slice(rank * local, (rank + 1) * local)
            for identity, epoch in zip(samples[mine], planned.epochs[mine], strict=True):
                oracle.consume(epoch, identity)


@pytest.mark.parametrize("is_second", [False, True], ids=["once", "second in a row"])
@pytest.mark.parametrize("moment", ["mid-epoch", "before its last batch", "after its last batch"])
@pytest.mark.parametrize(
    "change", ["same", "grown", "shrunk", "halved", "one removed", "one re-encoded", "swapped"]
)
def test_whatever_changes_and_whenever(
    changed_catalogs: dict[str, Catalog],
    section: _Section,
    oracle_of: Callable[[Catalog, int], Any],
    tmp_path: Path,
    change: str,
    moment: _Moment,
    is_second: bool,
) -> None:
    """Each policy, on ranks that may be others after: 0 repeated, 0 missing; `refuse` refuses."""
    first, other = _catalogs(changed_catalogs["same"]), _catalogs(changed_catalogs[change])
    course = _begun(first, section(stages=[_ONCE]), tmp_path)
    end = _epoch_end(course, 0)
    step = {"mid-epoch": 5, "before its last batch": end - 1, "after its last batch": end}[moment]
    if change != "same":
        with pytest.raises(DataChangedError):
            resume(course.history, step, other, section(stages=[_ONCE]), 4, 0, tmp_path)
    for number, policy in enumerate(("finish", "merge", "restart")):
        data = section(stages=[_ONCE], on_change=policy)
        for before, after in [(_WORLDS[number], world) for world in _WORLDS]:
            oracle = oracle_of(first["catalog"], 3)
            _train(course, range(step), before, oracle)
            if change != "same":
                oracle.change(policy, _all(other), course.position(step)["epoch"])
            going, at = _gone_on(course, step, other, data, tmp_path), step
            if is_second:
                at += 3
                _train(going, range(step, at), after, oracle)
                refusing = section(stages=[_ONCE])
                going = _gone_on(going, at, other, refusing, tmp_path)  # nothing changed since
            assert going.end_step is not None
            _train(going, range(at, going.end_step), after, oracle)
            oracle.check()


def test_a_chain_of_changes_is_rebuilt_from_the_record(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path, oracle_of: Callable[..., Any]
) -> None:
    """Four plans, other clips and batch sizes: another process makes the same batches of each."""
    catalog = catalog_of(range(23))
    oracle = oracle_of(catalog, 3)
    course, step = _begun(_catalogs(catalog), section(stages=[_ONCE]), tmp_path), 0
    for policy, numbers, batch_size in (
        ("merge", range(5, 30), 4),
        ("finish", range(5, 30), 3),
        ("merge", range(12), 2),
    ):
        _train(course, range(step, step + 4), 1, oracle)
        step += 4
        catalog = catalog_of(numbers)
        oracle.change(policy, _all(_catalogs(catalog)), course.position(step)["epoch"])
        data = section(stages=[_ONCE], on_change=policy)
        course = _gone_on(course, step, _catalogs(catalog), data, tmp_path, batch_size)
    assert [plan.version for plan in course.plans] == [0, 1, 2, 3]
    assert [entry["policy"] for entry in course.history] == ["start", "merge", "finish", "merge"]
    assert "training.batch_size was 3 and is 2" in course.changes
    assert course.end_step is not None
    _train(course, range(step, course.end_step), 1, oracle)
    oracle.check()
    again = _gone_on(course, step, _catalogs(catalog), section(stages=[_ONCE]), tmp_path, 2)
    every = range(course.end_step)
    assert _identities(again, every) == _identities(course, every)


@pytest.mark.parametrize("policy", ["finish", "merge", "restart"])
def test_what_the_newest_plan_was_made_from_is_kept(
    changed_catalogs: dict[str, Catalog], section: _Section, tmp_path: Path, policy: str
) -> None:
    """Also in the last epoch, which `finish` ends on the old clips and `restart` cuts short."""
    once = {"name": "only", "epochs": 1}
    course = _begun(_catalogs(changed_catalogs["same"]), section(stages=[once]), tmp_path)
    data = section(stages=[once], on_change=policy)
    for name in ("grown", "shrunk"):
        course = _gone_on(course, 4, _catalogs(changed_catalogs[name]), data, tmp_path)
    assert len(course.plans) == 3


def test_a_catalog_without_a_share_need_not_be_there_later(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """A run can go on from what was kept although a catalog of weight 0 has changed."""
    both = {"a": "a.parquet", "b": "b.parquet"}
    data = section(catalogs=both, weights={"b": 0.0})
    one = catalog_of(range(12))
    course = _begun({"a": one, "b": catalog_of(range(20, 29))}, data, tmp_path)
    data = section(catalogs=both, weights={"b": 0.0}, on_change="merge")
    going = _gone_on(course, 2, {"a": one, "b": catalog_of(range(20, 25))}, data, tmp_path)
    assert len({tuple(each) for each in _identities(going, range(6))}) == 6


def test_a_catalog_that_had_weights_may_be_left_out(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """The other one's epoch goes on exactly; the record still names the catalog that is gone."""
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    both = {"a": "a.parquet", "b": "b.parquet"}
    course = _begun({"a": a, "b": b}, section(catalogs=both, weights={"b": 2.0}), tmp_path)
    batches = [course.batch(step) for step in range(4)]
    seen = [int(row) for each in batches if each.source == "a" for row in each.rows]
    data = section(catalogs={"a": "a.parquet"}, on_change="merge")
    going = _gone_on(course, 4, {"a": a}, data, tmp_path)
    assert "the catalog b is no longer used" in going.changes
    batch_count = (12 - len(seen)) // 4
    seen += [int(row) for step in range(4, 4 + batch_count) for row in going.batch(step).rows]
    assert sorted(seen) == list(range(12))
    again = _gone_on(going, 6, {"a": a}, section(catalogs={"a": "a.parquet"}), tmp_path)
    assert _identities(again, range(9)) == _identities(going, range(9))


def test_a_catalog_may_be_added(catalog_of: _CatalogOf, section: _Section, tmp_path: Path) -> None:
    """It begins its own epochs; the first one's go on."""
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    one, both = {"a": "a.parquet"}, {"a": "a.parquet", "b": "b.parquet"}
    course = _begun({"a": a}, section(catalogs=one), tmp_path)
    with pytest.raises(DataChangedError, match=r"the catalog b is new \(12 clips\)"):
        _gone_on(course, 1, {"a": a, "b": b}, section(catalogs=both), tmp_path)
    data = section(catalogs=both, on_change="merge")
    going = _gone_on(course, 1, {"a": a, "b": b}, data, tmp_path)
    batches = [going.batch(step) for step in range(9)]
    for source in ("a", "b"):
        samples = [
            (epoch, int(row))
            for each in batches
            for row, epoch in zip(each.rows, each.epochs, strict=True)
            if each.source == source
        ]
        assert len(set(samples)) == len(samples)
        assert {row for epoch, row in samples if epoch == 0} == set(range(12))
    assert {each.source for each in batches[1:]} == {"a", "b"}


def test_a_later_stages_condition_may_change(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """Refused unless asked for; the stage that the run is in goes on exactly."""
    clips = catalog_of(range(20), num_frames=lambda n: 4 + n)
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "epochs": 1, "where": ["num_frames > 10"]}]
    changed = [stages[0], {**stages[1], "where": ["num_frames > 20"]}]
    course = _begun(_catalogs(clips), section(stages=stages), tmp_path)
    with pytest.raises(DataChangedError, match=r"data\.stages was .*> 10.* and is .*> 20"):
        _gone_on(course, 2, _catalogs(clips), section(stages=changed), tmp_path)
    data = section(stages=changed, on_change="merge")
    going = _gone_on(course, 2, _catalogs(clips), data, tmp_path)
    assert going.end_step is not None
    batches = [going.batch(step) for step in range(going.end_step)]
    rows = {
        stage: sorted(int(row) for each in batches if each.stage == stage for row in each.rows)
        for stage in ("a", "b")
    }
    hard = np.flatnonzero(clips.column("num_frames") > 20)
    assert rows == {"a": list(range(20)), "b": hard.tolist()}


def test_a_stage_may_become_longer(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """A stage of steps takes those that it has more; what it has done counts."""
    clips = catalog_of(range(20))
    stages = [{"name": "a", "steps": 6}, {"name": "b"}]
    course = _begun(_catalogs(clips), section(stages=stages), tmp_path)
    longer = [{"name": "a", "steps": 9}, {"name": "b"}]
    data = section(stages=longer, on_change="merge")
    going = _gone_on(course, 4, _catalogs(clips), data, tmp_path)
    assert [going.batch(step).stage for step in range(12)] == ["a"] * 9 + ["b"] * 3
    shorter = [{"name": "a", "steps": 2}, {"name": "b"}]
    data = section(stages=shorter, on_change="merge")
    going = _gone_on(course, 4, _catalogs(clips), data, tmp_path)
    assert [going.batch(step).stage for step in range(6)] == ["a"] * 4 + ["b"] * 2


def test_the_stage_a_run_is_in_cannot_vanish(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """What would the rest of it be? It is named, with those that there are."""
    clips = _catalogs(catalog_of(range(20)))
    course = _begun(clips, section(stages=[{"name": "a", "steps": 6}, {"name": "b"}]), tmp_path)
    data = section(stages=[{"name": "c", "steps": 5}, {"name": "b"}], on_change="merge")
    with pytest.raises(DataChangedError, match=r"in stage a, which is no longer among .*: c, b"):
        _gone_on(course, 4, clips, data, tmp_path)
    assert _gone_on(course, 6, clips, data, tmp_path).batch(6).stage == "b"


def test_scores_that_select_otherwise_are_a_change(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """Attributes are not in the fingerprint; what a stage selects by them is."""
    stages = [{"name": "easy", "epochs": 2, "where": ["nouns <= q50"]}]
    old = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    course = _begun(_catalogs(old), section(stages=stages), tmp_path, 2)
    scores = old.column("nouns")
    scaled = _catalogs(old.with_attribute("nouns", scores * 2 + 1))
    same = _gone_on(course, 3, scaled, section(stages=stages), tmp_path, 2)
    assert same.history == course.history
    turned = _catalogs(old.with_attribute("nouns", -scores))
    with pytest.raises(DataChangedError, match="attributes of the clips have changed, and stages"):
        _gone_on(course, 3, turned, section(stages=stages), tmp_path, 2)
    data = section(stages=stages, on_change="merge")
    going = _gone_on(course, 3, turned, data, tmp_path, 2)
    seen = [int(row) for step in range(3) for row in course.batch(step).rows]
    assert going.end_step is not None
    for step in range(3, going.end_step):
        batch = going.batch(step)
        seen += [int(row) for row, e in zip(batch.rows, batch.epochs, strict=True) if e == 0]
    assert len(set(seen)) == len(seen)
    assert {int(row) for row in np.flatnonzero(-scores <= np.median(-scores))} <= set(seen)


def test_scores_that_changed_and_are_not_kept_cannot_be_gone_on_from(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """The message says that it is the attributes."""
    stages = [{"name": "easy", "epochs": 2, "where": ["nouns <= q50"]}]
    old = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    course = start(_catalogs(old), section(stages=stages), 2, 0)
    turned = _catalogs(old.with_attribute("nouns", -old.column("nouns")))
    data = section(stages=stages, on_change="merge")
    with pytest.raises(
        DataChangedError, match=r"attributes that its stages select by have changed"
    ):
        resume(course.history, 3, turned, data, 2, 0, tmp_path)


def test_a_change_that_leaves_nothing_is_an_error(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """As a new run of it would be."""
    course = _begun(_catalogs(catalog_of(range(9))), section(), tmp_path, 2)
    silent = _catalogs(catalog_of(range(9), caption=lambda _: ""))
    with pytest.raises(DataError, match=r"9 \(no caption\)"):
        _gone_on(course, 1, silent, section(on_change="merge"), tmp_path, 2)


def test_a_moved_catalog_is_no_change(
    catalog_of: _CatalogOf, section: _Section, tmp_path: Path
) -> None:
    """Neither paths nor new scores that no stage asks for play a part."""
    old = catalog_of(range(9))
    course = start(_catalogs(old), section(), 2, 0)
    moved = catalog_of(
        range(9),
        media=lambda n: catalog_of([n + 50]).clip(0).media,
        attributes=lambda n: {"nouns": float(n)},
    )
    assert _gone_on(course, 2, _catalogs(moved), section(), tmp_path, 2).history == course.history
