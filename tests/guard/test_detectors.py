"""Verdicts of each detector on healthy and on disturbed runs."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.guard.runs import healthy, history_of, judged, louder

from longtake.guard.detectors import OK, judge
from longtake.guard.history import GROUPS, GuardSettings, History, JudgedStep, StepStatistics

_SECTION = GuardSettings()
_SMALL = GuardSettings(window=32, warmup_steps=16)
_AT = 600
_EPOCH = 500
_ANY = st.floats(width=64)
_LEVELS = st.floats(-3, 3)


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.06), (1, 0.06), (2, 0.06), (0, 0.5)])
def test_a_healthy_run_has_no_verdict(seed: int, noise: float) -> None:
    """A loss that jumps by half from step to step is no spike where it always does."""
    assert judged(healthy(2000, seed, noise=noise)) == [OK] * 2000


def _updates(step: StepStatistics, size: float, rate: float | None = None) -> StepStatistics:
    """All groups' update ratios set to a size, at a learning rate in multiples of the recipe's."""
    rate = step.learning_rate_factor if rate is None else rate
    ratios = dict.fromkeys(step.group_update_ratios, size)
    return replace(step, learning_rate_factor=rate, update_ratio=size, group_update_ratios=ratios)


def _raised(step: StepStatistics, group: str, factor: float) -> StepStatistics:
    ratios = step.group_update_ratios
    return replace(step, group_update_ratios={**ratios, group: factor * ratios[group]})


def _other_shape(step: StepStatistics) -> StepStatistics:
    """Every eighth step on images, with five times the loss and ten times the gradient."""
    if step.step % 8 != 3:
        return step
    changed = replace(louder(step, 5.0), bucket="1 frame of 640x360")
    return replace(changed, grad_norm=10 * step.grad_norm)


def _other_stage(step: StepStatistics) -> StepStatistics:
    """A new stage begins with a window of its own, and is compared with itself only."""
    if step.step < 700:
        return step
    ratios = {group: 5 * ratio for group, ratio in step.group_update_ratios.items()}
    changed = replace(louder(step, 4.0), stage="hard", group_update_ratios=ratios)
    return replace(changed, grad_norm=6 * step.grad_norm)


def _small_batch(step: StepStatistics) -> StepStatistics:
    """The last batch of a bucket may hold one sample of 64, with eight times the noise."""
    if step.step % 50 != 49:
        return step
    by_sigma = (math.nan, 2.5 * step.loss_by_sigma[1], math.nan, math.nan)
    loss = step.loss * (2.5 if step.step % 100 else 0.4)
    changed = replace(step, num_samples=1, loss=loss, loss_by_sigma=by_sigma)
    return replace(changed, grad_norm=7 * step.grad_norm)


def _small_end(step: StepStatistics) -> StepStatistics:
    """An epoch of 40 steps ends with one sample instead of 64, and with a wilder update."""
    is_edge = step.step > 0 and step.step % 40 == 0
    changed = _raised(step, "mlp", 4.0) if is_edge else step
    edge = f"epoch {step.step // 40} of stage all begins" if is_edge else None
    return replace(changed, edge=edge, num_samples=1 if step.step % 40 == 39 else 64)


def _fast_start(step: StepStatistics) -> StepStatistics:
    """As Muon moves weights: still at first, then from 71 to 370, ever slower."""
    norm = 71 + 300 * (1 - 0.994 ** (step.step**2 / (step.step + 60)))
    return replace(step, weight_norm=norm * (1 + 1e-4 * (step.step % 7)))


def _solved(step: StepStatistics) -> StepStatistics:
    """Preferences that are learnt in 60 steps: gradients vanish, and one batch makes updates grow.

    After Diffusion-DPO of the demo's clips (benchmarks/objectives.py).
    """
    left = max(1e-5, math.exp(-step.step / 5))
    size = 2e-5 * max(0.01, math.exp(-max(0, step.step - 40) / 15))
    grown = 8 * math.exp((220 - step.step) / 20) if step.step >= 220 else 0.0
    solved = _updates(louder(step, left), size * (1 + grown), 1.0)
    return replace(solved, grad_norm=left * step.grad_norm)


def _begun(step: StepStatistics) -> StepStatistics:
    """A projector's updates shrink, and grow fivefold in thirty steps in which the loss halves.

    After the alignment with features of the demo's clips (benchmarks/objectives.py).
    """
    grown = 1 + 4 * min(1.0, max(0.0, step.step - 40) / 20)
    size = 2e-5 * max(0.2, math.exp(-step.step / 15)) * grown
    size *= math.exp(-max(0, step.step - 80) / 40)
    falling = 1 - 0.5 * min(1.0, max(0.0, step.step - 60) / 8)
    changed = louder(_updates(step, 1e-5, 1.0), falling)
    ratios = {**changed.group_update_ratios, "other": size}
    return replace(changed, group_update_ratios=ratios)


def _restarting(step: StepStatistics, cycle: int) -> StepStatistics:
    """The rate is full again at `_AT`, and a model that had come to rest has larger gradients."""
    rate = 0.5 * (1 + math.cos(math.pi * (step.step % cycle) / cycle))
    grad_norm = step.grad_norm * (8.0 if step.step >= _AT else 1.0)
    restarted = replace(step, grad_norm=grad_norm, num_restarts=step.step // cycle)
    return _updates(restarted, 2e-5 * rate, rate)


def _from_nothing(step: StepStatistics) -> StepStatistics:
    """LoRA begins with zeros: its norm rises a hundredfold and its update ratio falls as much."""
    norm = 0.02 + 0.01 * step.step
    ratios = {"attention": 0.05 * step.learning_rate_factor / norm}
    norms = {"attention": norm}
    return replace(step, weight_norm=norm, group_weight_norms=norms, group_update_ratios=ratios)


_WITHOUT_VERDICT: dict[str, tuple[int, Callable[[StepStatistics], StepStatistics]]] = {
    "shapes at levels of their own": (1500, _other_shape),
    "a stage at another level": (1500, _other_stage),
    "small batches": (1000, _small_batch),
    "a small last batch of an epoch": (800, _small_end),
    "a fast start": (1000, _fast_start),
    "weights that grow from nothing": (1500, _from_nothing),
    "the wild beginning of a run": (64, lambda s: replace(s, loss=s.loss * 10 ** (s.step % 7))),
    "a jump before the warm-up": (
        60, lambda s: replace(s, weight_norm=s.weight_norm + 90.0 * (s.step >= 30))
    ),
    "updates before the warm-up": (63, lambda s: _raised(s, "mlp", 30.0) if s.step > 40 else s),
    # Less than two thousandths of the norm, however far outside of its usual changes.
    "a jump too small to matter": (
        1200, lambda s: replace(s, weight_norm=s.weight_norm + 1.0 * (s.step >= 777))
    ),
    "a short bad stretch": (900, lambda s: louder(s, 1.8) if _AT <= s.step < _AT + 6 else s),
    "an objective that is solved": (300, _solved),
    "a part that begins to learn": (160, _begun),
    "a restart of the rate": (700, lambda s: _restarting(s, 600)),
    # It raises the updates a hundredfold, as it is meant to.
    "a long warm-up": (1000, lambda s: _updates(s, 2e-5 * s.step / 1000, s.step / 1000)),
}  # fmt: skip


@pytest.mark.parametrize("case", _WITHOUT_VERDICT)
def test_what_healthy_runs_do_has_no_verdict(case: str) -> None:
    count, change = _WITHOUT_VERDICT[case]
    steps = [change(step) for step in healthy(count)]
    assert set(judged(steps)) == {OK}
    if case == "a fast start":
        assert set(judged(steps, _SMALL)) == {OK}


def test_a_reported_rollback_is_a_new_beginning() -> None:
    """If the guard only reports, steps are compared with those since the reported rollback."""
    section, kinds = GuardSettings(), []
    history = History(section.window)
    for step in healthy(1200):
        moved = replace(step, weight_norm=step.weight_norm + 45 * (step.step >= 600))
        kinds.append(judge(history, moved, section).kind)
        history = history.append(JudgedStep(moved, kinds[-1]))
    assert [number for number, kind in enumerate(kinds) if kind != "ok"] == [600]


@settings(max_examples=60)
@given(
    scales=st.tuples(*[_LEVELS] * 3),
    spiked=st.sampled_from(["loss", "grad_norm", "weight_norm", ""]),
    order=st.permutations(GROUPS),
)
def test_units_and_names_do_not_matter(
    scales: tuple[float, ...], spiked: str, order: list[str]
) -> None:
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
            history = history.append(JudgedStep(_scaled(step, scales, names), "ok"))
        found = judge(history, _scaled(now, scales, names), _SMALL)
        return found.kind, found.reason, found.began

    same = dict(zip(GROUPS, GROUPS, strict=True))
    assert verdict(scales, renamed) == verdict((0.0, 0.0, 0.0), same)


def _scaled(
    step: StepStatistics, scales: tuple[float, ...], names: dict[str, str]
) -> StepStatistics:
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
def _arbitrary(draw: st.DrawFn, step: int) -> tuple[StepStatistics, str]:
    groups = draw(st.dictionaries(st.sampled_from(GROUPS), _ANY, max_size=3))
    statistics = StepStatistics(
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
        num_restarts=draw(st.integers(0, 3)),
        group_grad_norms=groups,
        group_weight_norms=groups,
        group_update_ratios=draw(st.dictionaries(st.sampled_from(GROUPS), _ANY, max_size=3)),
    )
    return statistics, draw(st.sampled_from(["ok", "ok", "ok", "skip", "roll_back", "stop"]))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_numbers_have_a_verdict(data: st.DataObject) -> None:
    pattern = [data.draw(_arbitrary(number)) for number in range(data.draw(st.integers(1, 6)))]
    history = History(_SMALL.window)
    for step in range(data.draw(st.integers(0, 150))):
        statistics, kind = pattern[step % len(pattern)]
        history = history.append(JudgedStep(replace(statistics, step=step), kind))
    now = replace(pattern[0][0], step=150)
    verdict = judge(history, now, _SMALL)
    assert verdict == judge(history, now, _SMALL)
    assert verdict.kind in ("ok", "skip", "roll_back")
    assert (verdict == OK) == (verdict.message == "")
    assert 0 <= verdict.began <= 150


# --- NaN and inf --------------------------------------------------------------------------------


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
@pytest.mark.parametrize("at", [0, 200])
def test_a_step_with_nan_or_inf_is_skipped(lost: dict[str, Any], at: int) -> None:
    """At its own step, also before the warm-up; the steps around it have no verdict."""
    steps = healthy(at + 10)
    steps[at] = replace(steps[at], **lost)
    verdicts = judged(steps)
    assert [number for number, verdict in enumerate(verdicts) if verdict != OK] == [at]
    assert (verdicts[at].kind, verdicts[at].reason) == ("skip", "non_finite")


def test_the_message_gives_loss_gradient_norm_and_fraction() -> None:
    step = replace(healthy(1)[0], grad_norm=math.nan, nonfinite_share=0.125)
    message = judge(History(128), step, GuardSettings()).message
    assert message == (
        f"The loss is {step.loss:.4g} and the norm of the gradient nan, of which 12.50% is NaN or "
        "inf; both must be finite."
    )


def test_max_skips_non_finite_steps_are_skipped_and_the_next_rolls_back() -> None:
    """To before the first of them: skipped updates did not change the weights."""
    steps = healthy(40)
    for at in (20, 21, 25, 30):
        steps[at] = replace(steps[at], loss=math.nan)
    verdicts = judged(steps)
    assert (len(verdicts), verdicts[-1].kind, verdicts[-1].began) == (31, "roll_back", 20)
    assert verdicts[-1].reason == "non_finite"
    last = judged(steps, GuardSettings(max_skips=0))[-1]
    assert (last.kind, last.began) == ("roll_back", 20)


def test_non_finite_weights_roll_back_at_once() -> None:
    """No later step can repair them."""
    steps = healthy(40)
    steps[20:] = [replace(step, weight_norm=math.nan, loss=math.nan) for step in steps[20:]]
    last = judged(steps)[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "non_finite", 19)
    assert "the update of step 20" in last.message


# --- Jumps of the weight norm -------------------------------------------------------------------


def _heavier(
    steps: list[StepStatistics], first: int, by: float, over: int = 1
) -> list[StepStatistics]:
    """Steps whose weight norm grows by `by` within `over` steps and stays there."""
    return [
        replace(
            step, weight_norm=step.weight_norm + by * min(1.0, max(0, step.step + 1 - first) / over)
        )
        for step in steps
    ]


@pytest.mark.parametrize("late", [0, 1, 9, 16])
def test_five_more_at_an_epochs_end_are_found_at_once(late: int) -> None:
    """+5 at a norm of 700, as a real defect did: attributed to the edge, also shortly after it."""
    at = 2 * _EPOCH + late
    verdicts = judged(_heavier(healthy(1500), at, 5.0))
    last = verdicts[-1]
    assert (len(verdicts) - 1, last.kind, last.reason) == (at, "roll_back", "edge_step")
    assert last.began == at - 1
    assert last.message.endswith(", where epoch 2 of stage all begins.")
    assert "within 1 step, in which it usually changes by +0.02" in last.message


@pytest.mark.parametrize("over", [3, 10])
def test_a_jump_may_take_a_few_steps(over: int) -> None:
    verdicts = judged(_heavier(healthy(1500), _EPOCH, 5.0, over))
    assert (verdicts[-1].kind, verdicts[-1].reason) == ("roll_back", "edge_step")
    assert _EPOCH <= len(verdicts) - 1 <= _EPOCH + over
    assert verdicts[-1].began < _EPOCH


@pytest.mark.parametrize("by", [5.0, -5.0, -600.0, 45.0, 1e9])
def test_jumps_of_any_size_and_sign_are_found_and_name_no_edge_that_is_far(by: float) -> None:
    verdicts = judged(_heavier(healthy(1500), 777, by))
    last = verdicts[-1]
    assert (len(verdicts) - 1, last.kind, last.reason) == (777, "roll_back", "weight_step")
    assert "epoch" not in last.message


def test_a_jump_where_a_stage_begins_is_found_without_a_warm_up() -> None:
    steps = [
        replace(step, stage="hard", edge="stage hard begins" if step.step == 700 else None)
        if step.step >= 700
        else step
        for step in healthy(1500)
    ]
    last = judged(_heavier(steps, 700, 5.0))[-1]
    assert (last.reason, last.began) == ("edge_step", 699)
    assert last.message.endswith(", where stage hard begins.")


def test_updates_that_have_grown_are_the_reason_rather_than_the_place() -> None:
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


@pytest.mark.parametrize("times", [3, 10])
@pytest.mark.parametrize("warmup", [1, 100])
@pytest.mark.parametrize("power", [1, 2])
def test_weights_that_move_faster_at_a_higher_rate_are_no_jump(
    times: int, warmup: int, power: int
) -> None:
    """As they do in a stage that raises the rate: in proportion to it, or with its square."""
    rng, norm, steps = np.random.default_rng(0), 50.0, []
    for step in healthy(1200):
        rate = 1 + (times - 1) * min(1.0, max(0, step.step - 699) / warmup)
        norm += 0.004 * rate**power * float(rng.normal(1, 0.1))
        stage = "second" if step.step >= 700 else "first"
        edge = "stage second begins" if step.step == 700 else None
        steps.append(
            replace(step, weight_norm=norm, learning_rate_factor=rate, stage=stage, edge=edge)
        )
    assert set(judged(steps)) == {OK}
    assert judged(_heavier(steps, 900, 0.3 * 10.0**power))[-1].reason == "weight_step"


@pytest.mark.parametrize(("by", "within"), [(0.05, 40), (0.1, 20)])
def test_a_drift_of_the_norm_is_found_by_its_beginning(by: float, within: int) -> None:
    """0.007 % of the norm more in each step than the usual 0.0035 %: too little for 16 steps."""
    verdicts = judged(
        [
            replace(step, weight_norm=step.weight_norm + by * max(0, step.step - 600))
            for step in healthy(700)
        ]
    )
    assert verdicts[-1].reason == "weight_step"
    assert len(verdicts) <= 600 + within
    assert set(verdicts[:-1]) == {OK}


def test_a_norm_that_moves_faster_as_updates_grow_a_little_is_no_jump() -> None:
    """As where a LoRA at a constant rate learns something at last: both change within 30 steps."""
    rng, norm, steps = np.random.default_rng(0), 50.0, []
    for step in healthy(800):
        growth = min(2.4, max(1.0, (step.step - 580) / 12))
        norm += 0.004 * growth**2 * float(rng.normal(1, 0.1))
        updates = {k: 2e-5 * growth * float(rng.lognormal(0, 0.1)) for k in GROUPS[:3]}
        weights = dict.fromkeys(GROUPS[:3], 50.0)
        changed = replace(step, weight_norm=norm, learning_rate_factor=1.0)
        steps.append(replace(changed, group_update_ratios=updates, group_weight_norms=weights))
    assert set(judged(steps)) == {OK}
    assert judged(_heavier(steps, 620, 0.35))[-1].reason == "weight_step"


# --- Small changes that recur at the edges of epochs --------------------------------------------


def _with_epochs(steps: list[StepStatistics], length: int) -> list[StepStatistics]:
    return [
        replace(step, edge=f"epoch {step.step // length} of stage all begins")
        if step.step and step.step % length == 0
        else replace(step, edge=None)
        for step in steps
    ]


def test_short_epochs_do_not_make_every_jump_an_edges() -> None:
    """In an epoch of 16 steps, a step in its middle is not shortly after its edge."""
    steps = _with_epochs(healthy(300), 16)
    assert judged(_heavier(steps, 200, 5.0))[-1].reason == "weight_step"
    assert judged(_heavier(steps, 209, 5.0))[-1].reason == "edge_step"


@pytest.mark.parametrize("length", [12, 40, 100])
def test_a_small_change_at_each_epochs_end_is_found_at_the_fifth(length: int) -> None:
    """Half a thousandth of the norm is too small for a jump, and no step but the edges has it."""
    steps = _with_epochs(healthy(12 * length), length)
    assert set(judged(steps)) == {OK}
    grown = [
        replace(step, weight_norm=step.weight_norm * 1.0005 ** max(0, step.step // length - 5))
        for step in steps
    ]
    verdicts = judged(grown)
    last = verdicts[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "edge_step", 10 * length - 1)
    assert last.message.endswith("where epoch 10 of stage all begins.")


def test_larger_updates_at_each_epochs_end_are_found() -> None:
    steps = _with_epochs(healthy(800), 40)
    raised = [
        _raised(step, "mlp", 4.0) if step.edge is not None and step.step >= 400 else step
        for step in steps
    ]
    verdicts = judged(raised)
    assert (len(verdicts) - 1, verdicts[-1].reason) == (560, "edge_step")
    assert verdicts[-1].message.startswith("The updates of the mlp weights were ")


# --- Slow divergence ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [5.0, 10.0, 30.0])
@pytest.mark.parametrize("group", ["attention", "mlp", "embedding"])
def test_a_learning_rate_that_was_raised_shows_in_the_updates(group: str, factor: float) -> None:
    steps = healthy(_AT + 100)
    steps[_AT + 1 :] = [_raised(step, group, factor) for step in steps[_AT + 1 :]]
    verdicts = judged(steps)
    last = verdicts[-1]
    assert (last.kind, last.reason, last.began) == ("roll_back", "divergence", _AT)
    assert f"The updates of the {group} weights are" in last.message
    assert len(verdicts) - 1 - _AT <= 8
    assert set(verdicts[:-1]) == {OK}


def _growth(step: int) -> float:
    """Updates that grow from the first step on, a hundred thousandfold, and then stay."""
    return math.exp(min(0.0, 2 * math.sqrt(step) - 20))


def _searched(step: StepStatistics) -> StepStatistics:
    """The rate is being found, and not reported."""
    norm = 50.0 + 0.05 * sum(map(_growth, range(step.step)))
    return replace(_updates(step, 2e-3 * _growth(step.step), 1.0), weight_norm=norm)


def _estimated(step: StepStatistics) -> StepStatistics:
    """Prodigy's own estimate grows from 1e-6 by orders of magnitude, and all updates with it."""
    rate = 1e-6 * 10 ** min(4.0, step.step / 50)
    return _updates(step, 2e-5 * rate, rate)


