"""Spikes: found at their own step, by what is usual at their noise level, and told for people."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtake.config import GuardSection
from longtake.guard.history import History, Judged
from longtake.guard.judge import judge
from longtake.guard.statistics import Statistics
from longtake.guard.verdict import OK, Verdict

Healthy = Callable[..., list[Statistics]]
Verdicts = Callable[..., list[Verdict]]
Histories = Callable[..., History]
Louder = Callable[..., Statistics]

_SECTION = GuardSection()


@pytest.mark.parametrize("at", [64, 100, 700, 1999])
@pytest.mark.parametrize("factor", [3.0, 10.0, 1e6])
def test_a_loss_spike_is_found_at_its_own_step(
    healthy: Healthy, judged: Verdicts, louder: Louder, at: int, factor: float
) -> None:
    """Also while the loss still falls fast; and no other step is."""
    steps = healthy(at + 20 if at < 1900 else 2000)
    steps[at] = louder(steps[at], factor)
    verdicts = judged(steps)
    assert [number for number, verdict in enumerate(verdicts) if verdict != OK] == [at]
    assert (verdicts[at].kind, verdicts[at].reason, verdicts[at].began) == ("skip", "spike", at)


def test_it_says_what_it_saw(healthy: Healthy, history_of: Histories, louder: Louder) -> None:
    """Which number, its value, what is usual, how far beyond, and at which noise levels."""
    steps = healthy(300)
    everywhere = judge(history_of(steps[:-1]), louder(steps[-1], 8.0), _SECTION)
    assert everywhere.message.startswith(f"The loss of {8 * steps[-1].loss:.4g} is 7.")
    assert "robust standard deviations" in everywhere.message
    assert everywhere.message.endswith(", at all noise levels.")
    one = judge(history_of(steps[:-1]), louder(steps[-1], 20.0, quarter=1), _SECTION)
    assert one.message.endswith(", but only at sigmas of 0.25 to 0.5.")


def test_a_gradient_that_sticks_out_alone_is_a_spike(
    healthy: Healthy, history_of: Histories
) -> None:
    """The loss is measured before anything has gone wrong with it."""
    steps = healthy(300)
    verdict = judge(history_of(steps[:-1]), replace(steps[-1], grad_norm=30.0), _SECTION)
    assert (verdict.kind, verdict.reason) == ("skip", "spike")
    assert verdict.message.startswith("The gradient norm of 30 is ")
    assert verdict.message.endswith(f"; the loss is {steps[-1].loss:.4g}.")


def test_a_rare_noise_level_explains_a_high_loss(healthy: Healthy, history_of: Histories) -> None:
    """One sample near sigma = 0 may have a hundred times the usual loss, in good health.

    No level that is known sticks out, nor the gradient by more than the loss. Where that level is
    known as well, it is a spike.
    """
    rare = [
        replace(step, loss_by_sigma=(math.nan, *step.loss_by_sigma[1:])) for step in healthy(300)
    ]
    first = 60 * rare[-1].loss
    now = replace(
        rare[-1],
        loss=16 * rare[-1].loss,
        grad_norm=30 * rare[-1].grad_norm,
        loss_by_sigma=(first, *rare[-1].loss_by_sigma[1:]),
    )
    assert judge(history_of(rare[:-1]), now, _SECTION) == OK
    assert judge(history_of(healthy(300)[:-1]), now, _SECTION).reason == "spike"


def test_nothing_explains_a_loss_without_bounds(healthy: Healthy, history_of: Histories) -> None:
    """A loss that is thousands of times the usual is a spike at any noise level and shape."""
    steps = healthy(300)
    wild = replace(steps[-1], loss=1e5, loss_by_sigma=(math.nan, math.nan, math.nan, 1e5))
    unseen = replace(wild, bucket="1 frame of 64x64")
    known = [replace(each, loss_by_sigma=(*each.loss_by_sigma[:3], math.nan)) for each in steps]
    assert judge(history_of(known[:-1]), wild, _SECTION).reason == "spike"
    assert judge(history_of(steps[:-1]), unseen, _SECTION).reason == "spike"


def test_a_falling_loss_is_no_spike_and_hides_none(healthy: Healthy, judged: Verdicts) -> None:
    """A loss that halves every 20 steps spreads over decades, yet ten times the usual is seen."""
    steps = [
        replace(step, loss=fall * step.loss, loss_by_sigma=(fall, fall, fall, fall))
        for step in healthy(200)
        for fall in [0.5 ** (step.step / 20)]
    ]
    assert set(judged(steps)) == {OK}
    steps[150] = replace(steps[150], loss=10 * steps[150].loss, loss_by_sigma=(math.nan,) * 4)
    assert [at for at, verdict in enumerate(judged(steps)) if verdict != OK] == [150]


def test_too_many_skips_make_a_rollback_to_before_the_first(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """With good steps between them the state is proven good, so only the batches are to blame."""
    steps = healthy(400)
    for at in (300, 310, 320, 330):
        steps[at] = louder(steps[at], 10.0)
    verdicts = judged(steps)
    kinds = [verdicts[at].kind for at in (300, 310, 320, 330)]
    assert kinds == ["skip", "skip", "skip", "roll_back"]
    assert (verdicts[-1].began, len(verdicts)) == (300, 331)
    assert "number 4" in verdicts[-1].message
    assert "step 301" in verdicts[-1].message


def test_skips_that_are_long_ago_are_forgiven(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Only those within a window count."""
    steps = healthy(900)
    for at in range(100, 900, 50):
        steps[at] = louder(steps[at], 10.0)
    kinds = [verdict.kind for verdict in judged(steps)]
    assert kinds.count("skip") == 16
    assert "roll_back" not in kinds


