"""The plan: from a global step to the clips of its batch, over stages, catalogs and epochs."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.plan import Plan, begin
from longtake.errors import DataError

_CatalogOf = Callable[..., Catalog]
_Section = Callable[..., DataSection]


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


def _rows(catalog: Catalog, least_frames: int = 0) -> list[int]:
    return [row for row, n in enumerate(catalog.column("num_frames")) if n >= least_frames]


def test_stages_follow_one_another(catalog_of: _CatalogOf, section: _Section) -> None:
    """Of epochs or of steps; every clip that a stage selects once in each of its epochs."""
    clips = catalog_of(range(20), num_frames=lambda n: 4 + n)
    stages = [
        {"name": "all", "epochs": 2},
        {"name": "long", "epochs": 1, "where": ["num_frames >= 14"]},
        {"name": "end", "steps": 3},
    ]
    plan = begin({"catalog": clips}, section(stages=stages), batch_size=4, seed=0)
    assert plan.end_step is not None
    order = [plan.batch(step).stage for step in range(plan.end_step)]
    assert list(dict.fromkeys(order)) == ["all", "long", "end"]
    assert order == sorted(order, key=["all", "long", "end"].index)
    assert order.count("end") == 3
    found = _consumed(plan, plan.end_step - 3)
    wanted = [("all", "catalog", epoch, row) for epoch in (0, 1) for row in _rows(clips)]
    wanted += [("long", "catalog", 0, row) for row in _rows(clips, 14)]
    assert found == Counter(wanted)


def test_the_batch_says_where_it_comes_from(catalog_of: _CatalogOf, section: _Section) -> None:
    """Its bucket is that of all its clips; its stream is counted over all stages."""
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


def test_catalogs_are_mixed_by_weight_and_have_epochs_of_their_own(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """Three batches of one for each of the other; each source's epochs are whole."""
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


def test_a_ramp_mixes_stages_and_loses_nothing(catalog_of: _CatalogOf, section: _Section) -> None:
    """The last batches of one and the first of the next are interleaved."""
    clips = catalog_of(range(40))
    stages = [{"name": "a", "epochs": 1}, {"name": "b", "epochs": 1, "ramp_steps": 9}]
    plan = begin({"catalog": clips}, section(stages=stages), batch_size=4, seed=0)
    assert plan.end_step is not None
    found = _consumed(plan)
    assert found == Counter((stage, "catalog", 0, row) for stage in "ab" for row in range(40))
    order = "".join(plan.batch(step).stage for step in range(plan.end_step))
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
    catalog_of: _CatalogOf,
    section: _Section,
    sizes: list[int],
    ramp: int,
    batch_size: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Brute force, stage by stage: consumed before and left at a step make up whole epochs."""
    clips = catalog_of(range(15), num_frames=lambda n: 4 + n)
    stages = [
        {
            "name": str(i),
            "epochs": 2,
            "where": [f"num_frames < {4 + n}"],
            "ramp_steps": ramp * (i > 0),
        }
        for i, n in enumerate(sizes)
    ]
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
        mine = {key[2:] for key in found if key[0] == stage.stage.name}
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


def test_ramps_that_do_not_fit_are_an_error(catalog_of: _CatalogOf, section: _Section) -> None:
    """Named with the stage's length and both ramps."""
    stages = [
        {"name": "a", "steps": 50},
        {"name": "b", "steps": 10, "ramp_steps": 12},
        {"name": "c", "ramp_steps": 10},
    ]
    message = r"Stage b has 10 steps, .* half of 12 at its beginning and half of 10 at its end"
    with pytest.raises(DataError, match=message):
        begin({"catalog": catalog_of(range(9))}, section(stages=stages), 4, 0)


def test_weights_need_steps_and_a_share(catalog_of: _CatalogOf, section: _Section) -> None:
    """Of several catalogs an epoch is not defined; of none there is no batch."""
    clips = {"a": catalog_of(range(9)), "b": catalog_of(range(20, 29))}
    both = {"a": "a.parquet", "b": "b.parquet"}
    data = section(catalogs=both, stages=[{"name": "one", "epochs": 2}])
    with pytest.raises(
        DataError, match=r"Stage one mixes the catalogs a, b .* Give the stage steps"
    ):
        begin(clips, data, 4, 0)
    data = section(catalogs=both, weights={"a": 0.0, "b": 0.0})
    with pytest.raises(DataError, match="Stage all: every catalog has weight 0"):
        begin(clips, data, 4, 0)
    data = section(catalogs=both, weights={"b": 0.0}, stages=[{"name": "one", "epochs": 2}])
    assert begin(clips, data, 3, 0).end_step == 6


def test_an_empty_stage_is_known_before_the_first_step(
    catalog_of: _CatalogOf, section: _Section
) -> None:
    """However late it would begin."""
    stages = [{"name": "a", "steps": 10**6}, {"name": "b", "where": ["num_frames > 100"]}]
    with pytest.raises(DataError, match="Stage b: none of the catalog's 9 clips"):
        begin({"catalog": catalog_of(range(9))}, section(stages=stages), 4, 0)


def test_a_plans_fingerprint_names_its_batches(catalog_of: _CatalogOf, section: _Section) -> None:
    """Other clips, buckets, stages, lengths, weights or batch sizes are another plan's."""
    clips = {"catalog": catalog_of(range(9))}
    plain = begin(clips, section(), 4, 0)
    assert (
        begin(clips, section(workers=0, frame_cache_gib=0.0), 4, 0).fingerprint == plain.fingerprint
    )
    others = [
        begin({"catalog": catalog_of(range(10))}, section(), 4, 0),
        begin(clips, section(), 5, 0),
        begin(clips, section(stages=[{"name": "all", "epochs": 2}]), 4, 0),
        begin(clips, section(stages=[{"name": "all", "steps": 9}]), 4, 0),
        begin(clips, section(stages=[{"name": "other"}]), 4, 0),
        begin(clips, section(buckets=[{"num_frames": 4, "height": 16, "width": 16}]), 4, 0),
    ]
    assert len({plan.fingerprint for plan in [plain, *others]}) == 7