def _shrunk(step: StepStatistics) -> StepStatistics:
    """Adam's updates are largest at the start: after some hundred steps a fifth of that."""
    shrunk = max(0.2, 1 - step.step / 150)
    ratios = {group: ratio * shrunk for group, ratio in step.group_update_ratios.items()}
    return replace(step, group_update_ratios=ratios)


def _come_back(step: StepStatistics) -> StepStatistics:
    """Adam's, after large first gradients: they shrink to a twentieth, and come back slowly."""
    size = math.exp(-max(0, min(step.step, 90) - 30) / 20)
    if step.step > 90:
        size = min(0.4, size * math.exp(max(0, step.step - 100) / 30))
    return _updates(step, 2e-5 * size, 1.0)


def _noise_limited(step: StepStatistics) -> StepStatistics:
    """Updates of Prodigy that keep their size while the rate falls fiftyfold."""
    return _updates(step, 1e-5 * (1 + 0.1 * math.sin(step.step)), 0.02 ** (step.step / 700))


def _raised_in_steps(step: StepStatistics) -> StepStatistics:
    """An estimate that trebles makes larger steps for a while; those at lower rates say nothing."""
    rate = 1.0 if step.step >= 200 else 1 / 3
    larger = 1 + 4 * math.exp((200 - step.step) / 15) if step.step >= 200 else 1.0
    return _updates(step, 2e-5 * rate * larger, rate)


