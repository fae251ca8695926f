"""A loss or a gradient far outside of what the last steps had."""

import math
from dataclasses import dataclass

import numpy as np

from longtake.guard.robust import median, noise
from longtake.guard.rows import Numbers, Rows
from longtake.guard.skips import skip_or_roll_back
from longtake.guard.statistics import Statistics
from longtake.guard.step import Step
from longtake.guard.verdict import Verdict

_LEVEL_STEPS = 32
"""Newest steps that say what is usual now: a falling loss leaves older ones behind."""
_LEAST = 16
"""Steps with clips of this shape, or at this noise level, that say what is usual there."""
_LEAST_NOISE = 0.02
"""Of a logarithm: losses that hardly differ make no spike of one that differs a little more."""


@dataclass(frozen=True)
class _Excess:
    """How far a number is above what is usual."""

    value: float
    usual: float
    """Logarithm of what is."""
    distance: float
    """Logarithm of the factor by which it is above."""
    sigmas: float
    """The same in standard deviations of the logarithms."""

    def __str__(self) -> str:
        times = math.exp(min(math.log(self.value) - self.usual, 99.0))
        return (
            f"{self.value:.4g} is {times:.3g} times the usual {math.exp(self.usual):.4g} of its "
            f"window, {self.sigmas:.1f} robust standard deviations above it"
        )


@dataclass(frozen=True)
class _Limit:
    """What makes a spike; it takes both."""

    sigmas: float
    factor: float

    def is_passed(self, excess: _Excess | None) -> bool:
        if excess is None:
            return False
        return excess.distance > math.log(self.factor) and excess.sigmas > self.sigmas


_LOSS = _Limit(6.0, 2.0)
_GRADIENT = _Limit(7.0, 5.0)
"""Gradient norms have a heavier tail than losses, and are clipped."""
_UNKNOWN = _Limit(6.0, 1000.0)
"""Of clips of a shape, or a loss at a noise level, too rare to know what is usual there. Near sigma
= 0 a model that predicts the clip has a hundred times its usual loss, in good health."""


def spike(step: Step) -> Verdict | None:
    """The verdict on a step whose loss or gradient norm sticks out of its window."""
    if not step.is_warm:
        return None
    is_known = len(step.of_same_shape) >= _LEAST
    rows = step.of_same_shape if is_known else step.alike
    message = _what_sticks_out(rows, step.now, step.section.window, is_known)
    return None if message is None else skip_or_roll_back(step, "spike", message)


def _what_sticks_out(rows: Rows, now: Statistics, window: int, is_known: bool) -> str | None:
    """What a step has of which the rows have far less, for people."""
    newest = rows.where(slice(-window, None))
    shrink = _shrink(newest, now)
    loss = _excess(newest.column("loss"), now.loss, shrink)
    where = _noise_levels(rows, now, shrink) if is_known and _LOSS.is_passed(loss) else None
    if where is not None or _UNKNOWN.is_passed(loss):
        return f"The loss of {loss}{where or ''}."
    # A loss that is higher by a factor makes a gradient that is: that is no finding of its own.
    explained = max(0.0, loss.distance) if loss is not None else 0.0
    gradient = _excess(newest.column("grad_norm"), now.grad_norm, shrink, explained)
    if (_GRADIENT if is_known else _UNKNOWN).is_passed(gradient):
        return f"The gradient norm of {gradient}; the loss is {now.loss:.4g}."
    return None


def _shrink(window: Rows, now: Statistics) -> float:
    """By how much more a mean over fewer samples than usual varies."""
    return math.sqrt(max(1.0, median(window.column("num_samples")) / max(1, now.num_samples)))


def _excess(past: Numbers, value: float, shrink: float, explained: float = 0.0) -> _Excess | None:
    """None where there is nothing to compare with; `explained` is taken off the distance."""
    known = past[np.isfinite(past) & (past > 0)]
    if len(known) < _LEAST or not value > 0:
        return None
    logs = np.log(known)
    usual = median(logs[-_LEVEL_STEPS:])
    distance = math.log(value) - usual - explained
    sigmas = distance / (shrink * max(_LEAST_NOISE, noise(logs)))
    return _Excess(value, usual, distance, sigmas)


def _noise_levels(rows: Rows, now: Statistics, shrink: float) -> str | None:
    """At which noise levels the loss sticks out, for people; None if at none that is known.

    They are compared with all that is remembered, as some are rare.
    """
    there = [quarter for quarter, loss in enumerate(now.loss_by_sigma) if loss > 0]
    losses = rows.losses_by_sigma
    excesses = {each: _excess(losses[:, each], now.loss_by_sigma[each], shrink) for each in there}
    out = [quarter for quarter, excess in excesses.items() if _LOSS.is_passed(excess)]
    if len(out) == len(there):
        return ", at all noise levels" if there else ""  # "": they were not measured
    names = " and ".join(f"{quarter / 4:g} to {(quarter + 1) / 4:g}" for quarter in out)
    return f", but only at sigmas of {names}" if out else None
