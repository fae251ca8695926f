"""After any change of the data no clip is repeated in an epoch and none is missing from it."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.build import Oracle, catalog_of, identities_of, names_of, oracle_of, section

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.clip import Media
from longtake.data.loader import Loader
from longtake.data.plan import Plan, begin, refuse_missing
from longtake.data.replan import PlanHistory, Policy, keep_catalogs, replan, resume, start
from longtake.data.window import Window
from longtake.errors import DataChangedError, DataError

_ONCE = {"name": "only", "epochs": 3}
_CHANGED: dict[str, Collection[int]] = {
    "same": range(40),
    "grown": range(44),
    "shrunk": range(28),
    "halved": range(0, 40, 2),
    "one removed": range(1, 40),
    "one re-encoded": [*range(39), 1039],
    "swapped": range(100, 140),
}


@pytest.fixture(scope="module")
def changed_catalogs() -> dict[str, Catalog]:
    """A catalog of 40 clips as it is, and as it may be when a run goes on."""
    return {name: catalog_of(numbers) for name, numbers in _CHANGED.items()}


def _catalogs(catalog: Catalog) -> dict[str, Catalog]:
    return {"catalog": catalog}


def _begun(
    catalogs: Mapping[str, Catalog], data: DataSection, kept: Path, batch_size: int = 4
) -> PlanHistory:
    plan_history = start(catalogs, data, batch_size, 0)
    keep_catalogs(plan_history, catalogs, kept)
    return plan_history


def _resumed(
    plan_history: PlanHistory,
    step: int,
    catalogs: Mapping[str, Catalog],
    data: DataSection,
    kept: Path,
    batch_size: int = 4,
) -> PlanHistory:
    """What another process makes of the record, as a checkpoint holds it."""
    history = json.loads(json.dumps(plan_history.history))
    found = resume(history, step, catalogs, data, batch_size, 0, kept)
    keep_catalogs(found, catalogs, kept)
    return found


def _identities(plan_history: PlanHistory, steps: range) -> list[list[str]]:
    return [names_of(plan_history.batch(step)) for step in steps]


def _epoch_end(plan_history: PlanHistory, epoch: int) -> int:
    """The step after an epoch's last one."""
    end = plan_history.end_step
    assert end is not None
    return next(step for step in range(end) if plan_history.batch(step).epoch > epoch)


def test_the_position_of_a_run_is_small_and_json(changed_catalogs: dict[str, Catalog]) -> None:
    plan_history = start(_catalogs(changed_catalogs["same"]), section(stages=[_ONCE]), 4, 0)
    end = _epoch_end(plan_history, 0)
    before, after = plan_history.position(end - 1), plan_history.position(end)
    assert (before["epoch"], before["step_in_epoch"]) == (0, end - 1)
    assert (after["epoch"], after["step_in_epoch"]) == (1, 0)
    assert after["cursors"] == {"only/catalog": end}
    assert plan_history.end_step == 31  # 3 x 26 and 3 x 14 clips
    assert plan_history.position(31) == {
        "stage": None,
        "epoch": None,
        "step_in_epoch": 0,
        "cursors": {"only/catalog": 31},
    }
    assert len(json.dumps([after, plan_history.history])) < 1500


def test_without_a_change_the_plans_stay_the_same(
    changed_catalogs: dict[str, Catalog], tmp_path: Path
) -> None:
    catalogs = _catalogs(changed_catalogs["same"])
    data = section(stages=[_ONCE])
    plan_history = start(catalogs, data, 4, 0)
    for policy in ("refuse", "merge", "finish", "restart"):
        again = _resumed(
            plan_history, 7, catalogs, section(stages=[_ONCE], on_change=policy), tmp_path
        )
        assert again.history == plan_history.history
        assert not again.changes
        assert _identities(again, range(31)) == _identities(plan_history, range(31))