@pytest.mark.parametrize(
    ("count", "at", "change"),
    [
        (400, 300, _searched),
        (400, 300, _estimated),
        (400, 350, _raised_in_steps),
        (400, 250, _shrunk),
        (400, 300, _come_back),
        (700, 600, _noise_limited),
    ],
)
def test_updates_that_change_are_no_divergence_and_hide_no_raised_rate(
    count: int, at: int, change: Callable[[StepStatistics], StepStatistics]
) -> None:
    steps = [change(step) for step in healthy(count)]
    assert set(judged(steps)) == {OK}
    steps[at + 1 :] = [_raised(step, "mlp", 10.0) for step in steps[at + 1 :]]
    verdicts = judged(steps)
    last = verdicts[-1]
    assert (last.reason, last.began) == ("divergence", at)
    assert last.message.endswith("after dividing by the learning rate of each.")
    assert len(verdicts) - 1 - at <= 8


@pytest.mark.parametrize("percent", [1.0, 5.0])
def test_updates_that_grow_little_by_little_are_found(percent: float) -> None:
    steps = healthy(_AT + 300)
    steps[_AT:] = [
        _raised(step, "mlp", (1 + percent / 100) ** (step.step - _AT)) for step in steps[_AT:]
    ]
    verdicts = judged(steps)
    assert verdicts[-1].reason == "divergence"
    assert (1 + percent / 100) ** (len(verdicts) - _AT) < 8


