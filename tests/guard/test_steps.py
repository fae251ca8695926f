"""Jumps of the weight norm: the story of a defect at the end of each epoch."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from longtake.config import GuardSection
from longtake.guard.statistics import Statistics
from longtake.guard.verdict import OK, Verdict

Healthy = Callable[..., list[Statistics]]
Verdicts = Callable[..., list[Verdict]]

_EPOCH = 500


def _heavier(steps: list[Statistics], first: int, by: float, over: int = 1) -> list[Statistics]:
    """With weights whose norm grows by so much in so many steps, and stays so."""
    return [
        replace(
            step, weight_norm=step.weight_norm + by * min(1.0, max(0, step.step + 1 - first) / over)
        )
        for step in steps
    ]


@pytest.mark.parametrize("late", [0, 1, 9])
def test_five_more_at_an_epochs_end_are_found_at_once(
    healthy: Healthy, judged: Verdicts, late: int
) -> None:
    """The story's defect, +5 at a norm of 700: at the edge or shortly after it, and named so."""
    at = 2 * _EPOCH + late
    verdicts = judged(_heavier(healthy(1500), at, 5.0))
    last = verdicts[-1]
    assert (len(verdicts) - 1, last.kind, last.reason) == (at, "roll_back", "edge_step")
    assert last.began == at - 1
    assert last.message.endswith(", where epoch 2 of stage all begins.")
    assert "within 1 step, in which it usually changes by +0.02" in last.message


def test_a_jump_in_the_middle_of_an_epoch_names_no_edge(healthy: Healthy, judged: Verdicts) -> None:
    """It is as bad, and has another name."""
    verdicts = judged(_heavier(healthy(1500), 777, 5.0))
    last = verdicts[-1]
    assert (len(verdicts) - 1, last.kind, last.reason) == (777, "roll_back", "weight_step")
    assert "epoch" not in last.message


@pytest.mark.parametrize("over", [3, 10])
def test_a_jump_may_take_a_few_steps(healthy: Healthy, judged: Verdicts, over: int) -> None:
    """Found before it is through, and traced to before it began."""
    verdicts = judged(_heavier(healthy(1500), _EPOCH, 5.0, over))
    assert (verdicts[-1].kind, verdicts[-1].reason) == ("roll_back", "edge_step")
    assert _EPOCH <= len(verdicts) - 1 <= _EPOCH + over
    assert verdicts[-1].began < _EPOCH


@pytest.mark.parametrize("by", [-5.0, -600.0, 45.0, 1e9])
def test_jumps_of_any_size_and_sign_are_found(
    healthy: Healthy, judged: Verdicts, by: float
) -> None:
    """Lost weights are no better than blown up ones."""
    verdicts = judged(_heavier(healthy(1500), 777, by))
    assert (len(verdicts) - 1, verdicts[-1].reason) == (777, "weight_step")


def test_a_jump_where_a_stage_begins_is_found_without_a_warm_up(
    healthy: Healthy, judged: Verdicts
) -> None:
    """A stage's first step is compared with the stage before, in this respect."""
    steps = [
        replace(step, stage="hard", edge="stage hard begins" if step.step == 700 else None)
        if step.step >= 700
        else step
        for step in healthy(1500)
    ]
    last = judged(_heavier(steps, 700, 5.0))[-1]
    assert (last.reason, last.began) == ("edge_step", 699)
    assert last.message.endswith(", where stage hard begins.")


def test_short_epochs_do_not_make_every_jump_an_edges(healthy: Healthy, judged: Verdicts) -> None:
    """Where an epoch has 16 steps, one in its middle is not shortly after its edge."""
    steps = [
        replace(step, edge=f"epoch {step.step // 16} begins" if step.step % 16 == 0 else None)
        for step in healthy(300)
    ]
    assert judged(_heavier(steps, 200, 5.0))[-1].reason == "weight_step"
    assert judged(_heavier(steps, 209, 5.0))[-1].reason == "edge_step"


def test_updates_that_have_grown_are_the_reason_rather_than_the_place(
    healthy: Healthy, judged: Verdicts
) -> None:
    """A learning rate that was raised moves the weights at once; it is called by its name."""
    steps = healthy(1500)
    moved = [
        replace(step, group_update_ratios={k: 20 * v for k, v in step.group_update_ratios.items()})
        if step.step > 777
        else step
        for step in _heavier(steps, 778, 90.0, over=20)
    ]
    last = judged(moved)[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "divergence", 777)
    assert "The norm of the weights went from" in last.message
    assert "times as large as usual" in last.message


@pytest.mark.parametrize("section", [GuardSection(), GuardSection(window=32, warmup_steps=16)])
def test_early_training_may_move_the_weights_fast(
    healthy: Healthy, judged: Verdicts, section: GuardSection
) -> None:
    """As Muon does it: still at first, then from 71 to 370, ever slower: no jump anywhere."""
    steps = [
        replace(step, weight_norm=norm * (1 + 1e-4 * (step.step % 7)))
        for step in healthy(1000)
        for norm in [71 + 300 * (1 - 0.994 ** (step.step**2 / (step.step + 60)))]
    ]
    assert set(judged(steps, section)) == {OK}


def test_a_jump_too_small_to_matter_is_left_alone(healthy: Healthy, judged: Verdicts) -> None:
    """Less than two thousandths of the norm, however far outside of its usual changes."""
    assert set(judged(_heavier(healthy(1200), 777, 1.0))) == {OK}


def test_it_is_not_judged_before_the_warm_up(healthy: Healthy, judged: Verdicts) -> None:
    """Nothing is usual yet in a run's first steps."""
    assert set(judged(_heavier(healthy(60), 30, 90.0), GuardSection())) == {OK}
