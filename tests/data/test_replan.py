"""After any change of the data no clip is repeated in an epoch and none is missing from it."""

import json
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.build import (
    Oracle,
    PlannedRun,
    catalog_of,
    clip,
    identities_of,
    on_ranks,
    oracle_of,
    section,
    shape,
)
from tests.data.catalogs import make_catalog

from longtake.data import stores
from longtake.data.catalog import Catalog
from longtake.data.checks import review
from longtake.data.clip import Media
from longtake.data.loader import Loader
from longtake.data.plan import Plan, PlanInputs, begin
from longtake.data.plan_history import resume, start
from longtake.data.replan import Policy, replan
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
    """A catalog of 40 clips as it is, and as it may be when a run goes on; spans of films."""

    def span(number: int) -> Media:
        return Media(f"s3://films/{number // 4}.mp4", span=(number % 4, number % 4 + 1.0))

    return {name: catalog_of(numbers, media=span) for name, numbers in _CHANGED.items()}


_BOTH = {"a": "a.parquet", "b": "b.parquet"}


def _once(catalog: Catalog) -> Counter[str]:
    return Counter(identities_of(catalog))


def test_the_position_of_a_run_is_small_and_json(
    changed_catalogs: dict[str, Catalog], tmp_path: Path
) -> None:
    plans = PlannedRun(tmp_path, changed_catalogs["same"], stages=[_ONCE]).plans
    end = next(step for step in range(31) if plans.batch(step).epoch > 0)
    before, after = plans.position(end - 1), plans.position(end)
    assert (before["epoch"], before["step_in_epoch"]) == (0, end - 1)
    assert (after["epoch"], after["step_in_epoch"]) == (1, 0)
    assert after["cursors"] == {"only/catalog": end}
    assert plans.end_step == 31  # 3 x 26 and 3 x 14 clips
    over = {"stage": None, "epoch": None, "step_in_epoch": 0, "cursors": {"only/catalog": 31}}
    assert plans.position(31) == over
    assert len(json.dumps([after, plans.history])) < 1500


def test_epochs_of_several_catalogs_are_over_when_each_has_had_its_own(tmp_path: Path) -> None:
    clips = {"a": catalog_of(range(10)), "b": catalog_of(range(20, 24))}
    stages = [{"name": "one", "epochs": 2}, {"name": "two", "epochs": 1}]
    repeats = {"b": 2}
    plans = PlannedRun(tmp_path, clips, 2, catalogs=_BOTH, repeats=repeats, stages=stages).plans
    found = [plans.epochs_before(step, repeats) for step in range(27)]
    assert found == [*[("one", 0)] * 9, *[("one", 1)] * 9, *[("two", 0)] * 9]


@pytest.mark.parametrize("grown", [range(14), range(8)])
@pytest.mark.parametrize("policy", ["merge", "finish"])
def test_a_changed_mixture_ends_after_its_epochs(tmp_path: Path, policy: str, grown: range) -> None:
    """The clips of both catalogs, twice each, whatever the step at which one of them changed."""
    clips = {"a": catalog_of(range(10)), "b": catalog_of(range(20, 25))}
    for step in (0, 3, 8, 11, 15):
        run = PlannedRun(
            tmp_path / str(step), clips, 2, catalogs=_BOTH, stages=[{"name": "one", "epochs": 2}]
        )
        run.train(step)
        run.resume({**clips, "a": catalog_of(grown)}, on_change=policy)
        run.train()
        last = run.seen["one/a", 1]
        if policy == "merge" and step < 8:
            assert last == Counter(identities_of(catalog_of(grown)))
        assert set(last.values()) == {1}
        for epoch in (0, 1):
            assert run.seen["one/b", epoch] == Counter(identities_of(clips["b"]))
        assert set(run.seen) == {(f"one/{name}", n) for name in "ab" for n in (0, 1)}


@pytest.mark.parametrize("policy", ["refuse", "merge", "finish", "restart"])
def test_without_a_change_the_plans_stay_the_same(
    changed_catalogs: dict[str, Catalog], tmp_path: Path, policy: str
) -> None:
    run = PlannedRun(tmp_path, changed_catalogs["same"], stages=[_ONCE])
    history, batches, run.step = run.plans.history, run.batches(31), 7
    again = run.resume(on_change=policy)
    assert (again.history, again.changes, run.batches(31)) == (history, "", batches)