def test_a_change_is_refused_with_names_and_counts(tmp_path: Path) -> None:
    old = catalog_of(range(10))
    new = catalog_of(
        [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23],
        caption=lambda n: "renamed" if n == 1 else f"clip {n}",
        num_frames=lambda n: 9 if n in (2, 3) else 8,
        media=lambda n: catalog_of([8 if n == 20 else n]).clip(0).media,
    )
    plan_history = _begun(_catalogs(old), section(), tmp_path)
    with pytest.raises(DataChangedError) as caught:
        resume(plan_history.history, 3, _catalogs(new), section(), 2, 0, tmp_path)
    message = str(caught.value)
    assert message.startswith("What is trained on has changed since step 3:\n")
    assert (
        "the catalog c.parquet: 4 clips added, 2 removed, 1 with another caption, 2 of another "
        "shape; 1 files have another content\n" in message
    )
    assert message.count("added: ") == 3
    assert message.count("changed: ") == 3
    assert message.count("removed: ") == 2
    assert "training.global_batch_size was 4 and is 2" in message
    for policy in ("merge", "finish", "restart"):
        assert f"\n  {policy} " in message


def test_without_the_kept_catalog_a_change_is_refused_still(
    changed_catalogs: dict[str, Catalog], tmp_path: Path
) -> None:
    plan_history = start(_catalogs(changed_catalogs["same"]), section(), 4, 0)
    grown = _catalogs(changed_catalogs["grown"])
    for kept in (None, tmp_path):
        with pytest.raises(DataChangedError, match=r"c\.parquet: its clips have changed"):
            resume(plan_history.history, 3, grown, section(), 4, 0, kept)
        with pytest.raises(DataChangedError, match=r"not keep it\. Restore the catalog"):
            resume(plan_history.history, 3, grown, section(on_change="merge"), 4, 0, kept)


def _train(plan_history: PlanHistory, steps: range, world_size: int, oracle: Any) -> None:
    """Consume batches as ranks share them."""
    for step in steps:
        planned = plan_history.batch(step)
        local, samples = planned.batch_size // world_size, names_of(planned)
        for rank in range(world_size):
            mine = slice(rank * local, (rank + 1) * local)
            for identity, epoch in zip(samples[mine], planned.epochs[mine], strict=True):
                oracle.consume(epoch, identity)


def test_a_chain_of_changes_is_rebuilt_from_the_record(tmp_path: Path) -> None:
    catalog = catalog_of(range(23))
    oracle = oracle_of(catalog, 3)
    plan_history, step = _begun(_catalogs(catalog), section(stages=[_ONCE]), tmp_path), 0
    for policy, numbers, batch_size in (
        ("merge", range(5, 30), 4),
        ("finish", range(5, 30), 3),
        ("merge", range(12), 2),
    ):
        _train(plan_history, range(step, step + 4), 1, oracle)
        step += 4
        catalog = catalog_of(numbers)
        oracle.change(policy, identities_of(catalog), plan_history.position(step)["epoch"])
        data = section(stages=[_ONCE], on_change=policy)
        plan_history = _resumed(plan_history, step, _catalogs(catalog), data, tmp_path, batch_size)
    assert [plan.version for plan in plan_history.plans] == [0, 1, 2, 3]
    assert [entry["policy"] for entry in plan_history.history] == [
        "start",
        "merge",
        "finish",
        "merge",
    ]
    assert "training.global_batch_size was 3 and is 2" in plan_history.changes
    assert plan_history.end_step is not None
    _train(plan_history, range(step, plan_history.end_step), 1, oracle)
    oracle.check()
    again = _resumed(plan_history, step, _catalogs(catalog), section(stages=[_ONCE]), tmp_path, 2)
    every = range(plan_history.end_step)
    assert _identities(again, every) == _identities(plan_history, every)


@pytest.mark.parametrize("policy", ["finish", "merge", "restart"])
def test_what_the_newest_plan_was_made_from_is_kept(
    changed_catalogs: dict[str, Catalog], tmp_path: Path, policy: str
) -> None:
    once = {"name": "only", "epochs": 1}
    plan_history = _begun(_catalogs(changed_catalogs["same"]), section(stages=[once]), tmp_path)
    data = section(stages=[once], on_change=policy)
    for name in ("grown", "shrunk"):
        plan_history = _resumed(plan_history, 4, _catalogs(changed_catalogs[name]), data, tmp_path)
    assert len(plan_history.plans) == 3