def test_an_optimizer_that_still_finds_its_rate_has_not_begun_to_train() -> None:
    """Its updates grow a hundredfold by step 80, and then the gradients do: a run's beginning."""
    steps = []
    for step in healthy(400):
        size = min(1.0, math.exp((step.step - 80) / 8))
        wild = 12.0 if 80 <= step.step < 96 and step.step % 3 == 0 else 1.0
        updates = dict.fromkeys(step.group_update_ratios, 2e-3 * size)
        changed = replace(step, learning_rate_factor=1.0, group_update_ratios=updates)
        steps.append(replace(changed, grad_norm=wild * step.grad_norm))
    assert set(judged(steps)) == {OK}
    steps[300] = replace(steps[300], grad_norm=12.0 * steps[300].grad_norm)
    assert [at for at, verdict in enumerate(judged(steps)) if verdict != OK] == [300]


def test_skipped_steps_do_not_hide_a_raised_learning_rate() -> None:
    """After a skipped step the norm of the update is 0, which is not measured."""
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
def test_a_loss_that_creeps_up_is_found(percent: float) -> None:
    steps = healthy(1200)
    growth = math.log1p(percent / 100)
    steps[_AT:] = [louder(step, math.exp(growth * (step.step - _AT))) for step in steps[_AT:]]
    verdicts = judged(steps)
    last, passed = verdicts[-1], len(verdicts) - 1 - _AT
    assert (last.kind, last.reason) == ("roll_back", "divergence")
    assert last.message.startswith("The loss has risen and stays up: ")
    assert growth * passed < math.log(2)
    assert last.began <= _AT + passed / 2


