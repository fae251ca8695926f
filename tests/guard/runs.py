"""Made-up runs, after the numbers of the run that the guard is modelled on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from longtake.guard.detectors import GuardVerdict, judge
from longtake.guard.history import GuardSettings, History, JudgedStep, StepStatistics

_EPOCH = 500
_SHARES = {"attention": 0.6, "mlp": 0.7, "embedding": 0.3, "other": 0.2}
"""Of the weights' norm."""


def healthy(count: int, seed: int = 0, *, noise: float = 0.06) -> list[StepStatistics]:
    """The statistics of undisturbed steps.

    A loss that falls to 0.5 with a noise of 6 %, gradients with a heavy tail, a weight norm that
    drifts from 695 by 45 in 1,800 steps, cosine decay after a warm-up, epochs of 500 steps.
    """
    return list(_made(count, seed, noise))


@cache
def _made(count: int, seed: int, noise: float) -> Sequence[StepStatistics]:
    rng = np.random.default_rng(seed)
    weights = 695 + np.cumsum(45 / 1800 * rng.normal(1, 0.4, count))
    return [_step(step, count, float(weights[step]), noise, rng) for step in range(count)]


def _step(
    step: int, count: int, weight_norm: float, noise: float, rng: np.random.Generator
) -> StepStatistics:
    level = 0.5 + 0.9 * math.exp(-step / 150)
    quarters = [float(level * factor * rng.lognormal(0, noise)) for factor in (1.4, 1, 0.8, 0.9)]
    factor = min(1.0, step / 100) * 0.5 * (1 + math.cos(math.pi * step / count))
    updates = {group: 2e-5 * factor * float(rng.lognormal(0, 0.1)) for group in _SHARES}
    return StepStatistics(
        step=step,
        batch=step,
        stage="all",
        edge=f"epoch {step // _EPOCH} of stage all begins" if step and step % _EPOCH == 0 else None,
        bucket="51 frames of 640x360",
        loss=sum(quarters) / 4,
        num_samples=64,
        loss_by_sigma=(quarters[0], quarters[1], quarters[2], quarters[3]),
        grad_norm=float(0.3 * math.exp(0.15 * rng.standard_t(6))),
        nonfinite_share=0.0,
        weight_norm=weight_norm,
        update_ratio=2e-5 * factor,
        learning_rate_factor=factor,
        group_grad_norms=dict.fromkeys(_SHARES, 0.1),
        group_weight_norms={group: share * weight_norm for group, share in _SHARES.items()},
        group_update_ratios=updates,
    )


def judged(
    steps: Sequence[StepStatistics], settings: GuardSettings | None = None
) -> list[GuardVerdict]:
    """The verdicts on steps that follow each other, up to a roll-back."""
    settings = settings or GuardSettings()
    history, verdicts = History(settings.window), list[GuardVerdict]()
    for step in steps:
        verdicts.append(judge(history, step, settings))
        if verdicts[-1].kind == "roll_back":
            break
        history = history.append(JudgedStep(step, verdicts[-1].kind))
    return verdicts


def history_of(steps: Sequence[StepStatistics], **kinds: str) -> History:
    """A history of steps that were all well, or of other verdicts by step: `at_200="skip"`."""
    history = History(GuardSettings().window)
    for step in steps:
        history = history.append(JudgedStep(step, kinds.get(f"at_{step.step}", "ok")))
    return history


def louder(step: StepStatistics, factor: float, quarter: int | None = None) -> StepStatistics:
    """The loss times a factor, at all noise levels or at one quarter only."""
    first, second, third, fourth = (
        loss * (factor if quarter in (None, number) else 1.0)
        for number, loss in enumerate(step.loss_by_sigma)
    )
    mean = (first + second + third + fourth) / 4
    return replace(step, loss=mean, loss_by_sigma=(first, second, third, fourth))