def test_a_change_is_refused_with_names_and_counts(tmp_path: Path) -> None:
    run = PlannedRun(tmp_path, catalog_of(range(10)))
    new = catalog_of(
        [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23],
        caption=lambda n: "renamed" if n == 1 else f"clip {n}",
        num_frames=lambda n: 9 if n in (2, 3) else 8,
        media=lambda n: clip(8 if n == 20 else n).media,
    )
    run.step = 3
    with pytest.raises(DataChangedError) as caught:
        run.resume(new, batch_size=2, on_change="refuse")
    message = str(caught.value)
    assert message.startswith("What is trained on has changed since step 3:\n")
    assert (
        "the catalog c.parquet: 4 clips added, 2 removed, 1 with another caption, 2 of another "
        "shape; 1 file with another content\n" in message
    )
    assert [message.count(f"{what}: ") for what in ("added", "changed", "removed")] == [3, 3, 2]
    assert "training.global_batch_size was 4 and is 2" in message
    for policy in ("merge", "finish", "restart"):
        assert f"\n  {policy} " in message


def test_without_the_kept_catalog_a_change_is_refused_still(
    changed_catalogs: dict[str, Catalog], tmp_path: Path
) -> None:
    history = start({"catalog": changed_catalogs["same"]}, section(), 4, 0).history
    grown = {"catalog": changed_catalogs["grown"]}
    for kept in (None, tmp_path):
        with pytest.raises(DataChangedError, match=r"c\.parquet: its clips have changed"):
            resume(history, 3, grown, section(), 4, 0, kept)
        with pytest.raises(DataChangedError, match=r"not keep it\. Restore the catalog"):
            resume(history, 3, grown, section(on_change="merge"), 4, 0, kept)


@pytest.mark.parametrize("of_wide", [None, 5])
def test_a_chain_of_changes_is_rebuilt_from_the_record(tmp_path: Path, of_wide: int | None) -> None:
    catalog = catalog_of(range(23))
    shapes = [shape(), shape(32, batch_size=of_wide)]
    run = PlannedRun(tmp_path, catalog, stages=[_ONCE], buckets=shapes)
    run.oracle = oracle = oracle_of(catalog, 3)
    for policy, numbers, batch_size in (
        ("merge", range(5, 30), 4),
        ("finish", range(5, 30), 3),
        ("merge", range(12), 2),
    ):
        run.train(run.step + 4)
        catalog = catalog_of(numbers)
        oracle.change(policy, identities_of(catalog), run.plans.position(run.step)["epoch"])
        run.resume(catalog, batch_size, policy)
    assert [plan.version for plan in run.plans.plans] == [0, 1, 2, 3]
    policies = [entry["policy"] for entry in run.plans.history]
    assert policies == ["start", "merge", "finish", "merge"]
    assert "training.global_batch_size was 3 and is 2" in run.plans.changes
    changed_at = run.step
    run.train()
    oracle.check()
    batches, end, run.step = run.batches(run.step), run.step, changed_at
    run.resume()
    assert run.batches(end) == batches


@pytest.mark.parametrize("at", [3, 9, 14, 17])
def test_stages_of_unlike_batch_sizes_change_their_clips_and_lose_nothing(
    changed_catalogs: dict[str, Catalog], tmp_path: Path, at: int
) -> None:
    stages: list[dict[str, Any]] = [
        {"name": "a", "epochs": 1, "global_batch_size": 3},
        {"name": "b", "epochs": 2, "global_batch_size": 8},
    ]
    run = PlannedRun(tmp_path, changed_catalogs["same"], stages=stages)
    assert run.plans.stage_at(14) == ("b", 14)  # after 26 and 14 clips, in batches of 3
    run.train(at)
    run.resume(changed_catalogs["grown"])
    run.train()
    same, grown = (identities_of(changed_catalogs[name]) for name in ("same", "grown"))
    epochs = [("a/catalog", 0), ("b/catalog", 0), ("b/catalog", 1)]
    wanted = {key: Counter(grown) for key in epochs}
    if at >= 14:
        wanted["a/catalog", 0] = Counter(same)
    assert run.seen == wanted
    border = run.plans.stage_at(run.step - 1)[1]  # two of the new clips make a batch of three
    assert border == (14 if at >= 14 else 16)
    found = [run.plans.stage_at(step) for step in range(run.step)]
    assert found == [("a", 0)] * border + [("b", border)] * (run.step - border)