def test_a_loss_that_rises_where_the_rate_restarts_is_no_divergence() -> None:
    """It falls to half while the rate falls to 0, and rises within 50 steps of the full rate."""
    steps, level = list[StepStatistics](), 1.0
    for step in healthy(900):
        number, done = divmod(step.step / 300, 1.0)
        rate = 0.5 * (1 + math.cos(math.pi * done))
        level += (0.5 + 0.5 * rate - level) / 20
        changed = _updates(louder(step, level), 2e-5 * rate, rate)
        steps.append(replace(changed, num_restarts=int(number)))
    assert set(judged(steps)) == {OK}
    # A rate that rises by itself excuses nothing, and neither does a restart a loss above all.
    assert judged([replace(each, num_restarts=0) for each in steps])[-1].reason == "divergence"
    steps[650:] = [louder(each, 1.8) for each in steps[650:]]
    last = judged(steps)[-1]
    assert last.message.startswith("The loss has risen")
    assert 640 <= last.began <= 660


def test_a_gradient_that_grows_while_the_loss_falls_is_fine() -> None:
    """As at the beginning of most runs; it is a divergence if the loss rises by a quarter."""
    steps = healthy(1200)
    grown = [replace(step, grad_norm=step.grad_norm * math.exp(step.step / 250)) for step in steps]
    assert set(judged(grown)) == {OK}
    grown[_AT:] = [louder(step, 1.25) for step in grown[_AT:]]
    last = judged(grown)[-1]
    assert (last.kind, last.reason) == ("roll_back", "divergence")
    assert last.message.startswith("The gradient norm has risen")


