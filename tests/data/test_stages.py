"""The curriculum: which clips a stage selects, and which stage each step belongs to."""

from bisect import bisect_right
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.data.build import catalog_of, section

from longtake.config import DataSection, Stage
from longtake.data import stages
from longtake.data.buckets import TOO_SMALL
from longtake.data.catalog import Catalog
from longtake.data.order import shares
from longtake.data.stages import StageTimeline, mixed, select
from longtake.errors import DataError


@pytest.fixture(scope="module")
def clips() -> Catalog:
    """Twenty clips: clip n has n nouns (of every fifth it is not known) and 4 + n frames.

    Clips 18 and 19 have no caption; odd ones are hevc.
    """
    return catalog_of(
        range(20),
        num_frames=lambda n: 4 + n,
        codec=lambda n: "hevc" if n % 2 else "h264",
        caption=lambda n: f"clip {n}" if n < 18 else "",
        attributes=lambda n: {} if n % 5 == 0 else {"nouns": float(n)},
    )


def _selected(clips: Catalog, section: DataSection, **stage: object) -> set[int]:
    chosen = select(clips, Stage.model_validate({"name": "one", **stage}), section).members
    return {clips.clip(int(row)).num_frames - 4 for row in chosen.all_rows()}


_SCORED = {n for n in range(18) if n % 5}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ((), set(range(18))),
        (("num_frames >= 10",), set(range(6, 18))),
        (("num_frames > 10",), set(range(7, 18))),
        (("num_frames <= 10",), set(range(7))),
        (("num_frames < 10",), set(range(6))),
        (("num_frames == 10",), {6}),
        (("num_frames != 10",), set(range(18)) - {6}),
        (("num_frames>=10", " nouns  <  9 "), {6, 7, 8}),
        (("nouns != 7",), _SCORED - {7}),  # what is not known meets no condition, not even this
        (("nouns <= q50",), {n for n in _SCORED if n <= 8}),  # the median of the captioned
        (("nouns > q50",), {n for n in _SCORED if n > 8}),
        (("nouns <= q0",), {1}),
        (("nouns >= q100",), {17}),
        (("difficulty >= 16",), {16, 17}),
        (("codec == hevc",), set(range(1, 18, 2))),
        (("codec != 'hevc'",), set(range(0, 18, 2))),
        (("aspect > 1",), set(range(0, 18, 3))),
        (("duration_seconds <= 1e0",), set(range(18))),
        # Quantiles are those of all captioned clips, whatever the condition before left over.
        (("nouns >= 10", "nouns <= q50"), None),
    ],
)
def test_conditions_select(
    clips: Catalog, conditions: tuple[str, ...], expected: set[int] | None
) -> None:
    if expected is None:
        with pytest.raises(DataError, match=r"12 \(not nouns >= 10\), 6 \(not nouns <= q50\)"):
            _selected(clips, section(), where=conditions)
    else:
        assert _selected(clips, section(), where=conditions) == expected


def test_what_is_left_out_is_counted_by_the_first_reason(clips: Catalog) -> None:
    stage = Stage(
        name="one", where=("num_frames >= 6", "nouns < 10"), drop_hardest=0.2, buckets=None
    )
    selection = select(clips, stage, section())
    assert dict(selection.dropped) == {
        "no caption": 2,
        "not num_frames >= 6": 2,
        "not nouns < 10": 9,
        "the hardest": 1,
    }
    assert len(selection.members) == 6


def test_clips_without_a_caption_and_small_ones_are_kept_or_left_out_by_choice() -> None:
    clips = catalog_of(range(12), caption=lambda n: "" if n < 3 else "x", height=lambda n: 60 + n)
    assert len(select(clips, Stage(name="one"), section()).members) == 9
    assert len(select(clips, Stage(name="one"), section(keep_uncaptioned=True)).members) == 12
    widths, heights = clips.column("width"), clips.column("height")
    shorter = np.minimum(widths, heights)
    least = int(np.sort(shorter)[6])
    found = select(clips, Stage(name="one"), section(keep_uncaptioned=True, min_size=least))
    small = int((shorter < least).sum())
    assert dict(found.dropped) == (
        {f"smaller than data.min_size = {least}": small} if small else {}
    )
    assert len(found.members) == 12 - small


