"""A training that goes astray little by little, in steps of which none sticks out."""

import math

import numpy as np
from numpy.typing import NDArray

from longtake.guard.robust import median, medians, noise
from longtake.guard.rows import Numbers
from longtake.guard.step import Step
from longtake.guard.updates import growth
from longtake.guard.verdict import Verdict

_GROWN_UPDATES = ((8, 4.0), (32, 3.0))
"""So many updates, and by what factor their median may be larger than usual. Undisturbed runs reach
2.6 and 2.0. A learning rate raised tenfold gives 10, or 3 where weights are in bf16, which rounds
small updates up or away."""
_RECENT = 16
_LEVEL = 64
"""Steps whose median is one level."""
_LOSS_FACTOR = 1.5
"""Of the recent level to the lowest that is remembered. Undisturbed runs reach 1.2."""
_GRADIENT_FACTOR = 4.0
_LOSS_FACTOR_BESIDE = 1.15
"""What the loss must have risen by for a gradient norm to have risen too far: where a training has
just begun, gradients may grow tenfold while the loss falls."""
_SIGMAS = 6.0
"""By which a level must have risen as well."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Of a median of normal numbers, in standard errors of their mean."""


def divergence(step: Step) -> Verdict | None:
    """The verdict on a step with which some number has been too high for too long."""
    if not step.is_warm:
        return None
    for num_recent, factor in _GROWN_UPDATES:
        if (found := growth(step, num_recent, factor)) is not None:
            return Verdict("roll_back", "divergence", str(found), found.began)
    return _levels_rose(step)


def _levels_rose(step: Step) -> Verdict | None:
    """Whether the loss has risen for good, or the gradient norm with it."""
    rows = step.of_same_shape.and_(step.row)
    losses, gradients = rows.column("loss"), rows.column("grad_norm")
    rows = rows.where(_have_logarithms(losses) & _have_logarithms(gradients))
    if len(rows) < _LEVEL + _RECENT:
        return None
    steps, loss = rows.column("step"), np.log(rows.column("loss"))
    gradient = np.log(rows.column("grad_norm"))
    loss_rise = _rise(loss)
    if _is_far(loss, loss_rise, _LOSS_FACTOR):
        return _verdict("loss", steps, loss, loss_rise)
    if loss_rise > math.log(_LOSS_FACTOR_BESIDE):
        gradient_rise = _rise(gradient)
        if _is_far(gradient, gradient_rise, _GRADIENT_FACTOR):
            return _verdict("gradient norm", steps, gradient, gradient_rise)
    return None


def _have_logarithms(values: Numbers) -> NDArray[np.bool_]:
    return np.isfinite(values) & (values > 0)


def _rise(logs: Numbers) -> float:
    """How far the recent level is above the lowest one before; of logarithms."""
    past = logs[: len(logs) - _RECENT]
    levels = medians(past[len(past) % _LEVEL :].reshape(-1, _LEVEL).T)
    return median(logs[-_RECENT:]) - float(levels.min())


def _is_far(logs: Numbers, rise: float, factor: float) -> bool:
    """Whether a rise is large, and no accident."""
    if rise <= math.log(factor):
        return False
    error = _MEDIAN_ERROR * noise(logs[: len(logs) - _RECENT]) / math.sqrt(_RECENT)
    return rise > _SIGMAS * error


def _verdict(name: str, steps: Numbers, logs: Numbers, rise: float) -> Verdict:
    level = median(logs[-_RECENT:])
    width = _RECENT // 2
    smooth = medians(np.lib.stride_tricks.sliding_window_view(logs, width).T)
    normal = np.flatnonzero(smooth <= level - rise / 2)
    # The first step of the last stretch that was still below: half of it may have been above.
    began = int(steps[normal[-1]]) if len(normal) else int(steps[0])
    message = (
        f"The {name} has risen and stays up: the median of the last {_RECENT} steps is "
        f"{math.exp(level):.4g}, {math.exp(rise):.3g} times what it was down to before, "
        f"{math.exp(level - rise):.4g}."
    )
    return Verdict("roll_back", "divergence", message, began)
