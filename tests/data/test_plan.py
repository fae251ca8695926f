"""The plan: from a global step to the clips of its batch, over stages, catalogs and epochs."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of, section, shape

from longtake.data.plan import Plan, PlannedBatch, begin
from longtake.errors import DataError


def _consumed(plan: Plan, end: int | None = None) -> Counter[tuple[str, str, int, int]]:
    """(stage, source, epoch, row) of every sample before a step."""
    end = plan.end_step if end is None else end
    assert end is not None
    batches = map(plan.batch, range(plan.first_step, end))
    return Counter(
        (each.stage, each.source, epoch, int(row))
        for each in batches
        for row, epoch in zip(each.rows, each.epochs, strict=True)
    )


def _batches(plan: Plan) -> list[PlannedBatch]:
    assert plan.end_step is not None
    return [plan.batch(step) for step in range(plan.end_step)]


def test_stages_follow_one_another() -> None:
    clips = catalog_of(range(20), num_frames=lambda n: 4 + n)
    stages = [
        {"name": "all", "epochs": 2},
        {"name": "long", "epochs": 1, "where": ["num_frames >= 14"]},
        {"name": "end", "steps": 3},
    ]
    plan = begin({"catalog": clips}, section(stages=stages), batch_size=4, seed=0)
    order = [batch.stage for batch in _batches(plan)]
    assert list(dict.fromkeys(order)) == ["all", "long", "end"]
    assert order == sorted(order, key=["all", "long", "end"].index)
    assert order.count("end") == 3
    rows = range(20)
    expected = [("all", "catalog", epoch, row) for epoch in (0, 1) for row in rows]
    expected += [("long", "catalog", 0, row) for row in rows if clips.clip(row).num_frames >= 14]
    assert _consumed(plan, len(order) - 3) == Counter(expected)


def test_an_epoch_of_a_stage_is_over_when_each_catalog_has_had_its_own() -> None:
    """In the mean: what fills no batch is carried into the next epoch."""
    clips = {"a": catalog_of(range(10)), "b": catalog_of(range(30, 50))}
    stages = [{"name": "ends", "epochs": 3}, {"name": "endless", "weights": {"a": 1, "b": 4}}]
    data = section(catalogs={"a": "a.parquet", "b": "b.parquet"}, stages=stages)
    ends, endless = begin(clips, data, batch_size=4, seed=0).stages
    repeats = {"a": 2}
    assert ends.epoch_steps({}) == 7.5
    assert endless.epoch_steps({}) == 2.5 * 5
    assert endless.epoch_steps(repeats) == 2 * 2.5 * 5
    assert endless.epoch_steps({"b": 5}) == 5 * 5 * 5 / 4


def test_the_batch_says_where_it_comes_from() -> None:
    clips = {"a": catalog_of(range(12)), "b": catalog_of(range(30, 42))}
    stages = [{"name": "one", "steps": 8, "weights": {"b": 0}}, {"name": "two"}]
    data = section(catalogs={"a": "a.parquet", "b": "b.parquet"}, stages=stages)
    plan = begin(clips, data, batch_size=4, seed=0)
    for step in range(30):
        batch = plan.batch(step)
        assert batch.step == step
        assert batch.catalog is clips[batch.source]
        assert set(batch.catalog.column("width")[batch.rows]) == {batch.bucket.width}
        assert len(batch.rows) == len(batch.epochs) == batch.batch_size == 4
        stream = plan.streams()[batch.stream]
        assert (stream.stage, stream.source) == (batch.stage, batch.source)
    assert {plan.batch(step).source for step in range(8)} == {"a"}
    assert {plan.batch(step).source for step in range(8, 12)} == {"a", "b"}


def test_catalogs_are_mixed_by_weight_and_have_epochs_of_their_own() -> None:
    clips = {"a": catalog_of(range(24)), "b": catalog_of(range(100, 140))}
    data = section(catalogs={"a": "a.parquet", "b": "b.parquet"}, weights={"a": 3.0})
    plan = begin(clips, data, batch_size=4, seed=1)
    sources = [plan.batch(step).source for step in range(80)]
    for end in range(1, 80):
        assert abs(sources[:end].count("a") - 0.75 * end) < 2
    found = _consumed(plan, 80)
    assert max(found.values()) == 1
    whole = {("all", "a", epoch, row) for epoch in range(10) for row in range(24)}
    assert whole <= set(found)
    assert {("all", "b", 0, row) for row in range(40)} <= set(found)


def test_repeated_catalogs_are_trained_so_often_and_epochs_stay_exact() -> None:
    clips = {"many": catalog_of(range(60)), "few": catalog_of(range(100, 120))}
    data = section(catalogs={name: f"{name}.parquet" for name in clips}, repeats={"few": 3})
    plan = begin(clips, data, batch_size=4, seed=1)
    steps = (60 + 3 * 20) // 4
    found = _consumed(plan, steps)
    assert max(found.values()) == 1
    per_source = Counter(source for (_, source, _, _) in found.elements())
    assert per_source == {"many": 60, "few": 60}
    for end in range(1, steps):
        taken = Counter(plan.batch(step).source for step in range(end))
        assert abs(taken["few"] - end / 2) < 2
    found = _consumed(plan, 2 * steps)
    assert {("all", "few", epoch, row) for epoch in range(5) for row in range(20)} <= set(found)
    assert {("all", "many", 0, row) for row in range(60)} <= set(found)


def test_an_epoch_of_a_stage_is_all_repeats_of_its_catalog() -> None:
    clips = {"catalog": catalog_of(range(20))}
    stages = [{"name": "a", "epochs": 2}, {"name": "b", "steps": 1}]
    data = section(stages=stages, repeats={"catalog": 5})
    plan = begin(clips, data, batch_size=4, seed=1)
    found = _consumed(plan, len(_batches(plan)) - 1)
    assert found == Counter(("a", "catalog", epoch, n) for epoch in range(10) for n in range(20))


def test_a_ramp_mixes_stages_and_loses_nothing() -> None:
    clips = catalog_of(range(40))
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "epochs": 1, "ramp_steps": 9}]
    plan = begin({"catalog": clips}, section(stages=stages), batch_size=4, seed=0)
    found = _consumed(plan)
    assert found == Counter((stage, "catalog", 0, row) for stage in "ab" for row in range(40))
    order = "".join(batch.stage for batch in _batches(plan))
    border = plan.timeline.borders[1]
    assert order[: border - 4] == "a" * (border - 4)
    assert set(order[border + 4 :]) == {"b"}
    assert set(order[border - 4 : border]) == set(order[border : border + 4]) == {"a", "b"}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 15), min_size=1, max_size=3),
    ramp=st.integers(0, 6),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_what_is_open_at_a_step_is_what_was_not_consumed(
    sizes: list[int], ramp: int, batch_size: int, seed: int, data: st.DataObject
) -> None:
    clips = catalog_of(range(15), num_frames=lambda n: 4 + n)
    stages: list[dict[str, Any]] = [
        {"name": str(i), "epochs": 2, "where": [f"num_frames < {4 + n}"], "ramp_steps": ramp}
        for i, n in enumerate(sizes)
    ]
    stages[0]["ramp_steps"] = 0
    try:
        plan = begin({"catalog": clips}, section(stages=stages), batch_size, seed)
    except DataError as error:
        assert "too few for its ramps" in str(error)  # noqa: PT017 - not all draws are possible
        return
    assert plan.end_step is not None
    step = data.draw(st.integers(0, plan.end_step))
    found = _consumed(plan, step)
    for stage, (count,), n in zip(plan.stages, plan.taken(step), sizes, strict=True):
        (stream,) = stage.streams
        mine = {key[2:] for key in found if key[0] == stage.name}
        opened = stream.open_at(count)
        for each in opened:
            left = {int(row) for row in each.left.all_rows()}
            consumed = {row for epoch, row in mine if epoch == each.epoch}
            rows = {row for row, m in enumerate(clips.column("num_frames")) if m < 4 + n}
            assert left.isdisjoint(consumed)
            assert left | consumed == rows
            identities = {clips.clip(row).identity for row in consumed}
            assert {each.hex() for each in each.consumed.to_pylist()} == identities
        is_open = {each.epoch for each in opened}
        for epoch in {epoch for epoch, _ in mine} - is_open:
            assert len({row for other, row in mine if other == epoch}) == n


_BOTH = {"a": "a.parquet", "b": "b.parquet"}
_A, _B, _C = {"name": "a"}, {"name": "b"}, {"name": "c", "ramp_steps": 10}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"stages": [_A | {"steps": 50}, _B | {"steps": 10, "ramp_steps": 12}, _C]},
            r"Stage b has 10 steps, .* half of 12 at its beginning and half of 10 at its end",
        ),
        (
            {"stages": [_A | {"steps": 2}, _B | {"epochs": 1, "warmup_steps": 9}]},
            r"Stage b has 3 steps and warmup_steps = 9: its learning",
        ),
        (
            {"stages": [_A | {"steps": 10**6}, _B | {"where": ["num_frames > 100"]}]},
            "Stage b: none of the catalog's 9 clips",
        ),
        (
            {"catalogs": _BOTH, "weights": {"a": 2}, "stages": [{"name": "one", "epochs": 2}]},
            r"Stage one mixes the catalogs a, b by weights.* Give it steps",
        ),
        (
            {"catalogs": _BOTH, "weights": {"a": 0.0, "b": 0.0}},
            "Stage all: every catalog has weight 0",
        ),
    ],
    ids=["ramps do not fit", "long warm-up", "no clips", "epochs and weights", "no weight"],
)
def test_stages_that_cannot_be_are_refused_before_the_first_step(
    data: dict[str, Any], message: str
) -> None:
    recipe = section(**data)
    with pytest.raises(DataError, match=message):
        begin(dict.fromkeys(recipe.sources(), catalog_of(range(9))), recipe, 4, 0)


def test_a_stage_of_one_catalog_with_a_weight_may_have_epochs() -> None:
    clips = {"a": catalog_of(range(9)), "b": catalog_of(range(20, 29))}
    data = section(catalogs=_BOTH, weights={"b": 0.0}, stages=[{"name": "one", "epochs": 2}])
    assert begin(clips, data, 3, 0).end_step == 6


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30)),
    repeats=st.integers(1, 3),
    batch_size=st.integers(1, 7),
)
def test_catalogs_of_a_stage_in_epochs_end_together(
    sizes: tuple[int, ...], repeats: int, batch_size: int
) -> None:
    clips = {name: catalog_of(range(n)) for name, n in zip("abc", sizes, strict=True)}
    paths = {name: f"{name}.parquet" for name in clips}
    data = section(catalogs=paths, repeats={"b": repeats}, stages=[{"name": "s", "epochs": 2}])
    plan = begin(clips, data, batch_size, 0)
    expected = Counter(
        ("s", name, epoch, row)
        for name, n in zip("abc", sizes, strict=True)
        for epoch in range(2 * (repeats if name == "b" else 1))
        for row in range(n)
    )
    assert _consumed(plan) == expected


def test_each_bucket_has_a_batch_size_of_its_own_in_each_stage() -> None:
    clips = catalog_of(range(30))
    shapes = [shape(batch_size=6), shape(32)]
    stages = [{"name": "a", "epochs": 2}]
    stages += [{"name": "b", "epochs": 1, "global_batch_size": 3, "ramp_steps": 4}]
    plan = begin({"catalog": clips}, section(stages=stages, buckets=shapes), batch_size=4, seed=0)
    found = {(each.stage, each.bucket.width): each.batch_size for each in _batches(plan)}
    assert found == {("a", 16): 6, ("a", 32): 4, ("b", 16): 6, ("b", 32): 3}
    epochs = (("a", 0), ("a", 1), ("b", 0))
    expected = ((stage, "catalog", epoch, row) for stage, epoch in epochs for row in range(30))
    assert _consumed(plan) == Counter(expected)


def test_clips_of_several_buckets_go_to_each_by_share_and_once_an_epoch() -> None:
    shapes = [shape(), shape(32), shape(32, num_frames=2, share=0.25)]
    shapes += [shape(8, num_frames=1, height=8, share=0.4, batch_size=7)]
    shapes += [shape(num_frames=3, height=8, share=0.1)]
    recipe = section(stages=[{"name": "a", "epochs": 3}], buckets=shapes, stills_from_videos=True)
    plan = begin({"catalog": catalog_of(range(120))}, recipe, batch_size=4, seed=0)
    ((stream,),) = (stage.streams for stage in plan.stages)
    # 40 wide clips: 65 %, 25 %, 10 %; 80 square ones: 60 % and 40 %
    assert stream.parts[0].epoch_span.sizes == (48, 26, 10, 32, 4)
    assert _consumed(plan) == Counter(("a", "catalog", e, n) for e in range(3) for n in range(120))
    found: dict[tuple[str, int], set[int]] = {}
    for batch in _batches(plan):
        for row, epoch in zip(batch.rows.tolist(), batch.epochs, strict=True):
            found.setdefault((str(batch.bucket), epoch), set()).add(row)
    for index, bucket in enumerate(plan.stages[0].streams[0].parts[0].members.shapes):
        in_epochs = [found[str(bucket), epoch] for epoch in range(3)]
        assert [len(rows) for rows in in_epochs] == [stream.parts[0].epoch_span.sizes[index]] * 3
        assert in_epochs[0] != in_epochs[1] != in_epochs[2]
        assert set.union(*in_epochs) <= set(stream.parts[0].members.candidates(index).tolist())


def test_a_plans_fingerprint_names_its_batches() -> None:
    clips = {"catalog": catalog_of(range(9))}
    plain = begin(clips, section(), 4, 0)
    same = begin(clips, section(workers=0, frame_cache_gib=0.0), 4, 0)
    assert same.fingerprint == plain.fingerprint
    changes: list[dict[str, Any]] = [
        {"stages": [{"name": "all", "epochs": 2}]},
        {"stages": [{"name": "all", "steps": 9}]},
        {"stages": [{"name": "other"}]},
        {"stages": [{"name": "all", "global_batch_size": 3}]},
        {"buckets": [shape(batch_size=4), shape(32)]},
        {"buckets": [shape(batch_size=5), shape(32)]},
        {"buckets": [shape()]},
        *(
            {"buckets": [shape(), shape(32), shape(8, height=8, share=share)]}
            for share in (0.5, 0.51, None)
        ),
    ]
    others = [begin(clips, section(**change), 4, 0) for change in changes]
    others += [begin({"catalog": catalog_of(range(10))}, section(), 4, 0)]
    others += [begin(clips, section(), 5, 0)]
    assert len({plan.fingerprint for plan in [plain, *others]}) == 13