def test_a_catalog_without_a_share_need_not_be_there_later(tmp_path: Path) -> None:
    catalogs = {"a": catalog_of(range(12)), "b": catalog_of(range(20, 29))}
    run = PlannedRun(tmp_path, catalogs, catalogs=_BOTH, weights={"b": 0.0})
    run.step = 2
    run.resume({**catalogs, "b": catalog_of(range(20, 25))})
    assert len({tuple(each) for each in run.batches(6)}) == 6


def test_a_catalog_that_had_weights_may_be_left_out(tmp_path: Path) -> None:
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    run = PlannedRun(tmp_path, {"a": a, "b": b}, catalogs=_BOTH, weights={"b": 2.0})
    run.train(4)
    plans = run.resume({"a": a}, catalogs={"a": "a.parquet"}, weights={})
    assert "the catalog b is no longer used" in plans.changes
    run.train(4 + (12 - run.seen["all/a", 0].total()) // 4)
    assert run.seen["all/a", 0] == _once(a)
    batches = run.batches(9)
    run.resume(on_change="refuse")
    assert run.batches(9) == batches


def test_a_catalog_may_be_added(tmp_path: Path) -> None:
    a, b = catalog_of(range(12)), catalog_of(range(20, 32))
    run = PlannedRun(tmp_path, {"a": a}, catalogs={"a": "a.parquet"})
    run.train(1)
    with pytest.raises(DataChangedError, match=r"the catalog b is new \(12 clips\)"):
        run.resume({"a": a, "b": b}, catalogs=_BOTH, on_change="refuse")
    run.resume()
    run.train(9)
    assert (run.seen["all/a", 0], run.seen["all/b", 0]) == (_once(a), _once(b))
    assert max(max(counts.values()) for counts in run.seen.values()) == 1


def test_a_later_stages_condition_may_change(tmp_path: Path) -> None:
    clips = catalog_of(range(20), num_frames=lambda n: 4 + n)
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "epochs": 1, "where": ["num_frames > 10"]}]
    run = PlannedRun(tmp_path, clips, stages=stages)
    run.train(2)
    changed = [stages[0], {**stages[1], "where": ["num_frames > 20"]}]
    with pytest.raises(DataChangedError, match=r"data\.stages was .*> 10.* and is .*> 20"):
        run.resume(stages=changed, on_change="refuse")
    run.resume()
    run.train()
    hard = Counter(each.identity for each in clips.clips() if each.num_frames > 20)
    assert run.seen == {("a/catalog", 0): _once(clips), ("b/catalog", 0): hard}


@pytest.mark.parametrize(("steps", "order"), [(9, "aaaaaaaaabbb"), (2, "aaaabb")])
def test_a_stage_may_become_longer_or_shorter(tmp_path: Path, steps: int, order: str) -> None:
    run = PlannedRun(
        tmp_path, catalog_of(range(20)), stages=[{"name": "a", "steps": 6}, {"name": "b"}]
    )
    run.step = 4
    plans = run.resume(stages=[{"name": "a", "steps": steps}, {"name": "b"}])
    assert [plans.batch(step).stage for step in range(len(order))] == list(order)


def test_the_stage_a_run_is_in_cannot_vanish(tmp_path: Path) -> None:
    run = PlannedRun(
        tmp_path, catalog_of(range(20)), stages=[{"name": "a", "steps": 6}, {"name": "b"}]
    )
    run.step = 4
    with pytest.raises(DataChangedError, match=r"in stage a, which is no longer among .*: c, b"):
        run.resume(stages=[{"name": "c", "steps": 5}, {"name": "b"}])
    run.step = 6
    assert run.resume(stages=[{"name": "b"}]).batch(6).stage == "b"