def test_a_catalog_without_a_share_need_not_be_there_later(tmp_path: Path) -> None:
    """A run can go on from what was kept although a catalog of weight 0 has changed."""
    both = {"a": "a.parquet", "b": "b.parquet"}
    data = section(catalogs=both, weights={"b": 0.0})
    one = catalog_of(range(12))
    plan_history = _begun({"a": one, "b": catalog_of(range(20, 29))}, data, tmp_path)
    data = section(catalogs=both, weights={"b": 0.0}, on_change="merge")
    going = _resumed(plan_history, 2, {"a": one, "b": catalog_of(range(20, 25))}, data, tmp_path)
    assert len({tuple(each) for each in _identities(going, range(6))}) == 6


def test_a_catalog_that_had_weights_may_be_left_out(tmp_path: Path) -> None:
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    both = {"a": "a.parquet", "b": "b.parquet"}
    plan_history = _begun({"a": a, "b": b}, section(catalogs=both, weights={"b": 2.0}), tmp_path)
    batches = [plan_history.batch(step) for step in range(4)]
    seen = [int(row) for each in batches if each.source == "a" for row in each.rows]
    data = section(catalogs={"a": "a.parquet"}, on_change="merge")
    going = _resumed(plan_history, 4, {"a": a}, data, tmp_path)
    assert "the catalog b is no longer used" in going.changes
    batch_count = (12 - len(seen)) // 4
    seen += [int(row) for step in range(4, 4 + batch_count) for row in going.batch(step).rows]
    assert sorted(seen) == list(range(12))
    again = _resumed(going, 6, {"a": a}, section(catalogs={"a": "a.parquet"}), tmp_path)
    assert _identities(again, range(9)) == _identities(going, range(9))


def test_a_catalog_may_be_added(tmp_path: Path) -> None:
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    one, both = {"a": "a.parquet"}, {"a": "a.parquet", "b": "b.parquet"}
    plan_history = _begun({"a": a}, section(catalogs=one), tmp_path)
    with pytest.raises(DataChangedError, match=r"the catalog b is new \(12 clips\)"):
        _resumed(plan_history, 1, {"a": a, "b": b}, section(catalogs=both), tmp_path)
    data = section(catalogs=both, on_change="merge")
    going = _resumed(plan_history, 1, {"a": a, "b": b}, data, tmp_path)
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


def test_a_later_stages_condition_may_change(tmp_path: Path) -> None:
    clips = catalog_of(range(20), num_frames=lambda n: 4 + n)
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "epochs": 1, "where": ["num_frames > 10"]}]
    changed = [stages[0], {**stages[1], "where": ["num_frames > 20"]}]
    plan_history = _begun(_catalogs(clips), section(stages=stages), tmp_path)
    with pytest.raises(DataChangedError, match=r"data\.stages was .*> 10.* and is .*> 20"):
        _resumed(plan_history, 2, _catalogs(clips), section(stages=changed), tmp_path)
    data = section(stages=changed, on_change="merge")
    going = _resumed(plan_history, 2, _catalogs(clips), data, tmp_path)
    assert going.end_step is not None
    batches = [going.batch(step) for step in range(going.end_step)]
    rows = {
        stage: sorted(int(row) for each in batches if each.stage == stage for row in each.rows)
        for stage in ("a", "b")
    }
    hard = np.flatnonzero(clips.column("num_frames") > 20)
    assert rows == {"a": list(range(20)), "b": hard.tolist()}


