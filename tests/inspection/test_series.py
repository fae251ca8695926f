"""Series of a plot: compared with all numbers of its steps, whatever the width."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.inspection import rows as rows_module
from longtake.inspection import series as series_module
from longtake.inspection.columns import ABSENT, DTYPE
from longtake.inspection.rows import MetricRows, read_rows
from longtake.inspection.series import (
    SERIES,
    Series,
    abandoned_branches,
    read_series,
    speeds_by_bucket,
)
from longtake.run_dir import RunDirectory


def _rows(steps: Any, **columns: Any) -> MetricRows:
    """Rows as `read_rows` returns them; a later row abandons all from its step on."""
    table = np.zeros(len(steps), DTYPE)
    table["step"] = steps
    for name, values in columns.items():
        table[name] = values
    source = rows_module._Source.empty()
    source.store.append(table)
    is_abandoned, later = np.zeros(len(table), bool), 2**60
    for place, step in reversed(list(enumerate(table["step"].tolist()))):
        is_abandoned[place] = step >= later
        later = min(step, later)
    return MetricRows(Path("metrics.jsonl"), source, range(len(table)), is_abandoned)


def _one(rows: MetricRows, name: str, first: int, last: int, pixels: int, **more: Any) -> Series:
    (found,) = read_series(rows, [name], first, last, pixels, **more)
    return found


def _least_greatest_mean(values: Any) -> list[float]:
    numbers = values[np.isfinite(values)]
    return [numbers.min(), numbers.max(), numbers.mean()] if len(numbers) else [np.nan] * 3


_NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([np.nan, np.inf, ABSENT, 1e300, 0.0]))


@st.composite
def _runs(draw: st.DrawFn) -> MetricRows:
    """Up to 700 rows: some steps are missing, others were done several times."""
    steps: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, max(steps, default=0) + 40))
        count, seed = draw(st.integers(1, 350)), draw(st.integers(0, 2**32 - 1))
        gaps = np.random.default_rng(seed).choice([1, 1, 1, 1, 2, 50], count)
        steps += np.cumsum(np.append(begin, gaps)).tolist()
    some = draw(st.lists(_NUMBERS, min_size=1, max_size=40))
    seed = draw(st.integers(0, 2**32 - 1))
    return _rows(steps, loss=np.random.default_rng(seed).choice(some, len(steps)))


@given(rows=_runs(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_each_bucket_has_all_numbers_of_its_rows(rows: MetricRows, data: st.DataObject) -> None:
    first, last = data.draw(st.integers(-5, 9000)), data.draw(st.integers(-5, 9000))
    pixels = data.draw(st.sampled_from([1, 2, 40]))
    found = _one(rows, "loss", first, last, pixels)
    shown = rows[~rows.is_abandoned]
    shown = shown[(shown.step >= first) & (shown.step <= last)]
    values, steps = shown.raw_column("loss"), shown.step
    assert len(found.x) <= pixels
    assert (np.diff(found.x) > 0).all()
    assert ((steps >= found.x.min(initial=2**60)) & (steps <= last)).all()
    if len(shown) > pixels * 256:  # by blocks, of which one may have a gap in it
        finite = values[np.isfinite(values)]
        if len(finite):
            assert np.nanmin(found.low) == finite.min()
            assert np.nanmax(found.high) == finite.max()
        return
    ends = np.append(found.x, last + 1)[1:]
    for place, (begin, end) in enumerate(zip(found.x, ends, strict=True)):
        inside = values[(steps >= begin) & (steps < end)]
        is_bad = bool((np.isnan(inside) | np.isposinf(inside)).any())
        assert found.is_not_finite[place] == is_bad
        wanted = _least_greatest_mean(inside)
        got = [found.low[place], found.high[place], found.mean[place]]
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(max_examples=30, deadline=None)
def test_blocks_are_reduced_to_what_their_rows_are(seed: int, data: st.DataObject) -> None:
    """Without gaps a bucket is at most a block longer or shorter than a pixel."""
    numbers = np.random.default_rng(seed)
    count = data.draw(st.integers(600, 3000))
    values = numbers.standard_normal(count)
    values[numbers.integers(0, count, 9)] = np.nan
    rows = _rows(np.arange(1, count + 1), loss=0.0)
    rows.columns["loss"] = values
    first = data.draw(st.integers(1, count))
    last = data.draw(st.integers(first, count))
    pixels = data.draw(st.integers(1, 12))
    found = _one(rows, "loss", first, last, pixels)
    assert found.x[0] == first
    edges = [*(found.x - 1), last]
    pixel = -(-(last - first + 1) // pixels)
    assert max(np.diff(edges)) <= pixel + 64
    for place, (begin, end) in enumerate(pairwise(edges)):
        inside = values[begin:end]
        got = [found.low[place], found.high[place], found.mean[place]]
        wanted = _least_greatest_mean(inside)
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
        assert found.is_not_finite[place] == np.isnan(inside).any()


def test_what_was_reduced_is_used_for_rows_that_follow(told: RunDirectory) -> None:
    """A server keeps rows, and asks for those that are new."""
    lines = told.metrics_path.read_text().splitlines(keepends=True)
    line = lines[-1].replace('"loss":', '"loss": 9, "x":')
    text = "".join(line.replace('"step":24', f'"step":{step}') for step in range(1, 501))
    told.metrics_path.write_text(text)
    rows = read_rows(told)
    before = _one(rows, "loss", 0, 999, 1)
    with told.metrics_path.open("a") as file:
        for step in range(501, 1001):
            file.write(
                line.replace('"step":24', f'"step":{step}').replace('"loss": 9', '"loss": 7')
            )
    again = read_rows(told, rows)
    assert len(again.reduced["loss"].low) == 500 // 64
    after = _one(again, "loss", 0, 1000, 1)
    assert (before.low[0], before.high[0]) == (9, 9)
    assert (after.low[0], after.high[0]) == (7, 9)
    assert after.mean == pytest.approx(8)
    assert len(again.reduced["loss"].low) == 1000 // 64


def test_steps_without_rows_are_a_gap() -> None:
    rows = _rows([1, 2, 3, 7, 8], loss=[1, 2, np.nan, 4, ABSENT])
    found = _one(rows, "loss", 0, 100, 50)
    assert found.x.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(found.mean, [1, 2, np.nan, np.nan, np.nan, np.nan, 4, np.nan])
    assert found.is_not_finite.tolist() == [False, False, True, *[False] * 5]


def test_series_over_time_or_batches_have_no_gaps_and_rise() -> None:
    rows = _rows([1, 2, 5, 6], loss=[1, 2, 3, 4], time=[10, 30, 20, 40], batch=[0, 1, 7, 8])
    over_time = _one(rows, "loss", 1, 6, 6, x="time")
    assert over_time.x.tolist() == [10, 30, 30, 40]
    assert over_time.mean.tolist() == [1, 2, 3, 4]
    assert _one(rows, "loss", 1, 6, 6, x="batch").x.tolist() == [0, 1, 7, 8]


def test_clips_per_second_are_known_where_clips_are() -> None:
    rows = _rows([1, 2, 3], num_samples=[8, ABSENT, 4], step_seconds=[2, 2, 0])
    found = _one(rows, "samples_per_second", 1, 3, 3)
    np.testing.assert_array_equal(found.mean, [4, np.nan, np.nan])
    assert not found.is_not_finite.any()


def test_tokens_per_second_are_told_apart_by_the_bucket_of_a_step() -> None:
    """The step that was given up does not count, nor do those of older runs."""
    frames = [8, 8, 1, 8, 8, ABSENT]
    rows = _rows(
        [1, 2, 2, 3, 4, 5],
        tokens_per_second=[100, 9999, 40, 10, 80, ABSENT],
        step_seconds=[1, 1, 2, 2, 1, 1],
        mfu=[0.25, 0.5, ABSENT, 0.75, ABSENT, ABSENT],
        num_frames=frames,
        height=[ABSENT if each == ABSENT else 32 for each in frames],
        width=[ABSENT if each == ABSENT else 65536 for each in frames],
    )
    video, picture = speeds_by_bucket(rows)
    assert (str(video.bucket), video.num_steps) == ("8 frames of 65536x32", 3)
    assert (video.median, video.mean) == (80, (100 + 20 + 80) / 4)
    assert (video.step_seconds, video.mfu) == (1, 0.5)
    assert (str(picture.bucket), picture.num_steps) == ("1 frame of 65536x32", 1)
    assert (picture.median, picture.mean) == (40, 40)
    assert (picture.step_seconds, picture.mfu) == (2, None)


def test_rows_without_tokens_have_no_speed() -> None:
    older = _rows([1, 2], tokens_per_second=ABSENT, num_frames=8, step_seconds=1)
    assert speeds_by_bucket(older) == speeds_by_bucket(_rows([])) == []


@pytest.mark.parametrize(("first", "last"), [(0, 0), (9, 3), (100, 200), (3, 3), (2**70, 2**71)])
def test_a_window_without_rows_is_empty(first: int, last: int) -> None:
    found = read_series(_rows([1, 2, 9], loss=1), list(SERIES), first, last, 100)
    assert [each.name for each in found] == list(SERIES)
    assert all(len(each.x) == len(each.low) == len(each.mean) == 0 for each in found)
    assert [len(each.x) for each in read_series(_rows([]), ["loss"], 0, 9, 9)] == [0]


def test_steps_of_any_size_make_few_buckets() -> None:
    found = _one(_rows([0, 2**53], loss=[1, 2]), "loss", -(2**80), 2**80, 10**9)
    assert len(found.x) <= series_module.MAX_PIXELS
    assert found.x[[0, -1]].tolist() == [0, 2**53]
    assert found.mean[[0, -1]].tolist() == [1, 2]


def test_the_smoothed_loss_is_the_exponential_mean_with_bias_correction() -> None:
    numbers = np.random.default_rng(0)
    losses = 1 + numbers.random(5000)
    losses[[0, 100, 101]] = np.nan
    verdicts = np.zeros(5000, bool)
    losses[200], verdicts[200] = 1e30, True  # a spike, whose update was skipped
    rows = _rows(np.arange(1, 5001), loss=0.0)
    rows.columns.update(loss=losses, has_verdict=verdicts)
    decay, total, weight, expected = 1 - 1 / 64, 0.0, 0.0, []
    for loss, has_verdict in zip(losses, verdicts, strict=True):
        counts = np.isfinite(loss) and not has_verdict
        total = decay * total + (loss if counts else 0)
        weight = decay * weight + counts
        expected.append(total / weight if weight else np.nan)
    found = _one(rows, "loss_smoothed", 1, 5000, 5000)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-9)
    assert found.mean[1] == losses[1]
    assert 1.4 < found.mean[-1] < 1.6


def test_branches_that_were_given_up_are_separate(told: RunDirectory, killed: RunDirectory) -> None:
    rows = read_rows(told)
    (branch,) = abandoned_branches(rows)
    assert (branch.first_step, branch.last_step, branch.returned_to) == (13, 20, 12)
    (loss,) = branch.read(["loss"], 0, 99, 500)
    assert loss.x.tolist() == list(range(12, 21))
    wanted = [each["loss"] for each in told.metric_lines()[11:20]]
    assert loss.mean.tolist() == wanted
    assert _one(rows, "loss", 0, 99, 500).mean.tolist()[12:] == [
        each["loss"] for each in told.metric_lines()[20:]
    ]
    (branch,) = abandoned_branches(read_rows(killed))
    assert (branch.first_step, branch.last_step, branch.returned_to) == (13, 20, 12)
    assert abandoned_branches(_rows([1, 2, 3])) == []
    assert abandoned_branches(_rows([])) == []


def test_of_many_branches_the_longest_are_kept() -> None:
    steps = [*range(1, 50), 40, *[41, 42] * 300, 30, 31, 32, 10]
    found = abandoned_branches(_rows(steps))
    assert len(found) == 100
    assert [found[0].first_step, found[0].last_step] == [10, 49]
    assert [found[-1].first_step, found[-1].last_step] == [30, 32]
    assert found[-1].returned_to == 9
    assert found[0].returned_to == 39
