"""Leaving out an update; or going back, where too many were left out."""

import numpy as np

from longtake.guard.robust import median, noise
from longtake.guard.step import Step
from longtake.guard.verdict import Reason, Verdict

_LEAST = 16
"""Losses that say what is ordinary."""
_ORDINARY_SIGMAS = 3.0


def skip_or_roll_back(step: Step, reason: Reason, message: str) -> Verdict:
    """Leave this update out, unless that was done too often within the last window."""
    section, now = step.section, step.now.step
    earlier = step.before.column("step")[step.before.are("skip")]
    skipped = earlier[earlier > now - section.window]
    if len(skipped) < section.max_skips:
        return Verdict("skip", reason, message, now)
    first = int(skipped[0]) if len(skipped) else now
    if len(skipped):
        message += (
            f" It would be update number {len(skipped) + 1} to be left out within "
            f"{section.window} steps; the first was that of step {first + 1}."
        )
    return Verdict("roll_back", reason, message, _began(step, reason, first))


def _began(step: Step, reason: Reason, first: int) -> int:
    """From where on the state, or the batch, may be to blame.

    Between steps that are skipped the state stays what it was. If all are skipped since the first,
    it may have been the update before that one which did the harm, whatever the batches since.
    """
    is_made = ~step.before.are("skip") & (step.before.column("step") > first)
    if reason == "non_finite" or is_made.any():
        return first
    return _last_ordinary(step, first)


def _last_ordinary(step: Step, first: int) -> int:
    """The last step before the first skipped one whose loss was nothing special."""
    rows = step.alike.where(step.alike.column("step") < first)
    losses = rows.column("loss")
    rows = rows.where(np.isfinite(losses) & (losses > 0)).where(slice(-step.section.window, None))
    if len(rows) < _LEAST:
        return max(0, first - 1)
    logs = np.log(rows.column("loss"))
    is_ordinary = logs <= median(logs) + _ORDINARY_SIGMAS * noise(logs)
    return int(rows.column("step")[is_ordinary][-1])