def test_a_stage_may_become_longer(tmp_path: Path) -> None:
    clips = catalog_of(range(20))
    stages = [{"name": "a", "steps": 6}, {"name": "b"}]
    plan_history = _begun(_catalogs(clips), section(stages=stages), tmp_path)
    longer = [{"name": "a", "steps": 9}, {"name": "b"}]
    data = section(stages=longer, on_change="merge")
    going = _resumed(plan_history, 4, _catalogs(clips), data, tmp_path)
    assert [going.batch(step).stage for step in range(12)] == ["a"] * 9 + ["b"] * 3
    shorter = [{"name": "a", "steps": 2}, {"name": "b"}]
    data = section(stages=shorter, on_change="merge")
    going = _resumed(plan_history, 4, _catalogs(clips), data, tmp_path)
    assert [going.batch(step).stage for step in range(6)] == ["a"] * 4 + ["b"] * 2


def test_the_stage_a_run_is_in_cannot_vanish(tmp_path: Path) -> None:
    """What would the rest of it be? It is named, with those that there are."""
    clips = _catalogs(catalog_of(range(20)))
    plan_history = _begun(
        clips, section(stages=[{"name": "a", "steps": 6}, {"name": "b"}]), tmp_path
    )
    data = section(stages=[{"name": "c", "steps": 5}, {"name": "b"}], on_change="merge")
    with pytest.raises(DataChangedError, match=r"in stage a, which is no longer among .*: c, b"):
        _resumed(plan_history, 4, clips, data, tmp_path)
    assert _resumed(plan_history, 6, clips, data, tmp_path).batch(6).stage == "b"


def test_scores_that_select_otherwise_are_a_change(tmp_path: Path) -> None:
    stages = [{"name": "easy", "epochs": 2, "where": ["nouns <= q50"]}]
    old = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    plan_history = _begun(_catalogs(old), section(stages=stages), tmp_path, 2)
    scores = old.column("nouns")
    scaled = _catalogs(old.with_attribute("nouns", scores * 2 + 1))
    same = _resumed(plan_history, 3, scaled, section(stages=stages), tmp_path, 2)
    assert same.history == plan_history.history
    turned = _catalogs(old.with_attribute("nouns", -scores))
    with pytest.raises(DataChangedError, match="attributes of the clips have changed, and stages"):
        _resumed(plan_history, 3, turned, section(stages=stages), tmp_path, 2)
    data = section(stages=stages, on_change="merge")
    going = _resumed(plan_history, 3, turned, data, tmp_path, 2)
    seen = [int(row) for step in range(3) for row in plan_history.batch(step).rows]
    assert going.end_step is not None
    for step in range(3, going.end_step):
        batch = going.batch(step)
        seen += [int(row) for row, e in zip(batch.rows, batch.epochs, strict=True) if e == 0]
    assert len(set(seen)) == len(seen)
    assert {int(row) for row in np.flatnonzero(-scores <= np.median(-scores))} <= set(seen)


def test_scores_that_changed_and_are_not_kept_are_refused(tmp_path: Path) -> None:
    stages = [{"name": "easy", "epochs": 2, "where": ["nouns <= q50"]}]
    old = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    plan_history = start(_catalogs(old), section(stages=stages), 2, 0)
    turned = _catalogs(old.with_attribute("nouns", -old.column("nouns")))
    data = section(stages=stages, on_change="merge")
    with pytest.raises(
        DataChangedError, match=r"attributes that its stages select by have changed"
    ):
        resume(plan_history.history, 3, turned, data, 2, 0, tmp_path)


def test_a_change_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    """As a new run of it would be."""
    plan_history = _begun(_catalogs(catalog_of(range(9))), section(), tmp_path, 2)
    silent = _catalogs(catalog_of(range(9), caption=lambda _: ""))
    with pytest.raises(DataError, match=r"9 \(no caption\)"):
        _resumed(plan_history, 1, silent, section(on_change="merge"), tmp_path, 2)


def test_a_moved_catalog_is_no_change(tmp_path: Path) -> None:
    old = catalog_of(range(9))
    plan_history = start(_catalogs(old), section(), 2, 0)
    moved = catalog_of(
        range(9),
        media=lambda n: catalog_of([n + 50]).clip(0).media,
        attributes=lambda n: {"nouns": float(n)},
    )
    assert (
        _resumed(plan_history, 2, _catalogs(moved), section(), tmp_path, 2).history
        == plan_history.history
    )