def test_clips_that_no_bucket_takes_without_enlarging_them_are_counted() -> None:
    sides = [(64, 64), (64, 32), (32, 64), (16, 16)]
    clips = catalog_of(range(4), width=lambda n: sides[n][0], height=lambda n: sides[n][1])
    shapes = [{"num_frames": 1, "width": w, "height": h} for w, h in ((64, 64), (64, 32))]
    stage = Stage.model_validate({"name": "one", "buckets": shapes})
    data = section(upscale=False, stills_from_videos=True)
    found = select(clips, stage, data)
    assert dict(found.dropped) == {TOO_SMALL: 2}
    paths = [{clips.clip(int(row)).width for row in rows} for rows in found.members.rows]
    assert paths == [{64}, {64}]
    small = Stage.model_validate({"name": "one", "buckets": [{**shapes[0], "width": 128}]})
    with pytest.raises(DataError, match=r"too small for every bucket, .* a smaller bucket, or let"):
        select(clips, small, data)


def test_clips_that_are_too_short_for_the_stages_buckets_are_counted(clips: Catalog) -> None:
    stage = Stage.model_validate(
        {"name": "long", "buckets": [{"num_frames": 20, "height": 16, "width": 16}]}
    )
    selection = select(clips, stage, section())
    assert dict(selection.dropped) == {"no caption": 2, "too short for every bucket": 16}
    assert selection.members.sizes == (2,)


def test_the_hardest_are_dropped(clips: Catalog) -> None:
    assert _selected(clips, section(), drop_hardest=0.1) == set(range(16))
    assert _selected(clips, section(), drop_hardest=0.01) == set(range(17))
    assert _selected(clips, section(), drop_hardest=0.9) <= {0, 5, 10, 15}


