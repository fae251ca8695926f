"""From a step's numbers, and those of the steps before it, to a verdict.

    non_finite    a loss, gradient or weights that are no numbers; judged from the first step on
    weight_step   the weights' norm has jumped
    divergence    updates, loss or gradients have been too large for too long
    spike         this step's loss or gradient sticks out

All of it is a pure function of numbers that are the same on every rank, so every rank comes to the
same verdict and none has to be told.
"""

import numpy as np

from longtake.config import GuardSection
from longtake.guard.drift import divergence
from longtake.guard.history import History
from longtake.guard.non_finite import non_finite
from longtake.guard.spike import spike
from longtake.guard.statistics import Statistics
from longtake.guard.step import Step
from longtake.guard.steps import weight_step
from longtake.guard.verdict import OK, Verdict


def judge(history: History, now: Statistics, section: GuardSection) -> Verdict:
    """The verdict on a step, before its update is made.

    Args:
        history: the steps before it, with their verdicts.
        now: the step.
        section: of the recipe.

    Returns:
        `OK`; or the first of the above that finds something, told for people.
    """
    step = Step(history, now, section)
    with np.errstate(all="ignore"):  # sums and ratios of numbers near the end of floats
        return non_finite(step) or weight_step(step) or divergence(step) or spike(step) or OK