def test_scores_that_select_otherwise_are_a_change(tmp_path: Path) -> None:
    stages = [{"name": "easy", "epochs": 2, "where": ["nouns <= q50"]}]
    old = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    run, scores = PlannedRun(tmp_path / "kept", old, 2, stages=stages), old.column("nouns")
    first = run.plans.history
    run.train(3)
    same = run.resume(old.with_attribute("nouns", scores * 2 + 1), on_change="refuse")
    assert same.history == first
    turned = old.with_attribute("nouns", -scores)
    with pytest.raises(DataChangedError, match="attributes of the clips have changed, and stages"):
        run.resume(turned, on_change="refuse")
    with pytest.raises(DataChangedError, match="attributes that its stages select by have changed"):
        resume(first, 3, {"catalog": turned}, section(stages=stages), 2, 0, tmp_path)
    run.resume()
    run.train()
    easy = [old.clip(int(row)).identity for row in np.flatnonzero(-scores <= np.median(-scores))]
    seen = run.seen["easy/catalog", 0]
    assert (max(seen.values()), set(easy) <= set(seen)) == (1, True)


def test_a_change_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    run = PlannedRun(tmp_path, catalog_of(range(9)), 2)
    run.step = 1
    with pytest.raises(DataError, match=r"9 \(no caption\)"):
        run.resume(catalog_of(range(9), caption=lambda _: ""))


def test_a_moved_catalog_is_no_change(tmp_path: Path) -> None:
    run = PlannedRun(tmp_path, catalog_of(range(9)), 2)
    first = run.plans.history
    moved = catalog_of(
        range(9), media=lambda n: clip(n + 50).media, attributes=lambda n: {"nouns": float(n)}
    )
    run.step = 2
    assert run.resume(moved, on_change="refuse").history == first


def _consume(plan: Plan, end: int | None, oracle: Oracle) -> None:
    """Consume a plan's batches up to a step, or all."""
    assert plan.end_step is not None
    for step in range(plan.first_step, plan.end_step if end is None else end):
        batch = plan.batch(step)
        assert 0 < len(batch.rows) <= batch.batch_size
        oracle.plan(batch)


_policies = st.sampled_from(["finish", "merge", "restart"])
_changes = st.lists(
    st.tuples(_policies, st.sets(st.integers(0, 25), min_size=1), st.integers(1, 7)), max_size=3
)


_SQUARE, _WIDE = shape(), shape(32, batch_size=3)
_SHORT = shape(num_frames=2, share=0.3, batch_size=5)
_HALF_WIDE = shape(num_frames=3, height=8, share=0.5)


@settings(max_examples=120, deadline=None)
@given(
    shapes=st.sampled_from([[_SQUARE], [_SQUARE, _SHORT], [_SHORT, _WIDE, _HALF_WIDE, _SQUARE]]),
    first=st.sets(st.integers(0, 25), min_size=1),
    batch_size=st.integers(1, 7),
    changes=_changes,
    data=st.data(),
    seed=st.integers(0, 5),
)
def test_any_chain_of_changes_is_exact(
    shapes: list[dict[str, Any]],
    first: set[int],
    batch_size: int,
    changes: list[tuple[Policy, set[int], int]],
    data: st.DataObject,
    seed: int,
) -> None:
    num_epochs = 3
    recipe = section(stages=[{"name": "only", "epochs": num_epochs}], buckets=shapes)
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
        plan = replan(
            plans, step, policy, PlanInputs({"catalog": catalog}, recipe, next_batch_size, seed)
        )
        plans.append(plan)
    _consume(plan, None, oracle)
    oracle.check()


