"""Finds weight groups whose updates have grown: there a wrong learning rate shows first.

Norms are measured by group and divided by the rate that the optimizer used, including its own
estimate, so that updates keep their size. Relative to the weights they would shrink as these grow.
"""

import math
from dataclasses import dataclass

import numpy as np

from longtake.guard.history import GROUPS, StepWindow, block_medians, median, medians

_MIN_SLOW = 32
"""Number of recent updates whose growth must exceed the size of every earlier block of updates."""
MIN_USUAL_UPDATES = 16
"""Least number of earlier updates that define the usual size of an update."""
NUM_NEWEST_UPDATES = 64
"""Number of newest updates that define the usual size. Adam's may shrink to a fifth in the first
hundreds of steps."""
MOST_TIMES_A_LOWER_RATE, _MOST_TIMES_A_HIGHER_RATE = 2.0, 5.0
"""Factors below and above the present learning rate within which updates are compared. If the noise
of gradients, not the rate, limits an optimizer's updates, they keep their size while the rate
falls fiftyfold."""
_MAX_USUAL_UPDATES = 128
"""Most earlier updates that are sampled for the usual size: as good as all, and faster to sort."""
_NUM_NEWEST_LOSSES = 8
"""Number of newest steps whose median loss tells whether the loss falls."""
_FALLEN = 0.7
"""Share of the loss before the recent updates below which it counts as fallen: a part of the model
that begins to learn something makes larger updates, which do no harm while the loss falls."""
_VANISHED = 1e-3
"""Least share of the largest level of earlier gradients at which updates are judged. Where less is
left, the objective is as good as solved, as that of preferences soon is: Adam divides gradients by
their own size, so that its updates then follow single batches."""


@dataclass(frozen=True)
class UpdateGrowth:
    """Growth of the optimizer's updates of one group of weights, compared with the usual size."""

    group: str
    recent: float  # median norm of the recent updates
    usual: float  # lower of the medians of the newest updates before them, and of all
    began: int  # last step with an update of usual size

    def __str__(self) -> str:
        return (
            f"The updates of the {self.group} weights are {self.recent / self.usual:.3g} times as "
            f"large as usual: norm {self.recent:.3g} instead of {self.usual:.3g}, after dividing "
            "by the learning rate of each."
        )


def update_growth(window: StepWindow, num_recent: int, least_factor: float) -> UpdateGrowth | None:
    """Return the weight group whose updates grew most; None if by at most `least_factor`."""
    rows = window.same_stage.append(window.row)
    rows = rows.select(rows.have_update)
    if len(rows) <= num_recent:
        return None
    # An optimizer whose estimate of the rate grows takes larger steps for a while at each rate.
    rates = rows.column("rate")
    rate = median(rates[-num_recent:])
    is_like = rates >= rate / MOST_TIMES_A_LOWER_RATE
    is_like &= rates <= rate * _MOST_TIMES_A_HIGHER_RATE
    rows = rows.select(is_like)
    num_past = len(rows) - num_recent
    if num_past < MIN_USUAL_UPDATES:
        return None
    updates = rows.updates
    recent, past = medians(updates[num_past:]), updates[:num_past]
    newest = medians(past[-NUM_NEWEST_UPDATES:])
    of_all = medians(past[:: max(1, num_past // _MAX_USUAL_UPDATES)])
    lowest = np.minimum(newest, of_all)
    if (recent <= least_factor * lowest).all():  # a quick way to the same answer
        return None
    losses = rows.column("loss")
    before = median(losses[:num_past][-NUM_NEWEST_UPDATES:])
    if median(losses[-_NUM_NEWEST_LOSSES:]) < _FALLEN * before:
        return None
    grad_norms = rows.column("grad_norm")
    grad_norms = grad_norms[np.isfinite(grad_norms)]
    level = block_medians(grad_norms[:, None]).max(initial=0.0)
    if median(grad_norms[-num_recent:]) < _VANISHED * level:
        return None
    # Large gradients shrink Adam's updates for a thousand steps, in which they slowly grow again.
    is_largest = recent > block_medians(past).max(axis=0)
    back = newest if num_recent < _MIN_SLOW else np.inf
    usual = np.where(is_largest, lowest, back)
    factors = recent / np.where(usual > 0, usual, np.inf)
    group = int(factors.argmax())
    if factors[group] <= least_factor:
        return None
    # The geometric mean, as sizes are compared by factors; the product itself could overflow.
    halfway = math.sqrt(recent[group]) * math.sqrt(usual[group])
    normal = np.flatnonzero(updates[:, group] <= halfway)
    began = int(rows.column("step")[normal[-1]])
    return UpdateGrowth(GROUPS[group], float(recent[group]), float(usual[group]), began)