def _consume(plan: Plan, end: int | None, oracle: Oracle) -> int:
    """Consume a plan's batches up to a step, or all; returns the step after the last."""
    assert plan.end_step is not None
    end = plan.end_step if end is None else min(end, plan.end_step)
    for step in range(plan.first_step, end):
        batch = plan.batch(step)
        assert 0 < len(batch.rows) <= batch.batch_size
        for row, epoch in zip(batch.rows, batch.epochs, strict=True):
            oracle.consume(epoch, batch.catalog.clip(int(row)).identity)
    return end


_policies = st.sampled_from(["finish", "merge", "restart"])
_changes = st.lists(
    st.tuples(_policies, st.sets(st.integers(0, 25), min_size=1), st.integers(1, 7)), max_size=3
)


@settings(max_examples=120, deadline=None)
@given(
    first=st.sets(st.integers(0, 25), min_size=1),
    batch_size=st.integers(1, 7),
    changes=_changes,
    data=st.data(),
    seed=st.integers(0, 5),
)
def test_any_chain_of_changes_is_exact(
    first: set[int],
    batch_size: int,
    changes: list[tuple[Policy, set[int], int]],
    data: st.DataObject,
    seed: int,
) -> None:
    num_epochs = 3
    recipe = section(stages=[{"name": "only", "epochs": num_epochs}])
    catalog = catalog_of(first)
    oracle = oracle_of(catalog, num_epochs)
    plan = begin({"catalog": catalog}, recipe, batch_size, seed)
    plans = [plan]
    for policy, clips, next_batch_size in changes:
        assert plan.end_step is not None
        step = data.draw(st.integers(plan.first_step, plan.end_step))
        _consume(plan, step, oracle)
        catalog = catalog_of(clips)
        counted = num_epochs if step == plan.end_step else plan.batch(step).epoch
        oracle.change(policy, identities_of(catalog), counted)
        plan = replan(plans, step, policy, {"catalog": catalog}, recipe, next_batch_size, seed)
        plans.append(plan)
    _consume(plan, None, oracle)
    oracle.check()


_Seen = dict[tuple[str, int], Counter[str]]


def _train_steps(plan_history: PlanHistory, steps: range, seen: _Seen) -> None:
    for step in steps:
        batch = plan_history.batch(step)
        for row, epoch in zip(batch.rows, batch.epochs, strict=True):
            key = (f"{batch.stage}/{batch.source}", epoch)
            seen.setdefault(key, Counter())[batch.catalog.clip(int(row)).identity] += 1


def _again(
    plan_history: PlanHistory,
    step: int,
    catalogs: dict[str, Catalog],
    data: DataSection,
    kept: Path | None = None,
) -> PlanHistory:
    return resume(plan_history.history, step, catalogs, data, 2, 0, kept)


def _stage(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, **values}


@pytest.fixture(scope="module")
def clips() -> Catalog:
    """Twenty clips of one bucket."""
    return catalog_of(range(20), width=lambda _: 16)


def test_a_catalog_that_comes_back_resumes_where_it_was() -> None:
    catalogs = {"a": catalog_of(range(20)), "b": catalog_of(range(100, 120))}
    paths = {"a": "a.parquet", "b": "b.parquet"}
    seen: _Seen = {}
    plan_history = start(catalogs, section(catalogs=paths), 2, 0)
    _train_steps(plan_history, range(8), seen)
    without = section(catalogs=paths, weights={"b": 0}, on_change="merge")
    plan_history = _again(plan_history, 8, catalogs, without)
    _train_steps(plan_history, range(8, 13), seen)
    back = section(catalogs=paths, on_change="merge")
    plan_history = _again(plan_history, 13, catalogs, back)
    _train_steps(plan_history, range(13, 60), seen)
    for key, counts in seen.items():
        assert max(counts.values()) == 1, key
    assert len(seen["all/b", 0]) == len(seen["all/a", 0]) == 20