@pytest.mark.parametrize("policy", ["finish", "merge", "restart"])
def test_at_one_frame_rate_resumes_and_changes_are_exact(policy: Policy, tmp_path: Path) -> None:
    """Videos of 8, 16 and 24 frames a second are trained if they are long enough at data.fps."""

    def catalog(numbers: Collection[int]) -> Catalog:
        return catalog_of(
            numbers,
            fps=lambda n: (8.0, 16.0, 24.0)[n % 3],
            duration_seconds=lambda n: 0.3 if n % 5 == 0 else 1.0,
            num_frames=lambda n: round((8, 16, 24)[n % 3] * (0.3 if n % 5 == 0 else 1)),
        )

    long_enough = catalog_of([n for n in range(20) if n % 5])
    run = PlannedRun(tmp_path, catalog(range(20)), stages=[_ONCE], fps=10.0)
    run.oracle = oracle = oracle_of(long_enough, 3)
    batches, wanted = run.batches(12), set(long_enough.identities.to_pylist())
    assert {name for batch in batches for name in batch} == {name.hex() for name in wanted}
    run.train(3)
    assert run.resume(on_change="refuse").changes == ""  # it was killed
    assert run.batches(12) == batches
    for end, clips, fps in ((5, range(26), 10.0), (6, range(26), 16.0)):
        run.train(end)
        changed: dict[str, Any] = {"given": catalog(clips), "fps": fps}
        with pytest.raises(DataChangedError):
            run.resume(**changed, on_change="refuse")
        fitting = catalog_of([n for n in clips if n % 5 or fps == 16.0])  # 0.3 s are 4 frames
        oracle.change(policy, identities_of(fitting), run.plans.batch(end).epoch)
        run.resume(**changed, on_change=policy)
    run.train()
    oracle.check()
    assert policy == "restart" or len(oracle.seen[2]) == 26


_A, _B = ({"name": name, "epochs": 1} for name in "ab")


@pytest.fixture(scope="module")
def clips() -> Catalog:
    """Twenty clips of one bucket."""
    return catalog_of(range(20), width=lambda _: 16)


def test_a_catalog_that_comes_back_resumes_where_it_was(tmp_path: Path) -> None:
    catalogs = {"a": catalog_of(range(20)), "b": catalog_of(range(100, 120))}
    run = PlannedRun(tmp_path, catalogs, 2, catalogs=_BOTH)
    for end, weights in ((8, {"b": 0.0}), (13, {}), (60, {})):
        run.train(end)
        run.resume(weights=weights)
    assert {max(counts.values()) for counts in run.seen.values()} == {1}
    assert len(run.seen["all/b", 0]) == len(run.seen["all/a", 0]) == 20


@pytest.mark.parametrize("policy", ["merge", "finish"])
def test_a_catalog_that_is_renamed_is_refused(clips: Catalog, policy: str, tmp_path: Path) -> None:
    run, new = PlannedRun(tmp_path, clips, 2), catalog_of(range(50, 60))
    run.train(5)

    def rename(name: str) -> None:
        files = {name: "o.parquet", "new": "n.parquet"}
        run.resume({name: clips, "new": new}, catalogs=files, on_change=policy)

    message = r"no longer trains on the catalog catalog, but on new, old.*keep its name"
    with pytest.raises(DataChangedError, match=message):
        rename("old")
    rename("catalog")
    run.train(30)
    assert run.seen["all/catalog", 0] == _once(clips)


def test_a_stage_that_is_over_does_not_come_again(clips: Catalog, tmp_path: Path) -> None:
    run = PlannedRun(tmp_path, clips, 2, stages=[_A, _B])
    run.train(13)
    run.resume(stages=[_B, _A])
    run.train()
    assert run.step == 20
    assert run.seen == dict.fromkeys([("a/catalog", 0), ("b/catalog", 0)], _once(clips))


@pytest.mark.parametrize(
    ("first", "named"),
    [
        ({"name": "a", "epochs": 3}, "epochs = 3 to stage a"),
        ({"name": "a", "steps": 11}, "steps = 11 to stage a"),
        ({"name": "new", "epochs": 1}, "a stage new"),
    ],
)
def test_nothing_is_added_before_the_stage_that_a_run_is_in(
    clips: Catalog, tmp_path: Path, first: dict[str, Any], named: str
) -> None:
    run = PlannedRun(tmp_path, clips, 2, stages=[_A, _B])
    run.train(13)
    with pytest.raises(DataChangedError, match=f"{named}.*run is in stage b.*another name at the"):
        run.resume(stages=[first, _B])