@pytest.mark.parametrize(("every", "is_found"), [(5, False), (25, True)])
def test_a_rise_to_a_gradient_norm_that_is_not_rare_is_no_divergence(
    every: int, is_found: bool
) -> None:
    """One step in 5 or 25 has 1.4 instead of 0.3, with a higher loss; of the last 16 ten have."""
    recent = [step for step in range(_AT, _AT + 16) if step % 2 == 0 or step % 5 == 0]
    steps = [
        replace(louder(step, 1.3), grad_norm=1.4)
        if step.step in recent or (step.step < _AT and step.step % every == 0)
        else replace(step, grad_norm=0.3)
        for step in healthy(_AT + 16)
    ]
    assert len(recent) == 10
    last = judged(steps)[-1]
    assert (last.reason == "divergence") == is_found, last


# --- Spikes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "factor"), [(64, 3.0), (100, 1e6), (700, 3.0), (1999, 10.0)])
def test_a_loss_spike_is_found_at_its_own_step(at: int, factor: float) -> None:
    steps = healthy(at + 20 if at < 1900 else 2000)
    steps[at] = louder(steps[at], factor)
    verdicts = judged(steps)
    assert [number for number, verdict in enumerate(verdicts) if verdict != OK] == [at]
    assert (verdicts[at].kind, verdicts[at].reason, verdicts[at].began) == ("skip", "spike", at)