@pytest.mark.parametrize("policy", ["merge", "finish"])
def test_a_catalog_that_is_renamed_is_refused(clips: Catalog, policy: str, tmp_path: Path) -> None:
    """Its epochs would begin anew; the message says which name to keep, and with it all is well."""
    plan_history = start({"catalog": clips}, section(), 2, 0)
    keep_catalogs(plan_history, {"catalog": clips}, tmp_path)
    new = catalog_of(range(50, 60))
    renamed = section(catalogs={"old": "o.parquet", "new": "n.parquet"}, on_change=policy)
    message = r"no longer trains on the catalog catalog, but on new, old.*keep its name"
    with pytest.raises(DataChangedError, match=message):
        _again(plan_history, 5, {"old": clips, "new": new}, renamed, tmp_path)
    same = section(catalogs={"catalog": "o.parquet", "new": "n.parquet"}, on_change=policy)
    seen: _Seen = {}
    _train_steps(plan_history, range(5), seen)
    plan_history = _again(plan_history, 5, {"catalog": clips, "new": new}, same)
    _train_steps(plan_history, range(5, 30), seen)
    assert seen["all/catalog", 0] == Counter({clip.identity: 1 for clip in clips.clips()})


def test_a_stage_that_is_over_does_not_come_again(clips: Catalog) -> None:
    a, b = _stage("a", epochs=1), _stage("b", epochs=1)
    plan_history = start({"catalog": clips}, section(stages=[a, b]), 2, 0)
    seen: _Seen = {}
    _train_steps(plan_history, range(13), seen)
    swapped = section(stages=[b, a], on_change="merge")
    plan_history = _again(plan_history, 13, {"catalog": clips}, swapped)
    assert plan_history.end_step == 20
    _train_steps(plan_history, range(13, 20), seen)
    everyone = Counter({clip.identity: 1 for clip in clips.clips()})
    assert seen == {("a/catalog", 0): everyone, ("b/catalog", 0): everyone}


@pytest.mark.parametrize(
    ("before", "after", "end"),
    [({"epochs": 2}, {"epochs": 3}, 30), ({"steps": 20}, {"steps": 30}, 30)],
)
def test_a_curriculum_that_has_ended_can_be_made_longer(
    clips: Catalog, before: dict[str, int], after: dict[str, int], end: int, tmp_path: Path
) -> None:
    data = section(stages=[_stage("one", **before)])
    plan_history = start({"catalog": clips}, data, 2, 0)
    assert plan_history.end_step == 20
    keep_catalogs(plan_history, {"catalog": clips}, tmp_path)
    seen: _Seen = {}
    _train_steps(plan_history, range(20), seen)
    idle = section(stages=[_stage("one", **before)], on_change="merge")
    fewer = Catalog.of(list(clips.clips())[:19])
    plan_history = _again(plan_history, 20, {"catalog": fewer}, idle, tmp_path)
    assert plan_history.end_step == 20
    keep_catalogs(plan_history, {"catalog": fewer}, tmp_path)
    longer = section(stages=[_stage("one", **after)], on_change="merge")
    plan_history = _again(plan_history, 20, {"catalog": clips}, longer, tmp_path)
    assert plan_history.end_step == end
    _train_steps(plan_history, range(20, end), seen)
    assert sorted(epoch for _, epoch in seen) == [0, 1, 2]
    assert all(set(counts.values()) == {1} and len(counts) == 20 for counts in seen.values())


def test_steps_are_those_of_the_whole_stage(clips: Catalog) -> None:
    for before in ({"steps": 40}, {"epochs": 9}):
        plan_history = start({"catalog": clips}, section(stages=[_stage("one", **before)]), 2, 0)
        data = section(stages=[_stage("one", steps=25)], on_change="merge")
        assert _again(plan_history, 15, {"catalog": clips}, data).end_step == 25


