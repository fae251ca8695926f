"""The plan: from a global step to the clips of its batch, over stages, catalogs and epochs."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of, section

from longtake.config import DataSection
from longtake.data.catalog import Catalog
from longtake.data.checks import Drift, drifts, refuse_missing, refuse_wrong_catalogs, review
from longtake.data.clip import Media
from longtake.data.plan import Plan, begin
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


def _rows(catalog: Catalog, least_frames: int = 0) -> list[int]:
    return [row for row, n in enumerate(catalog.column("num_frames")) if n >= least_frames]


def test_stages_follow_one_another() -> None:
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
    """While one catalog is trained once, the other is trained three times."""
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
    assert plan.end_step is not None
    found = _consumed(plan, plan.end_step - 1)
    assert found == Counter(
        ("a", "catalog", epoch, row) for epoch in range(10) for row in range(20)
    )


def test_a_ramp_mixes_stages_and_loses_nothing() -> None:
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
    sizes: list[int], ramp: int, batch_size: int, seed: int, data: st.DataObject
) -> None:
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


def test_ramps_that_do_not_fit_are_an_error() -> None:
    stages = [
        {"name": "a", "steps": 50},
        {"name": "b", "steps": 10, "ramp_steps": 12},
        {"name": "c", "ramp_steps": 10},
    ]
    message = r"Stage b has 10 steps, .* half of 12 at its beginning and half of 10 at its end"
    with pytest.raises(DataError, match=message):
        begin({"catalog": catalog_of(range(9))}, section(stages=stages), 4, 0)


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


def test_weights_need_steps_and_a_share() -> None:
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


def test_a_warm_up_longer_than_its_stage_is_known_before_the_first_step() -> None:
    stages = [{"name": "a", "steps": 2}, {"name": "b", "epochs": 1, "warmup_steps": 9}]
    with pytest.raises(DataError, match=r"Stage b has 3 steps and warmup_steps = 9: its learning"):
        begin({"catalog": catalog_of(range(9))}, section(stages=stages), 4, 0)


def test_an_empty_stage_is_known_before_the_first_step() -> None:
    """However late it would begin."""
    stages = [{"name": "a", "steps": 10**6}, {"name": "b", "where": ["num_frames > 100"]}]
    with pytest.raises(DataError, match="Stage b: none of the catalog's 9 clips"):
        begin({"catalog": catalog_of(range(9))}, section(stages=stages), 4, 0)


def test_each_stage_has_a_batch_size_of_its_own_and_its_epochs_stay_exact() -> None:
    clips = catalog_of(range(23))
    stages = [
        {"name": "a", "epochs": 2, "global_batch_size": 3},
        {"name": "b", "epochs": 3, "global_batch_size": 7, "ramp_steps": 4},
        {"name": "c", "epochs": 1},
    ]
    plan = begin({"catalog": clips}, section(stages=stages), batch_size=5, seed=0)
    assert plan.end_step is not None
    batches = [plan.batch(step) for step in range(plan.end_step)]
    assert {(each.stage, each.batch_size) for each in batches} == {("a", 3), ("b", 7), ("c", 5)}
    assert {len(each.rows) for each in batches if each.stage == "b"} >= {7}
    epochs = {"a": 2, "b": 3, "c": 1}
    wanted = (
        (s, "catalog", e, row) for s, n in epochs.items() for e in range(n) for row in range(23)
    )
    assert _consumed(plan) == Counter(wanted)


def test_each_bucket_has_a_batch_size_of_its_own_in_each_stage() -> None:
    clips = catalog_of(range(30))
    shapes = [{"num_frames": 4, "height": 16, "width": 16, "batch_size": 6}]
    shapes += [{"num_frames": 4, "height": 16, "width": 32}]
    stages = [{"name": "a", "epochs": 2}, {"name": "b", "epochs": 1, "global_batch_size": 3}]
    plan = begin({"catalog": clips}, section(stages=stages, buckets=shapes), batch_size=4, seed=0)
    assert plan.end_step is not None
    batches = [plan.batch(step) for step in range(plan.end_step)]
    found = {(each.stage, each.bucket.width): each.batch_size for each in batches}
    assert found == {("a", 16): 6, ("a", 32): 4, ("b", 16): 6, ("b", 32): 3}
    assert _consumed(plan) == Counter(
        (s, "catalog", e, row)
        for s, n in (("a", 2), ("b", 1))
        for e in range(n)
        for row in range(30)
    )


def test_clips_of_several_buckets_go_to_each_by_share_and_once_an_epoch() -> None:
    """Wide clips go to three buckets, square ones to two, each epoch others to each."""
    shapes = [_SQUARE, _WIDE, {"num_frames": 2, "height": 16, "width": 32, "share": 0.25}]
    shapes += [{"num_frames": 1, "height": 8, "width": 8, "share": 0.4, "batch_size": 7}]
    shapes += [{"num_frames": 3, "height": 8, "width": 16, "share": 0.1}]
    recipe = section(stages=[{"name": "a", "epochs": 3}], buckets=shapes, stills_from_videos=True)
    plan = begin({"catalog": catalog_of(range(120))}, recipe, batch_size=4, seed=0)
    ((stream,),) = (stage.streams for stage in plan.stages)
    # 40 wide clips: 65 %, 25 %, 10 %; 80 square ones: 60 % and 40 %
    assert stream.parts[0].epoch_span.sizes == (48, 26, 10, 32, 4)
    assert plan.end_step is not None
    assert _consumed(plan) == Counter(("a", "catalog", e, n) for e in range(3) for n in range(120))
    found: dict[tuple[str, int], set[int]] = {}
    for step in range(plan.end_step):
        batch = plan.batch(step)
        for row, epoch in zip(batch.rows.tolist(), batch.epochs, strict=True):
            found.setdefault((str(batch.bucket), epoch), set()).add(row)
    for index, shape in enumerate(plan.stages[0].streams[0].parts[0].members.shapes):
        in_epochs = [found[str(shape), epoch] for epoch in range(3)]
        assert [len(rows) for rows in in_epochs] == [stream.parts[0].epoch_span.sizes[index]] * 3
        assert in_epochs[0] != in_epochs[1] != in_epochs[2]
        assert set.union(*in_epochs) <= set(stream.parts[0].members.candidates(index).tolist())


def test_a_plans_fingerprint_names_its_batches() -> None:
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
        begin(clips, section(stages=[{"name": "all", "global_batch_size": 3}]), 4, 0),
        begin(clips, section(buckets=[_SQUARE | {"batch_size": 4}, _WIDE]), 4, 0),
        begin(clips, section(buckets=[_SQUARE | {"batch_size": 5}, _WIDE]), 4, 0),
        begin(clips, section(buckets=[{"num_frames": 4, "height": 16, "width": 16}]), 4, 0),
        *(
            begin(clips, section(buckets=[_SQUARE, _WIDE, _SMALL | {"share": share}]), 4, 0)
            for share in (0.5, 0.51, None)
        ),
    ]
    assert len({plan.fingerprint for plan in [plain, *others]}) == 13


_SQUARE, _WIDE = ({"num_frames": 4, "height": 16, "width": width} for width in (16, 32))
_SMALL = {"num_frames": 4, "height": 8, "width": 8}


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


def test_stages_that_are_too_different_are_named(clips: Catalog) -> None:
    warnings = _reviewed(clips, section(stages=_JUMP))
    assert warnings == [
        "stage hard: mean num_frames changes from 13.5 to 33.5, 3.5 standard deviations",
        "stage hard: mean nouns changes from 9.5 to 29.5, 3.5 standard deviations",
    ]
    assert _reviewed(clips, section(stages=_JUMP, drift_limit=3.5)) == []


def test_stages_that_are_too_different_may_be_refused(clips: Catalog) -> None:
    data = section(stages=_JUMP, on_drift="refuse", drift_limit=2.0)
    with pytest.raises(DataError) as caught:
        _reviewed(clips, data)
    message = str(caught.value)
    assert "stage hard: mean nouns changes from 9.5 to 29.5, 3.5 standard deviations" in message
    assert "data.drift_limit = 2.0" in message
    near = section(stages=[_JUMP[0], {"name": "all"}], on_drift="refuse", drift_limit=2.0)
    assert _reviewed(clips, near) == []


def test_buckets_that_are_empty_or_smaller_than_a_batch_are_named() -> None:
    one, two, none = ({"num_frames": 4, "height": 16, "width": width} for width in (16, 32, 300))
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
    """With the step that they would begin at."""
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


@pytest.fixture(scope="module")
def drifting_clips() -> Catalog:
    """Forty clips of 4 to 43 frames; the longer, the more nouns; every fifth has no score."""
    return catalog_of(
        range(40),
        num_frames=lambda n: 4 + n,
        attributes=lambda n: {"nouns": float("nan") if n % 5 == 0 else float(n)},
    )


def _drifts(catalogs: dict[str, Catalog], data: DataSection) -> dict[str, Drift]:
    return {drift.attribute: drift for drift in drifts(begin(catalogs, data, 4, 0).stages)}


def test_drift_is_measured_in_standard_deviations(drifting_clips: Catalog) -> None:
    stages = [
        {"name": "a", "where": ["num_frames < 12"], "epochs": 1},
        {"name": "b", "where": ["num_frames >= 12"]},
    ]
    found = _drifts({"catalog": drifting_clips}, section(stages=stages))
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