def test_the_message_of_a_spike_gives_value_usual_and_noise_levels() -> None:
    steps = healthy(300)
    everywhere = judge(history_of(steps[:-1]), louder(steps[-1], 8.0), _SECTION)
    assert everywhere.message.startswith(f"The loss of {8 * steps[-1].loss:.4g} is 7.")
    assert "robust standard deviations" in everywhere.message
    assert everywhere.message.endswith(", at all noise levels.")
    one = judge(history_of(steps[:-1]), louder(steps[-1], 20.0, quarter=1), _SECTION)
    assert one.message.endswith(", but only at sigmas of 0.25 to 0.5.")


def test_a_gradient_that_sticks_out_alone_is_a_spike() -> None:
    """The loss is measured before the update that would raise it."""
    steps = healthy(300)
    verdict = judge(history_of(steps[:-1]), replace(steps[-1], grad_norm=30.0), _SECTION)
    assert (verdict.kind, verdict.reason) == ("skip", "spike")
    assert verdict.message.startswith("The gradient norm of 30 is ")
    assert verdict.message.endswith(f"; the loss is {steps[-1].loss:.4g}.")


@pytest.mark.parametrize("cycle", [600, 12])
def test_a_gradient_that_sticks_out_soon_after_a_restart_is_a_spike(cycle: int) -> None:
    """Also where no cycle has enough steps to compare with."""
    steps = [_restarting(step, cycle) for step in healthy(620)]
    steps[_AT + 3] = replace(steps[_AT + 3], grad_norm=100 * steps[_AT - 1].grad_norm)
    assert [at for at, verdict in enumerate(judged(steps)) if verdict != OK] == [_AT + 3]


def test_a_rare_noise_level_explains_a_high_loss() -> None:
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


def _with_dropped(step: StepStatistics, num_dropped: int, factor: float) -> StepStatistics:
    """Of four samples some have no caption, and a loss that is so many times as high."""
    high = factor * step.loss
    mean = (num_dropped * high + (4 - num_dropped) * step.loss) / 4
    return replace(
        step,
        loss=mean,
        num_samples=4,
        loss_by_sigma=(math.nan, math.nan, math.nan, mean),
        captioned=(step.loss, 4 - num_dropped, math.nan, math.nan, math.nan, step.loss),
        dropped=(high, num_dropped, math.nan, math.nan, math.nan, high),
        grad_norm=step.grad_norm * (4 if num_dropped else 1),
    )


def test_samples_without_a_caption_are_judged_apart() -> None:
    """A model that has learnt a few clips has many times the loss where it is not told which."""
    rng = np.random.default_rng(0)
    steps = [
        _with_dropped(step, int(rng.binomial(4, share)), 12.0)
        for step in healthy(1500)
        for share in [0.05 if step.step % 400 < 300 else 0.3]
    ]
    assert set(judged(steps)) == {OK}
    at = next(each.step for each in steps[1000:] if each.dropped[1] == 0)
    spiked = [*steps[:at], _with_dropped(healthy(1500)[at], 1, 120.0), *steps[at + 1 :]]
    found = [verdict for verdict in judged(spiked) if verdict != OK]
    assert [verdict.reason for verdict in found] == ["spike"]
    assert found[0].message.startswith("The loss of samples without a caption of ")