def test_a_change_shortly_before_a_ramp_shortens_it(clips: Catalog) -> None:
    stages = [_stage("a", steps=100), _stage("b", steps=100, ramp_steps=40)]
    plan_history = start({"catalog": clips}, section(stages=stages), 2, 0)
    for step in range(75, 100):
        data = section(stages=stages, on_change="merge", frame_stride=2)
        assert _again(plan_history, step, {"catalog": clips}, data).end_step == 200


def test_a_second_score_is_no_change(tmp_path: Path) -> None:
    """Although `difficulty` now could mean either: the run knows what it was."""
    one = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    two = catalog_of(range(20), attributes=lambda n: {"nouns": float(n), "motion": 1.0})
    stages = [_stage("easy", where=["difficulty <= q50"])]
    plan_history = start({"catalog": one}, section(stages=stages), 2, 0)
    keep_catalogs(plan_history, {"catalog": one}, tmp_path)
    data = section(stages=stages, difficulty="nouns", on_change="merge")
    again = resume(plan_history.history, 3, {"catalog": two}, data, 2, 0, tmp_path)
    seen: _Seen = {}
    _train_steps(again, range(5), seen)
    assert sum(seen["easy/catalog", 0].values()) == len(seen["easy/catalog", 0]) == 10


def test_finishing_reads_clips_where_they_lie_now(tmp_path: Path) -> None:
    before = catalog_of(range(10), media=lambda n: Media(f"/old/{n}.mp4"))
    after = catalog_of(range(1, 10), media=lambda n: Media(f"/new/{n}.mp4"))
    plan_history = start({"catalog": before}, section(), 2, 0)
    keep_catalogs(plan_history, {"catalog": before}, tmp_path)
    data = section(on_change="finish")
    plan_history = resume(plan_history.history, 2, {"catalog": after}, data, 2, 0, tmp_path)
    batches = [plan_history.batch(step) for step in range(2, 5)]
    paths = {batch.catalog.clip(int(row)).path for batch in batches for row in batch.rows}
    assert len(paths) == 6
    assert all(path.startswith("/new/") for path in paths - {"/old/0.mp4"})


def test_a_refused_state_leaves_the_loader_as_it_was(tmp_path: Path) -> None:
    """Whoever catches the error does not go on somewhere else without knowing."""
    path = tmp_path / "c.parquet"
    catalog_of(range(10)).save(path)
    state = Loader(section(catalog=path), batch_size=2).state_dict() | {"global_step": 3}
    catalog_of(range(12)).save(path)
    loader = Loader(section(catalog=path), batch_size=2)
    with pytest.raises(DataChangedError):
        loader.load_state_dict(state)
    assert (loader.step, loader.quarantined) == (0, {})