def test_stills_from_videos_may_change_though_old_records_lack_the_key(tmp_path: Path) -> None:
    still = shape(num_frames=1)
    clips = catalog_of(
        range(12),
        kind=lambda number: "image" if number < 6 else "video",
        num_frames=lambda number: 1 if number < 6 else 8,
    )
    run = PlannedRun(tmp_path, clips, 2, buckets=[still], max_crop=0.9, stages=[_ONCE])
    run.train(2)
    del run.plans.history[0]["order"]["stills_from_videos"]
    run.resume(stills_from_videos=True)
    run.train()
    assert run.seen == {("only/catalog", epoch): _once(clips) for epoch in range(3)}


@pytest.mark.parametrize(("key", "before", "after"), [("epochs", 2, 3), ("steps", 20, 30)])
def test_a_curriculum_that_has_ended_can_be_made_longer(
    clips: Catalog, key: str, before: int, after: int, tmp_path: Path
) -> None:
    run = PlannedRun(tmp_path, clips, 2, stages=[{"name": "one", key: before}])
    run.train()
    assert run.resume(make_catalog(list(clips.clips())[:19])).end_step == run.step == 20
    run.resume(clips, stages=[{"name": "one", key: after}])
    run.train()
    assert run.seen == {("one/catalog", epoch): _once(clips) for epoch in range(3)}


@pytest.mark.parametrize(("key", "count"), [("steps", 40), ("epochs", 9)])
def test_steps_are_those_of_the_whole_stage(
    clips: Catalog, tmp_path: Path, key: str, count: int
) -> None:
    run = PlannedRun(tmp_path, clips, 2, stages=[{"name": "one", key: count}])
    run.step = 15
    assert run.resume(stages=[{"name": "one", "steps": 25}]).end_step == 25


