"""Slow divergence: found within 100 steps, and traced to where it began."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from longtake.config import GuardSection
from longtake.guard.statistics import Statistics
from longtake.guard.verdict import OK, Verdict

Healthy = Callable[..., list[Statistics]]
Verdicts = Callable[..., list[Verdict]]
Louder = Callable[..., Statistics]

_AT = 600


def _raised(step: Statistics, group: str, factor: float) -> Statistics:
    """With the learning rate of a group raised from the step before on."""
    ratios = step.group_update_ratios
    return replace(step, group_update_ratios={**ratios, group: factor * ratios[group]})


@pytest.mark.parametrize("factor", [5.0, 10.0, 30.0])
@pytest.mark.parametrize("group", ["attention", "mlp", "embedding"])
def test_a_learning_rate_that_was_raised_shows_in_the_updates(
    healthy: Healthy, judged: Verdicts, group: str, factor: float
) -> None:
    """Within eight steps, by name of the group, and traced to the step of the first such update."""
    steps = healthy(_AT + 100)
    steps[_AT + 1 :] = [_raised(step, group, factor) for step in steps[_AT + 1 :]]
    verdicts = judged(steps)
    last = verdicts[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "divergence", _AT)
    assert f"The updates of the {group} weights are" in last.message
    assert len(verdicts) - 1 - _AT <= 8
    assert set(verdicts[:-1]) == {OK}


def test_updates_that_have_shrunk_do_not_hide_it(healthy: Healthy, judged: Verdicts) -> None:
    """Adam's are largest at the start: after some hundred steps they may be a fifth of that."""
    steps = [
        replace(step, group_update_ratios={k: v * shrunk for k, v in ratios.items()})
        for step in healthy(400)
        for ratios in [step.group_update_ratios]
        for shrunk in [max(0.2, 1 - step.step / 150)]
    ]
    assert set(judged(steps)) == {OK}
    steps[251:] = [_raised(step, "mlp", 10.0) for step in steps[251:]]
    verdicts = judged(steps)
    assert (verdicts[-1].reason, verdicts[-1].began) == ("divergence", 250)
    assert len(verdicts) - 1 - 250 <= 8


@pytest.mark.parametrize("percent", [1.0, 5.0])
def test_updates_that_grow_little_by_little_are_found(
    healthy: Healthy, judged: Verdicts, percent: float
) -> None:
    """They are compared with all that is remembered as well as with the newest."""
    steps = healthy(_AT + 300)
    steps[_AT:] = [
        _raised(step, "mlp", (1 + percent / 100) ** (step.step - _AT)) for step in steps[_AT:]
    ]
    verdicts = judged(steps)
    assert verdicts[-1].reason == "divergence"
    assert (1 + percent / 100) ** (len(verdicts) - _AT) < 8


def test_the_schedule_is_no_divergence(healthy: Healthy, judged: Verdicts) -> None:
    """A warm-up over hundreds of steps raises the updates a hundredfold, as it is meant to."""
    steps = [
        replace(
            step,
            learning_rate_factor=factor,
            update_ratio=2e-5 * factor,
            group_update_ratios=dict.fromkeys(step.group_update_ratios, 2e-5 * factor),
        )
        for step in healthy(1000)
        for factor in [step.step / 1000]
    ]
    assert set(judged(steps)) == {OK}


def test_weights_that_grow_from_nothing_are_no_divergence(
    healthy: Healthy, judged: Verdicts
) -> None:
    """LoRA begins with zeros: its norm rises a hundredfold and its update ratio falls as much."""
    steps = [
        replace(
            step,
            weight_norm=norm,
            group_weight_norms={"attention": norm},
            group_update_ratios={"attention": 0.05 * step.learning_rate_factor / norm},
        )
        for step in healthy(1500)
        for norm in [0.02 + 0.01 * step.step]
    ]
    assert set(judged(steps)) == {OK}


def test_steps_without_an_update_do_not_hide_it(healthy: Healthy, judged: Verdicts) -> None:
    """After a step that was skipped there is no update to measure, and 0 stands for it."""
    steps = healthy(_AT + 100)
    steps[_AT + 1 :] = [_raised(step, "mlp", 10.0) for step in steps[_AT + 1 :]]
    nothing = dict.fromkeys(steps[0].group_update_ratios, 0.0)
    for at in range(2, len(steps), 3):
        steps[at] = replace(
            steps[at], group_update_ratios=nothing, update_ratio=0.0, learning_rate_factor=0.0
        )
    verdicts = judged(steps)
    assert verdicts[-1].reason == "divergence"
    assert len(verdicts) - 1 - _AT <= 12


@pytest.mark.parametrize("percent", [0.5, 2.0, 3.0])
def test_a_loss_that_creeps_up_is_found(
    healthy: Healthy, judged: Verdicts, louder: Louder, percent: float
) -> None:
    """Before it has doubled, though no step of it is a spike; traced to near the beginning."""
    steps = healthy(1200)
    growth = math.log1p(percent / 100)
    steps[_AT:] = [louder(step, math.exp(growth * (step.step - _AT))) for step in steps[_AT:]]
    verdicts = judged(steps)
    last, passed = verdicts[-1], len(verdicts) - 1 - _AT
    assert (last.kind, last.reason) == ("roll_back", "divergence")
    assert last.message.startswith("The loss has risen and stays up: ")
    assert growth * passed < math.log(2)
    assert last.began <= _AT + passed / 2


def test_a_gradient_that_grows_while_the_loss_falls_is_fine(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """As at the beginning of most trainings; with a loss that rises by a quarter it is not."""
    steps = healthy(1200)
    grown = [replace(step, grad_norm=step.grad_norm * math.exp(step.step / 250)) for step in steps]
    assert set(judged(grown)) == {OK}
    grown[_AT:] = [louder(step, 1.25) for step in grown[_AT:]]
    last = judged(grown)[-1]
    assert (last.kind, last.reason) == ("roll_back", "divergence")
    assert last.message.startswith("The gradient norm has risen")


def test_a_short_bad_stretch_is_no_divergence(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Six steps at 1.8 times the loss are luck of the draw."""
    steps = healthy(900)
    steps[_AT : _AT + 6] = [louder(step, 1.8) for step in steps[_AT : _AT + 6]]
    assert set(judged(steps)) == {OK}


def test_it_needs_a_past_to_compare_with(healthy: Healthy, judged: Verdicts) -> None:
    """In the first `warmup_steps` steps updates may do what they like."""
    steps = [_raised(step, "mlp", 30.0) if step.step > 40 else step for step in healthy(63)]
    assert set(judged(steps, GuardSection())) == {OK}