def test_of_equally_hard_clips_the_same_number_is_dropped() -> None:
    tied = catalog_of(range(10), attributes=lambda _: {"nouns": 3.0})
    selection = select(tied, Stage(name="one", drop_hardest=0.3), section())
    assert len(selection.members) == 7


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("num_frames", "not a condition of a stage. Expected ATTRIBUTE OPERATOR VALUE"),
        ("num_frames =< 3", "not a condition of a stage"),
        ("num_frames > ", "not a condition of a stage"),
        ("beauty > 3", r"no attribute beauty; it has num_frames, .*nouns.*longtake data score"),
        ("nouns > many", "many is neither a number nor a quantile such as q40"),
        ("nouns > q101", "quantiles go from q0 to q100"),
        ("codec > hevc", "codec is a text, and only == and != compare those"),
    ],
)
def test_malformed_conditions_are_named(clips: Catalog, condition: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _selected(clips, section(), where=(condition,))


def test_difficulty_needs_one_score_or_a_name() -> None:
    two = catalog_of(range(6), attributes=lambda n: {"nouns": float(n), "motion": float(-n)})
    where = ("difficulty <= -4",)
    with pytest.raises(DataError, match=r"The catalog has motion, nouns. Set data.difficulty"):
        select(two, Stage(name="one", where=where), section())
    chosen = select(two, Stage(name="one", where=where), section(difficulty="motion"))
    assert len(chosen.members) == 2
    with pytest.raises(DataError, match="The catalog has none"):
        select(catalog_of(range(6)), Stage(name="one", drop_hardest=0.1), section())


def test_an_empty_stage_says_what_was_left_out(clips: Catalog) -> None:
    stage = Stage(name="hard", where=("nouns > 90",))
    with pytest.raises(DataError) as caught:
        select(clips, stage, section(stages=[stage]))
    assert str(caught.value).startswith(
        "Stage hard: none of the catalog's 20 clips can be trained on: 2 (no caption), 18 (not "
        "nouns > 90). The buckets are 4 frames of 16x16, 4 frames of 32x16; the longest clip has "
        "23 frames."
    )


def test_an_empty_stage_between_equal_quantiles_gives_their_values() -> None:
    tied = catalog_of(range(10), attributes=lambda n: {"nouns": float(n) if n > 8 else 3.0})
    stage = Stage(name="middle", where=("nouns > q40", "nouns <= q60"))
    with pytest.raises(DataError, match=r"`nouns > q40` is nouns > 3 and `nouns <= q60` is nouns"):
        select(tied, stage, section(stages=[stage]))


def test_nothing_at_all_is_an_error() -> None:
    silent = catalog_of(range(3), caption=lambda _: "")
    with pytest.raises(DataError, match=r"None of the catalog's 3 clips .*3 \(no caption\)"):
        select(silent, Stage(name="all"), section())
    with pytest.raises(DataError, match="it is empty"):
        select(catalog_of([]), Stage(name="all"), section())


_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@st.composite
def _timelines(draw: st.DrawFn) -> StageTimeline:
    """Stages at least as long as the ramps at their ends; the last may be endless."""
    lengths = draw(_lengths)
    ramps = [0, *(2 * draw(st.integers(0, 20)) for _ in lengths[1:])]
    for length, ramp, following in zip(lengths, ramps, [*ramps[1:], 0], strict=True):
        assume(length >= (ramp + following) // 2)
    is_endless = draw(st.booleans())
    return StageTimeline((*lengths[:-1], None if is_endless else lengths[-1]), tuple(ramps))


@settings(max_examples=100, deadline=None)
@given(timeline=_timelines())
def test_every_batch_of_every_stage_comes_once(timeline: StageTimeline) -> None:
    total = timeline.borders[-1] + 40 if timeline.total is None else timeline.total
    found: list[list[int]] = [[] for _ in timeline.lengths]
    for step in range(total):
        assert timeline.taken(step) == [len(each) for each in found]
        stage, index = timeline.at(step)
        found[stage].append(index)
    for batches, length in zip(found, timeline.lengths, strict=True):
        assert batches == list(range(len(batches)))
        assert length in (None, len(batches))


@settings(max_examples=60, deadline=None)
@given(timeline=_timelines())
def test_outside_of_ramps_stages_do_not_mix(timeline: StageTimeline) -> None:
    total = timeline.borders[-1] + 40 if timeline.total is None else timeline.total
    for step in range(total):
        plain = bisect_right(timeline.borders, step) - 1
        stage, _ = timeline.at(step)
        if stage != plain:
            later = max(stage, plain)
            assert abs(stage - plain) == 1
            assert abs(step + 0.5 - timeline.borders[later]) < timeline.ramps[later] / 2


def test_a_ramps_share_rises_linearly() -> None:
    timeline = StageTimeline((1000, 1000), (0, 400))
    stages = [timeline.at(step)[0] for step in range(2000)]
    tenths = [np.mean(stages[800 + 40 * part : 840 + 40 * part]) for part in range(10)]
    np.testing.assert_allclose(tenths, np.arange(0.05, 1, 0.1), atol=0.026)
    assert sum(stages) == 1000
    assert set(stages[:800]) == {0}
    assert set(stages[1200:]) == {1}


def test_without_stages_there_are_no_steps() -> None:
    assert StageTimeline((), ()).total == 0


_weights = st.lists(
    st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 1.0, 2.5, 7.0]), min_size=1, max_size=5
).filter(any)


@settings(max_examples=80, deadline=None)
@given(weights=_weights, length=st.integers(1, 80))
def test_sources_are_mixed_by_weight_at_every_prefix(weights: list[float], length: int) -> None:
    counts: Counter[int] = Counter()
    for index in range(length):
        source, number = mixed(index, weights)
        assert number == counts[source]
        assert weights[source]
        counts[source] += 1
        assert shares(index + 1, weights) == [counts[each] for each in range(len(weights))]
        for each, weight in enumerate(weights):
            assert abs(counts[each] - (index + 1) * weight / sum(weights)) < 2


def test_small_weights_keep_their_share() -> None:
    assert shares(10, (1e-7, 1e-7)) == shares(10, (1.0, 1.0))
    assert mixed(0, (1e-7, 1e-7))[1] == 0


def test_a_mixture_far_on_costs_no_more() -> None:
    assert sum(shares(10**12 + 1, (0.7, 0.2, 0.1))) == 10**12 + 1
    assert shares(10**12, (0.7, 0.2, 0.1)) == [7 * 10**11, 2 * 10**11, 10**11]


def test_the_guide_lists_what_conditions_may_name(clips: Catalog) -> None:
    guide = Path("docs/guides/curriculum.md").read_text()
    names = ("aspect", *stages._NUMBERS, *stages._TEXTS)
    assert not [name for name in names if f"`{name}`" not in guide]