def test_a_state_that_only_spikes_is_not_trusted(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Where no step has been well since the first spike, the update before it may have done it."""
    steps = healthy(400)
    steps[300:] = [louder(step, 10.0) for step in steps[300:]]
    verdicts = judged(steps)
    assert (len(verdicts), verdicts[-1].kind, verdicts[-1].began) == (304, "roll_back", 299)


def test_a_state_that_spikes_now_and_then_is_not_trusted_either(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Steps between that are no spikes but far from ordinary do not clear the state."""
    steps = healthy(400)
    steps[300:] = [louder(step, 4.0 if step.step % 3 else 1.7) for step in steps[300:]]
    verdicts = judged(steps)
    assert (verdicts[-1].kind, verdicts[-1].began) == ("roll_back", 299)
    assert len(verdicts) <= 310


def test_a_loss_that_runs_away_is_traced_to_where_it_began(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Ten per cent more in each step is a spike some steps later; the state was bad before."""
    steps = healthy(400)
    steps[300:] = [louder(step, 1.1 ** (step.step - 299)) for step in steps[300:]]
    verdicts = judged(steps)
    assert verdicts[-1].kind == "roll_back"
    assert 290 <= verdicts[-1].began <= 303
    assert len(verdicts) <= 318


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(lost=st.sets(st.integers(0, 198), max_size=90), value=st.sampled_from([math.nan, math.inf]))
def test_lost_numbers_in_the_window_do_not_blind_it(
    healthy: Healthy, louder: Louder, lost: set[int], value: float
) -> None:
    """However many losses of the window are none, a spike is found and a healthy step is not."""
    steps = healthy(200)
    history = History(_SECTION.window)
    for step in steps[:-1]:
        is_lost = step.step in lost
        row = replace(step, loss=value, grad_norm=value) if is_lost else step
        history = history.with_(Judged(row, "ok"))
    assert judge(history, steps[-1], _SECTION) == OK
    assert judge(history, louder(steps[-1], 10.0), _SECTION).reason == "spike"