def test_files_that_are_gone_are_counted_and_named(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.mp4").touch()
    clips = catalog_of(range(5), media=lambda n: Media(str(tmp_path / f"{n}.mp4")))
    assert refuse_missing(clips, allowed=0) == []
    (tmp_path / "3.mp4").unlink()
    (said,) = refuse_missing(clips, allowed=1)
    assert said == f"1 of the catalog's 5 files are gone, such as {tmp_path}/3.mp4"
    with pytest.raises(DataError, match=r"1 of the catalog's 5 files are gone.*At most 0"):
        refuse_missing(clips, allowed=0)


_MOMENTS = ("mid-epoch", "last batch of an epoch", "second resume in a row")
_POLICIES = ("finish", "merge", "restart")
_WORLDS, _WORKERS = (1, 2, 4), (0, 2, 3)
_NUM_EPOCHS = 3


class _Instant:
    """In the place of `longtake.data.decode_worker.DecodePool`: black windows, at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, window: Window, out: NDArray[np.uint8]) -> Future[NDArray[np.uint8]]:
        assert out.shape == window.shape
        out[...] = 0
        future: Future[NDArray[np.uint8]] = Future()
        future.set_result(out)
        return future

    def incidents(self) -> list[Any]:
        return []


@pytest.fixture(scope="module")
def instant_decoding() -> Iterator[None]:
    """The loader returns black windows at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.data.loader.DecodePool", _Instant)
        yield


@pytest.fixture(scope="module")
def folder(changed_catalogs: dict[str, Catalog], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog file for each change; what runs keep goes below it, too."""
    path = tmp_path_factory.mktemp("catalogs")
    for name, catalog in changed_catalogs.items():
        catalog.save(path / f"{name}.parquet")
    return path


class _Run:
    """A run whose ranks and workers may be others at each launch."""

    def __init__(self, folder: Path, oracle: Oracle) -> None:
        self.folder = folder
        self.oracle = oracle
        self.state: dict[str, Any] | None = None

    def launch(
        self, change: str, world_size: int, workers: int, policy: str, steps: int | None
    ) -> None:
        """Train on so many steps, or to the end, from the last launch's state."""
        loaders = [
            self._loader(change, rank, world_size, workers, policy) for rank in range(world_size)
        ]
        loaders[0].keep_catalogs()
        end = None if steps is None else loaders[0].step + steps
        for shares in zip(*(loader.batches(end) for loader in loaders), strict=True):
            assert len({(share.step, share.epoch, share.bucket) for share in shares}) == 1
            for share in shares:
                for identity, epoch, weight in zip(
                    share.identities, share.epochs, share.weights.tolist(), strict=True
                ):
                    if weight:
                        self.oracle.consume(epoch, identity)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        self.state = json.loads(states[0])

    def _loader(self, change: str, rank: int, world_size: int, workers: int, policy: str) -> Loader:
        data = section(
            catalog=self.folder / f"{change}.parquet",
            stages=[{"name": "only", "epochs": _NUM_EPOCHS}],
            workers=workers,
            on_change=policy,
        )
        kept = self.folder / "kept"
        loader = Loader(
            data,
            batch_size=4,
            rank=rank,
            world_size=world_size,
            kept=kept,
            prefetch_batches=1 + workers,
        )
        if self.state is not None:
            loader.load_state_dict(self.state)
        return loader


_Pair = tuple[int, int]


def _check(
    run: _Run,
    catalogs: dict[str, Catalog],
    cell: tuple[str, str, str],
    worlds: _Pair,
    workers: _Pair,
) -> None:
    change, moment, policy = cell
    epoch_end = run._loader("same", 0, 1, 0, policy).plan_history.plan.stages[0].streams[0]
    steps = (
        epoch_end.parts[0].epoch_span.epoch_start(1) if moment == "last batch of an epoch" else 5
    )
    run.launch("same", worlds[0], workers[0], "refuse", steps)
    assert run.state is not None
    counted = run.state["epoch"]
    if moment == "last batch of an epoch":
        assert (counted, run.state["step_in_epoch"]) == (1, 0)
    if change != "same":
        with pytest.raises(DataChangedError, match=r"--set data\.on_change=merge"):
            run.launch(change, worlds[1], workers[1], "refuse", None)
        run.oracle.change(policy, identities_of(catalogs[change]), counted)
    if moment == "second resume in a row":
        run.launch(change, worlds[1], workers[1], policy, 3)
        run.launch(change, worlds[0], workers[0], "refuse", 0)
    run.launch(change, worlds[1], workers[1], policy, None)
    assert run.state["stage"] is None
    run.oracle.check()


@pytest.mark.usefixtures("instant_decoding")
@settings(max_examples=25, deadline=None)
@given(
    cell=st.tuples(
        st.sampled_from(list(_CHANGED)), st.sampled_from(_MOMENTS), st.sampled_from(_POLICIES)
    ),
    worlds=st.tuples(st.sampled_from(_WORLDS), st.sampled_from(_WORLDS)),
    workers=st.tuples(st.sampled_from(_WORKERS), st.sampled_from(_WORKERS)),
)
def test_any_change_moment_policy_ranks_and_workers_are_exact(
    folder: Path,
    changed_catalogs: dict[str, Catalog],
    cell: tuple[str, str, str],
    worlds: _Pair,
    workers: _Pair,
) -> None:
    run = _Run(folder, oracle_of(changed_catalogs["same"], _NUM_EPOCHS))
    _check(run, changed_catalogs, cell, worlds, workers)
