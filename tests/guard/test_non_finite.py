"""Numbers that are none: from the first step on, and never forgiven in weights."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from longtake.config import GuardSection
from longtake.guard.history import History
from longtake.guard.judge import judge
from longtake.guard.statistics import Statistics
from longtake.guard.verdict import OK, Verdict

Healthy = Callable[..., list[Statistics]]
Verdicts = Callable[..., list[Verdict]]


@pytest.mark.parametrize(
    "lost",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"grad_norm": math.nan},
        {"grad_norm": math.inf, "nonfinite_share": 0.25},
        {"nonfinite_share": 1e-9},
    ],
)
@pytest.mark.parametrize("at", [0, 3, 200])
def test_such_a_step_is_skipped(
    healthy: Healthy, judged: Verdicts, lost: dict[str, Any], at: int
) -> None:
    """At its own step, whether the run has just begun or not; the steps around it are well."""
    steps = healthy(at + 10)
    steps[at] = replace(steps[at], **lost)
    verdicts = judged(steps)
    assert [number for number, verdict in enumerate(verdicts) if verdict != OK] == [at]
    assert (verdicts[at].kind, verdicts[at].reason) == ("skip", "non_finite")


def test_it_says_what_it_saw(healthy: Healthy) -> None:
    """Both numbers, and how many of the gradient's were lost."""
    step = replace(healthy(1)[0], grad_norm=math.nan, nonfinite_share=0.125)
    message = judge(History(128), step, GuardSection()).message
    assert message == (
        f"The loss is {step.loss:.4g} and the norm of the gradient nan, of which 12.50% are no "
        "finite numbers; both must be finite."
    )


def test_more_than_a_few_within_a_window_make_a_rollback(
    healthy: Healthy, judged: Verdicts
) -> None:
    """To before the first of them: updates that were not made have harmed nothing."""
    steps = healthy(40)
    for at in (20, 21, 25, 30):
        steps[at] = replace(steps[at], loss=math.nan)
    verdicts = judged(steps)
    assert (len(verdicts), verdicts[-1].kind, verdicts[-1].began) == (31, "roll_back", 20)
    assert verdicts[-1].reason == "non_finite"


def test_no_skip_may_be_allowed_at_all(healthy: Healthy, judged: Verdicts) -> None:
    """With guard.max_skips = 0 the first goes back."""
    steps = healthy(40)
    steps[20] = replace(steps[20], loss=math.nan)
    assert judged(steps, GuardSection(max_skips=0))[-1].kind == "roll_back"


def test_weights_that_are_lost_are_lost_at_once(healthy: Healthy, judged: Verdicts) -> None:
    """No later step can heal them: back to when they were numbers."""
    steps = healthy(40)
    steps[20:] = [replace(step, weight_norm=math.nan, loss=math.nan) for step in steps[20:]]
    last = judged(steps)[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "non_finite", 19)
    assert "the update of step 20" in last.message
