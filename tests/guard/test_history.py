"""A history is bounded, immutable, and the same after a resume."""

import json
import math
from dataclasses import replace

import pytest
from pydantic import TypeAdapter
from tests.guard.runs import healthy, history_of

from longtake.guard.detectors import judge
from longtake.guard.history import (
    GuardSettings,
    History,
    HistoryColumns,
    JudgedStep,
    StepStatistics,
)


def _steps(history: History) -> list[int]:
    return [each.statistics.step for each in history]


def test_it_remembers_four_windows() -> None:
    history = History(32)
    for step in healthy(400):
        history = history.append(JudgedStep(step, "ok"))
    assert _steps(history) == list(range(400 - 128, 400))
    assert len(history) == len(history.rows) == 128
    assert history.rows.column("step").tolist() == _steps(history)


@pytest.mark.parametrize("length", [0, 5, 255, 256, 300])
def test_histories_appended_to_the_same_one_are_independent(length: int) -> None:
    steps = healthy(302)
    shared = History(32)
    for step in steps[:length]:
        shared = shared.append(JudgedStep(step, "ok"))
    before = _steps(shared)
    one = shared.append(JudgedStep(steps[-2], "ok"))
    other = shared.append(JudgedStep(steps[-1], "skip"))
    assert _steps(shared) == before
    assert _steps(one) == [*before, 300][-128:]
    assert _steps(other) == [*before, 301][-128:]
    assert one.rows.column("step")[-1] == 300
    assert other.rows.have_verdict("skip").tolist()[-1]


def test_it_judges_after_a_resume_as_if_it_had_never_stopped() -> None:
    steps = healthy(300)
    history = history_of(steps[:-1], at_200="skip")
    kept = json.dumps(history.as_json(), allow_nan=False)
    resumed = History.from_json(json.loads(kept), GuardSettings().window)
    assert list(resumed) == list(history)
    wild = replace(steps[-1], loss=9.0, loss_by_sigma=(12.0, 9.0, 7.0, 8.0))
    verdict = judge(history, wild, GuardSettings())
    assert verdict.kind == "skip"
    assert judge(resumed, wild, GuardSettings()) == verdict


def test_it_is_small_in_checkpoints() -> None:
    history = history_of(healthy(600))
    assert len(history) == 512
    assert len(json.dumps(history.as_json())) < 512 * 512


def test_an_empty_one_comes_back_empty() -> None:
    assert len(History.from_json(History(64).as_json(), 64)) == 0


def test_one_that_does_not_count_restarts_of_the_rate_is_read() -> None:
    """From before `cosine_restarts`."""
    whole = history_of(healthy(5)).as_json()
    older = {name: column for name, column in whole.items() if name != "num_restarts"}
    checked = TypeAdapter(HistoryColumns).validate_python(older)
    assert History.from_json(checked, 128).as_json() == whole


def test_another_window_takes_over_what_it_wants() -> None:
    kept = history_of(healthy(500)).as_json()
    assert _steps(History.from_json(kept, 32)) == list(range(500 - 128, 500))
    assert _steps(History.from_json(kept, 1000)) == list(range(500))


def test_nan_and_infinity_pass_through_valid_json() -> None:
    [step] = healthy(1)
    lost = replace(
        step,
        edge="stage two begins",
        loss=math.inf,
        grad_norm=-math.inf,
        loss_by_sigma=(math.nan, 0.5, 0.25, 1.0),
        group_grad_norms={"attention": math.nan, "mlp": 0.5},
    )
    back = StepStatistics.from_dict(json.loads(json.dumps(lost.as_dict(), allow_nan=False)))
    assert repr(back) == repr(lost)  # by what is written, as NaN is not equal to itself


def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    """A stage may be called "nan" or "1"."""
    step = replace(healthy(1)[0], stage="nan", bucket="1", edge="inf")
    assert StepStatistics.from_dict(step.as_dict()) == step


def test_rounding_keeps_what_fp32_can_tell_apart() -> None:
    """Rounded numbers are within fp32's own error, and rounding them again changes nothing."""
    step = healthy(1)[0]
    rounded = step.rounded()
    assert math.isclose(rounded.loss, step.loss, rel_tol=2**-24)
    assert rounded.rounded() == rounded
    assert (rounded.step, rounded.stage, rounded.edge) == (step.step, step.stage, step.edge)
