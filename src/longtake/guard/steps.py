"""A jump of the weight norm, which no loss need show: most often where an epoch ends."""

import math

import numpy as np

from longtake.guard.robust import median, spread
from longtake.guard.rows import Numbers
from longtake.guard.step import Step
from longtake.guard.updates import growth
from longtake.guard.verdict import Reason, Verdict

_SPANS = {1: 16, 4: 32, 16: 64}
"""Steps within which a jump is looked for, and how many earlier changes say what is usual: those of
longer spans overlap, so that it takes more of them."""
_SIGMAS = 12.0
"""From the usual change. Undisturbed runs reach 5."""
_TIMES_FARTHEST = 2.0
"""As far from it as the farthest of the window. Undisturbed runs reach 1."""
_LEAST_SHARE = 2e-3
"""Of the norm. The epoch-end defect that this was made for added seven thousandths at once; a
healthy run of that size changes by less than one in 16 steps."""
_NEAR = 16
"""Steps after an edge in which a jump is put down to it; fewer where epochs are short."""

_GROWN = 3.0
"""Factor by which updates must have grown to be the reason."""


def weight_step(step: Step) -> Verdict | None:
    """The verdict on a step that began with weights of quite another norm than those before it.

    Across stages, unlike all else: where one begins, a jump is most likely.
    """
    rows = step.before
    if len(rows) < step.section.warmup_steps:
        return None
    rows = rows.where(np.isfinite(rows.column("weight_norm")))
    norms = np.append(rows.column("weight_norm"), step.now.weight_norm)
    for span, least in _SPANS.items():
        usual = _usual_change(norms, span, least, max(step.section.window, 2 * least))
        if usual is not None:
            began = int(rows.column("step")[-span])
            return _verdict(step, began, span, float(norms[-1 - span]), usual)
    return None


def _usual_change(norms: Numbers, span: int, least: int, most: int) -> float | None:
    """What a norm usually changes by in `span` steps, if it has now changed by far more or less.

    From at least and at most so many earlier changes; None with fewer.
    """
    changes = norms[span:] - norms[:-span]
    # Without those that overlap the last one, of which a jump is a part as well.
    past = changes[: max(0, len(changes) - span)][-most:]
    if len(past) < least:
        return None
    middle = median(past)
    away = abs(float(changes[-1]) - middle)
    farthest = float(np.abs(past - middle).max())
    if away <= max(abs(middle), _TIMES_FARTHEST * farthest, _LEAST_SHARE * norms[-1]):
        return None
    return middle if away > _SIGMAS * spread(past, middle) else None


def _verdict(step: Step, began: int, span: int, norm: float, usual: float) -> Verdict:
    now = step.now.weight_norm
    share = (now - norm) / norm if norm else math.inf
    message = (
        f"The norm of the weights went from {norm:.6g} to {now:.6g} ({share:+.2%}) within "
        f"{span} step{'s' * (span > 1)}, in which it usually changes by {usual:+.2g}"
    )
    reason: Reason = "weight_step"
    grown = growth(step, span, _GROWN) if step.is_warm else None
    # A learning rate that is too high moves the weights wherever it is: only at the very place is
    # that the edge's doing.
    edge = _edge(step, began + 1) if grown else _edge(step, began + 1 - _near(step))
    if edge is not None:
        reason, message = "edge_step", f"{message}, where {edge}"
    elif grown is not None:
        reason = "divergence"
    if grown is not None:
        message, began = f"{message}. {grown}", min(began, grown.began)
    return Verdict("roll_back", reason, f"{message.rstrip('.')}.", began)


def _near(step: Step) -> int:
    """How many steps after an edge a jump may be put down to it."""
    rows = step.history.rows
    edges = rows.column("step")[rows.column("at_edge") > 0]
    epochs = np.diff(np.concatenate([rows.column("step")[:1], edges, [step.now.step]]))
    return int(min(_NEAR, epochs.max() // 4))


def _edge(step: Step, first: int) -> str | None:
    """The last edge from a step on, for people."""
    seen = [*(judged.statistics for judged in step.history), step.now]
    return next((each.edge for each in reversed(seen) if each.edge and each.step >= first), None)
