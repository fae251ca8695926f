"""Verdicts as a whole: none on healthy runs, the same for the same numbers, whatever they are."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtake.config import GuardSection
from longtake.guard.history import History, Judged
from longtake.guard.judge import judge
from longtake.guard.statistics import GROUPS, Statistics
from longtake.guard.verdict import OK, Verdict

Healthy = Callable[..., list[Statistics]]
Verdicts = Callable[..., list[Verdict]]
Louder = Callable[..., Statistics]

_SMALL = GuardSection(window=32, warmup_steps=16)
_ANY = st.floats(width=64)
_LEVELS = st.floats(-3, 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_has_no_verdict(healthy: Healthy, judged: Verdicts, seed: int) -> None:
    """Two thousand steps, with the drift of the weights that the story's run had in good health."""
    verdicts = judged(healthy(2000, seed))
    assert [verdict for verdict in verdicts if verdict != OK] == []
    assert len(verdicts) == 2000


def test_a_noisy_run_has_no_verdict(healthy: Healthy, judged: Verdicts) -> None:
    """A loss that jumps by half from step to step is no spike where it always does."""
    assert set(judged(healthy(2000, noise=0.5))) == {OK}


def test_shapes_at_levels_of_their_own_are_no_spikes(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """Every eighth step on images, with five times the loss and ten times the gradient."""
    steps = [
        replace(
            louder(step, 5.0),
            bucket="1 frame of 640x360",
            grad_norm=10 * step.grad_norm,
        )
        if step.step % 8 == 3
        else step
        for step in healthy(1500)
    ]
    assert set(judged(steps)) == {OK}


def test_a_stage_at_another_level_is_no_trouble(
    healthy: Healthy, judged: Verdicts, louder: Louder
) -> None:
    """A new stage begins with a window of its own, and is compared with itself only."""
    steps = [
        replace(
            louder(step, 4.0),
            stage="hard",
            grad_norm=6 * step.grad_norm,
            group_update_ratios={k: 5 * v for k, v in step.group_update_ratios.items()},
        )
        if step.step >= 700
        else step
        for step in healthy(1500)
    ]
    assert set(judged(steps)) == {OK}


def test_smaller_batches_may_be_wilder(healthy: Healthy, judged: Verdicts) -> None:
    """The last batch of a bucket may hold one sample of 64, with eight times the noise."""
    steps = [
        replace(
            step,
            num_samples=1,
            loss=step.loss * (2.5 if step.step % 100 else 0.4),
            loss_by_sigma=(math.nan, 2.5 * step.loss_by_sigma[1], math.nan, math.nan),
            grad_norm=7 * step.grad_norm,
        )
        if step.step % 50 == 49
        else step
        for step in healthy(1000)
    ]
    assert set(judged(steps)) == {OK}


def test_a_new_run_is_compared_with_nothing(healthy: Healthy, judged: Verdicts) -> None:
    """Before `warmup_steps` steps only numbers that are none are judged."""
    steps = healthy(64)
    wild = [replace(step, loss=step.loss * 10 ** (step.step % 7)) for step in steps]
    assert set(judged(wild)) == {OK}


def test_a_reported_rollback_is_a_new_beginning(healthy: Healthy) -> None:
    """Where the guard only reports, what it has reported is what it compares with from then on."""
    section, kinds = GuardSection(), []
    history = History(section.window)
    for step in healthy(1200):
        moved = replace(step, weight_norm=step.weight_norm + 45 * (step.step >= 600))
        kinds.append(judge(history, moved, section).kind)
        history = history.with_(Judged(moved, kinds[-1]))
    assert [number for number, kind in enumerate(kinds) if kind != "ok"] == [600]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scales=st.tuples(*[_LEVELS] * 3),
    spiked=st.sampled_from(["loss", "grad_norm", "weight_norm", ""]),
    order=st.permutations(GROUPS),
)
def test_units_and_names_do_not_matter(
    healthy: Healthy, louder: Louder, scales: tuple[float, ...], spiked: str, order: list[str]
) -> None:
    """Scaling losses, gradients or weights, or shuffling the groups, changes no verdict."""
    steps = healthy(100)
    now = louder(steps[-1], 20.0 if spiked == "loss" else 1.0)
    now = replace(
        now,
        grad_norm=now.grad_norm * (50.0 if spiked == "grad_norm" else 1.0),
        weight_norm=now.weight_norm * (1.02 if spiked == "weight_norm" else 1.0),
    )
    renamed = dict(zip(("attention", "mlp", "embedding", "other", "added"), order, strict=True))

    def verdict(scales: tuple[float, ...], names: dict[str, str]) -> tuple[str, str, int]:
        history = History(_SMALL.window)
        for step in steps[:-1]:
            history = history.with_(Judged(_scaled(step, scales, names), "ok"))
        found = judge(history, _scaled(now, scales, names), _SMALL)
        return found.kind, found.reason, found.began

    same = dict(zip(GROUPS, GROUPS, strict=True))
    assert verdict(scales, renamed) == verdict((0.0, 0.0, 0.0), same)


def _scaled(step: Statistics, scales: tuple[float, ...], names: dict[str, str]) -> Statistics:
    loss, gradient, weight = (10**scale for scale in scales)
    weights = step.group_weight_norms.items()
    first, second, third, fourth = (loss * each for each in step.loss_by_sigma)
    return replace(
        step,
        loss=step.loss * loss,
        loss_by_sigma=(first, second, third, fourth),
        grad_norm=step.grad_norm * gradient,
        weight_norm=step.weight_norm * weight,
        group_weight_norms={names[name]: norm * weight for name, norm in weights},
        group_update_ratios={names[k]: v for k, v in step.group_update_ratios.items()},
    )


@st.composite
def _arbitrary(draw: st.DrawFn, step: int) -> tuple[Statistics, str]:
    groups = draw(st.dictionaries(st.sampled_from(GROUPS), _ANY, max_size=3))
    statistics = Statistics(
        step=step,
        batch=step,
        stage=draw(st.sampled_from(["a", "b"])),
        edge=draw(st.sampled_from([None, "epoch 1 of stage a begins"])),
        bucket=draw(st.sampled_from(["x", "y"])),
        loss=draw(_ANY),
        num_samples=draw(st.integers(0, 64)),
        loss_by_sigma=draw(st.tuples(_ANY, _ANY, _ANY, _ANY)),
        grad_norm=draw(_ANY),
        nonfinite_share=draw(_ANY),
        weight_norm=draw(_ANY),
        update_ratio=draw(_ANY),
        learning_rate_factor=draw(_ANY),
        group_grad_norms=groups,
        group_weight_norms=groups,
        group_update_ratios=draw(st.dictionaries(st.sampled_from(GROUPS), _ANY, max_size=3)),
    )
    return statistics, draw(st.sampled_from(["ok", "ok", "ok", "skip", "roll_back", "stop"]))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_numbers_make_it_fail(data: st.DataObject) -> None:
    """Whatever the floats are, there is a verdict, and for the same numbers the same one."""
    pattern = [data.draw(_arbitrary(number)) for number in range(data.draw(st.integers(1, 6)))]
    history = History(_SMALL.window)
    for step in range(data.draw(st.integers(0, 150))):
        statistics, kind = pattern[step % len(pattern)]
        history = history.with_(Judged(replace(statistics, step=step), kind))
    now = replace(pattern[0][0], step=150)
    verdict = judge(history, now, _SMALL)
    assert verdict == judge(history, now, _SMALL)
    assert verdict.kind in ("ok", "skip", "roll_back")
    assert (verdict == OK) == (verdict.message == "")
    assert 0 <= verdict.began <= 150
