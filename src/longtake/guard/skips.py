"""Leaving out an update; or going back, where too many were left out."""

import numpy as np

from longtake.guard.robust import median, noise
from longtake.guard.rows import Numbers
from longtake.guard.step import Step
from longtake.guard.verdict import Reason, Verdict

_TOGETHER = 16
"""Steps within which two skips have to do with each other: a bad clip now and then is none of the
state's, and leaving its batches out is all that it takes."""
_LEAST = 16
"""Losses that say what is ordinary."""
_ORDINARY_SIGMAS = 3.0


def skip_or_roll_back(step: Step, reason: Reason, message: str) -> Verdict:
    """Leave this update out, unless that was done too often in close succession."""
    now = step.now.step
    skipped = _just_before(now, step.before.column("step")[step.before.are("skip")])
    if len(skipped) < step.section.max_skips:
        return Verdict("skip", reason, message, now)
    first = skipped[0] if skipped else now
    if skipped:
        message += (
            f" It would be update number {len(skipped) + 1} to be left out in close succession; "
            f"the first was that of step {first + 1}."
        )
    return Verdict("roll_back", reason, message, _began(step, reason, first))


def _just_before(now: int, skipped: Numbers) -> list[int]:
    """The skipped steps that have to do with this one, the oldest first."""
    found = [now]
    for each in skipped[::-1].astype(int).tolist():
        if found[0] - each > _TOGETHER:
            break
        found.insert(0, each)
    return found[:-1]


def _began(step: Step, reason: Reason, first: int) -> int:
    """From where on the state, or the batch, may be to blame.

    A loss that is ordinary again after the first skipped step shows that its batch was. Without one
    it may have been the update before it: the state stays what it is between steps that are
    skipped.
    """
    if reason == "non_finite":
        return first
    steps, losses = step.alike.column("step"), step.alike.column("loss")
    past = losses[(steps < first) & np.isfinite(losses) & (losses > 0)][-step.section.window :]
    if len(past) < _LEAST:
        return max(0, first - 1)
    logs = np.log(past)
    ordinary = steps[np.log(losses) <= median(logs) + _ORDINARY_SIGMAS * noise(logs)]
    return first if ordinary[-1] > first else int(ordinary[-1])