def test_a_creeping_loss_is_found_whatever_share_of_captions_is_dropped() -> None:
    """Of four samples two have none on average, so either half alone is noisier than all."""
    rng = np.random.default_rng(0)
    dropped = rng.binomial(4, 0.5, 800)
    steps = [_with_dropped(each, int(dropped[each.step]), 12.0) for each in healthy(800)]
    assert set(judged(steps)) == {OK}
    steps[_AT:] = [
        _with_dropped(louder(each, 1.02 ** (each.step - _AT)), int(dropped[each.step]), 12.0)
        for each in healthy(800)[_AT:]
    ]
    verdicts = judged(steps)
    assert verdicts[-1].reason in ("divergence", "spike")
    assert len(verdicts) - _AT <= 40


def test_nothing_explains_a_loss_without_bounds() -> None:
    """A loss that is thousands of times the usual is a spike at any noise level and shape."""
    steps = healthy(300)
    wild = replace(steps[-1], loss=1e5, loss_by_sigma=(math.nan, math.nan, math.nan, 1e5))
    unseen = replace(wild, bucket="1 frame of 64x64")
    known = [replace(each, loss_by_sigma=(*each.loss_by_sigma[:3], math.nan)) for each in steps]
    assert judge(history_of(known[:-1]), wild, _SECTION).reason == "spike"
    assert judge(history_of(steps[:-1]), unseen, _SECTION).reason == "spike"


def test_a_falling_loss_is_no_spike_and_hides_none() -> None:
    """A loss that halves every 20 steps spreads over decades, yet ten times the usual is seen."""
    steps = [
        replace(step, loss=fall * step.loss, loss_by_sigma=(fall, fall, fall, fall))
        for step in healthy(200)
        for fall in [0.5 ** (step.step / 20)]
    ]
    assert set(judged(steps)) == {OK}
    steps[150] = replace(steps[150], loss=10 * steps[150].loss, loss_by_sigma=(math.nan,) * 4)
    assert [at for at, verdict in enumerate(judged(steps)) if verdict != OK] == [150]


def test_too_many_skips_make_a_rollback_to_before_the_first() -> None:
    """Ordinary steps between them prove that the state is good and the batches are the cause."""
    steps = healthy(400)
    for at in (300, 310, 320, 330):
        steps[at] = louder(steps[at], 10.0)
    verdicts = judged(steps)
    kinds = [verdicts[at].kind for at in (300, 310, 320, 330)]
    assert kinds == ["skip", "skip", "skip", "roll_back"]
    assert (verdicts[-1].began, len(verdicts)) == (300, 331)
    assert "number 4" in verdicts[-1].message
    assert "step 301" in verdicts[-1].message


def test_skips_that_are_far_apart_do_not_add_up() -> None:
    steps = healthy(900)
    for at in range(100, 900, 50):
        steps[at] = louder(steps[at], 10.0)
    kinds = [verdict.kind for verdict in judged(steps)]
    assert kinds.count("skip") == 16
    assert "roll_back" not in kinds


@pytest.mark.parametrize(
    ("factor", "began", "num_steps"),
    [
        # Without an ordinary step since the first spike, the update before it may be the cause.
        pytest.param(lambda step: 10.0, (299, 299), range(304, 305), id="spikes only"),
        # Steps between them that are no spikes but not ordinary do not prove the state good.
        pytest.param(
            lambda step: 4.0 if step % 3 else 1.7, (299, 299), range(301, 311), id="now and then"
        ),
        # 10 % more in each step is a spike some steps later; the state was bad before that.
        pytest.param(lambda step: 1.1 ** (step - 299), (290, 303), range(301, 319), id="runs away"),
    ],
)
def test_a_state_that_spikes_without_an_ordinary_step_is_not_trusted(
    factor: Callable[[int], float], began: tuple[int, int], num_steps: range
) -> None:
    steps = healthy(400)
    steps[300:] = [louder(step, factor(step.step)) for step in steps[300:]]
    verdicts = judged(steps)
    assert verdicts[-1].kind == "roll_back"
    assert began[0] <= verdicts[-1].began <= began[1]
    assert len(verdicts) in num_steps


@settings(max_examples=40, deadline=None)
@given(lost=st.sets(st.integers(0, 198), max_size=90), value=st.sampled_from([math.nan, math.inf]))
def test_nan_in_the_window_does_not_hide_a_spike(lost: set[int], value: float) -> None:
    steps = healthy(200)
    history = History(_SECTION.window)
    for step in steps[:-1]:
        is_lost = step.step in lost
        row = replace(step, loss=value, grad_norm=value) if is_lost else step
        history = history.append(JudgedStep(row, "ok"))
    assert judge(history, steps[-1], _SECTION) == OK
    assert judge(history, louder(steps[-1], 10.0), _SECTION).reason == "spike"