def test_a_change_shortly_before_a_ramp_shortens_it(clips: Catalog, tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [{"name": name, "steps": 100} for name in "ab"]
    stages[1]["ramp_steps"] = 40
    for step in range(75, 100):
        run = PlannedRun(tmp_path, clips, 2, stages=stages)
        run.step = step
        assert run.resume(frame_stride=2).end_step == 200


def test_a_second_score_is_no_change(tmp_path: Path) -> None:
    """`difficulty` could mean either of the two scores."""
    one = catalog_of(range(20), attributes=lambda n: {"nouns": float(n)})
    two = catalog_of(range(20), attributes=lambda n: {"nouns": float(n), "motion": 1.0})
    run = PlannedRun(tmp_path, one, 2, stages=[{"name": "easy", "where": ["difficulty <= q50"]}])
    run.step = 3
    run.resume(two, difficulty="nouns")
    run.step = 0
    run.train(5)
    seen = run.seen["easy/catalog", 0]
    assert (seen.total(), len(seen)) == (10, 10)


def test_finishing_reads_clips_where_they_lie_now(tmp_path: Path) -> None:
    run = PlannedRun(tmp_path, catalog_of(range(10), media=lambda n: Media(f"/old/{n}.mp4")), 2)
    run.step = 2
    after = catalog_of(range(1, 10), media=lambda n: Media(f"/new/{n}.mp4"))
    plans = run.resume(after, on_change="finish")
    batches = [plans.batch(step) for step in range(2, 5)]
    paths = {batch.catalog.clip(int(row)).path for batch in batches for row in batch.rows}
    assert len(paths) == 6
    assert all(path.startswith("/new/") for path in paths - {"/old/0.mp4"})


def test_clips_of_a_swapped_catalog_are_compared_with_those_before(tmp_path: Path) -> None:

    def chunk(numbers: range, nouns: float) -> Catalog:
        return catalog_of(numbers, attributes=lambda n: {"nouns": nouns + n % 3})

    run = PlannedRun(tmp_path, chunk(range(40), 1.0), stages=[_ONCE])
    run.step = 5
    plans = run.resume(chunk(range(100, 140), 5.0))
    data = section(stages=[_ONCE])
    before = plans.stage_before_change()
    (said,) = [line for line in review(plans.plan, data, None, before) if "mean" in line]
    assert "stage only: mean nouns changes from 1.975 to 6" in said
    refusing = section(stages=[_ONCE], on_drift="refuse")
    with pytest.raises(DataError, match=r"data\.on_drift = refuse(.|\n)*mean nouns"):
        review(plans.plan, refusing, None, before)
    assert run.resume().stage_before_change() is None


def test_a_refused_state_leaves_the_loader_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    catalog_of(range(10)).save(path)
    state = Loader(section(catalog=path), batch_size=2).state_dict() | {"global_step": 3}
    catalog_of(range(12)).save(path)
    loader = Loader(section(catalog=path), batch_size=2)
    with pytest.raises(DataChangedError):
        loader.load_state_dict(state)
    assert (loader.step, loader.quarantine.clips) == (0, {})


_MOMENTS = ("mid-epoch", "last batch of an epoch", "second resume in a row")
_POLICIES = ("finish", "merge", "restart")
_WORLDS, _WORKERS = (1, 2, 4), (0, 2, 3)


class _Instant:
    """In the place of `longtake.data.decode_worker.DecodePool`: black windows, at once."""

    @classmethod
    def of_recipe(cls, *_: object) -> "_Instant":
        return cls()

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

    def take_fetched(self) -> stores.Fetched:
        return stores.Fetched()


@pytest.fixture(scope="module")
def instant_decoding() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtake.data.decoding_source.DecodePool", _Instant)
        yield


@pytest.fixture(scope="module")
def folder(changed_catalogs: dict[str, Catalog], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog file for each change; what runs keep goes below it, too."""
    path = tmp_path_factory.mktemp("catalogs")
    for name, catalog in changed_catalogs.items():
        catalog.save(path / f"{name}.parquet")
    return path


@dataclass
class _Launches:
    """Launches of a run whose ranks and workers may be others each time."""

    folder: Path
    oracle: Oracle
    state: dict[str, Any] | None = None

    def launch(
        self, change: str, world_size: int, workers: int, policy: str, steps: int | None
    ) -> None:
        """Train on so many steps, or to the end, from the last launch's state."""
        loaders = self.loaders(change, world_size, workers, policy)
        loaders[0].keep_catalogs()
        self.oracle.train(loaders, None if steps is None else loaders[0].step + steps)
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(set(states)) == 1
        self.state = json.loads(states[0])

    def loaders(
        self, change: str, world_size: int = 1, workers: int = 0, policy: str = "refuse"
    ) -> list[Loader]:
        data = section(
            catalog=self.folder / f"{change}.parquet",
            stages=[_ONCE],
            buckets=[_SQUARE, _SHORT, _WIDE | {"batch_size": 6}, _HALF_WIDE],
            workers=workers,
            on_change=policy,
        )
        how: dict[str, Any] = {"kept": self.folder / "kept", "prefetch_batches": 1 + workers}
        loaders = on_ranks(data, world_size, batch_size=4, **how)
        for loader in loaders:
            if self.state is not None:
                loader.load_state_dict(self.state)
        return loaders


_Pair = tuple[int, int]


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
    change, moment, policy = cell
    run = _Launches(folder, oracle_of(changed_catalogs["same"], 3))
    is_last_batch, steps = moment == "last batch of an epoch", 5
    if is_last_batch:
        (stream,) = run.loaders("same")[0].plan_history.plan.streams()
        steps = stream.parts[0].epoch_span.epoch_start(1)
    run.launch("same", worlds[0], workers[0], "refuse", steps)
    assert run.state is not None
    counted = run.state["epoch"]
    if is_last_batch:
        assert (counted, run.state["step_in_epoch"]) == (1, 0)
    if change != "same":
        with pytest.raises(DataChangedError, match=r"--set data\.on_change=merge"):
            run.launch(change, worlds[1], workers[1], "refuse", None)
        run.oracle.change(policy, identities_of(changed_catalogs[change]), counted)
    if moment == "second resume in a row":
        run.launch(change, worlds[1], workers[1], policy, 3)
        run.launch(change, worlds[0], workers[0], "refuse", 0)
    run.launch(change, worlds[1], workers[1], policy, None)
    assert run.state["stage"] is None
    run.oracle.check()
