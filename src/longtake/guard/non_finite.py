"""Numbers that are none: judged from the first step on."""

import math

import numpy as np

from longtake.guard.skips import skip_or_roll_back
from longtake.guard.step import Step
from longtake.guard.verdict import Verdict


def non_finite(step: Step) -> Verdict | None:
    """The verdict on a step whose loss, gradient or weights are no finite numbers."""
    now = step.now
    if not math.isfinite(now.weight_norm):
        return _lost_weights(step)
    if math.isfinite(now.loss) and math.isfinite(now.grad_norm) and now.nonfinite_share == 0:
        return None
    message = f"The loss is {now.loss:.4g} and the norm of the gradient {now.grad_norm:.4g}"
    if now.nonfinite_share > 0:
        share = now.nonfinite_share
        told = f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
        message += f", of which {told} are no finite numbers"
    return skip_or_roll_back(step, "non_finite", f"{message}; both must be finite.")


def _lost_weights(step: Step) -> Verdict:
    """Back to where they were numbers: no further step can heal them."""
    rows = step.history.rows
    finite = rows.column("step")[np.isfinite(rows.column("weight_norm"))]
    began = int(finite[-1]) if len(finite) else max(0, step.now.step - 1)
    message = (
        f"The norm of the weights is {step.now.weight_norm}: the update of step {began + 1} has "
        "left numbers in them that are not finite."
    )
    return Verdict("roll_back", "non_finite", message, began)
