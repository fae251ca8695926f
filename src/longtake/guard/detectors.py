"""Detects divergence of a training from the statistics of past steps.

All functions are pure, so that equal statistics give equal verdicts on every rank. Thresholds are
calibrated on undisturbed runs by benchmarks/guard_calibration.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longtake.guard.history import (
    GROUPS,
    POPULATIONS,
    GuardSettings,
    History,
    Numbers,
    StepRows,
    StepStatistics,
    StepWindow,
    median,
    medians,
    noise,
    spread,
)
from longtake.guard.update_growth import (
    MIN_USUAL_UPDATES,
    MOST_TIMES_A_LOWER_RATE,
    NUM_NEWEST_UPDATES,
    update_growth,
)

VerdictKind = Literal["ok", "skip", "roll_back", "stop"]
VerdictReason = Literal[
    "",
    "non_finite",
    "spike",
    "divergence",
    "weight_step",
    "edge_step",
    "replicas",
    "no_gradient",
]


@dataclass(frozen=True)
class GuardVerdict:
    """A decision of the guard on a training step, before its update is applied.

    `skip` drops the update; `roll_back` drops it and restores a checkpoint from before `began`;
    `stop` ends the run.
    """

    kind: VerdictKind
    reason: VerdictReason = ""  # `edge_step`: a `weight_step` at the edge of an epoch or stage
    message: str = ""  # observation and usual value, as a sentence; empty if `ok`
    began: int = 0  # first step of the divergence; the state before it is good


OK = GuardVerdict("ok")


def judge(history: History, now: StepStatistics, settings: GuardSettings) -> GuardVerdict:
    """Return the verdict of the first detector that finds a divergence in a step, or `OK`.

    Args:
        history: steps before `now`.
        now: the step, before its update.
        settings: the guard's settings.
    """
    window = StepWindow(history, now, settings)
    with np.errstate(all="ignore"):  # float range is exceeded when statistics explode
        return (
            # The most specific first: it names the reason. Only the first and the last one skip.
            detect_non_finite(window)
            or detect_weight_norm_jump(window)
            or detect_recurring_edge(window)
            or detect_divergence(window)
            or detect_spike(window)
            or OK
        )


# --- NaN and inf ----------------------------------------------------------------------------------


def detect_non_finite(window: StepWindow) -> GuardVerdict | None:
    """Return `skip` for NaN or inf in loss or gradients, and `roll_back` for it in weights."""
    now = window.now
    if not math.isfinite(now.weight_norm):
        rows = window.history.rows
        finite = rows.column("step")[np.isfinite(rows.column("weight_norm"))]
        # The update of the last step with finite weights broke them.
        began = int(finite[-1]) if len(finite) else max(0, now.step - 1)
        message = (
            f"The norm of the weights is {now.weight_norm}: the update of step {began + 1} left "
            "NaN or inf in them."
        )
        return GuardVerdict("roll_back", "non_finite", message, began)
    if math.isfinite(now.loss) and math.isfinite(now.grad_norm) and now.nonfinite_share == 0:
        return None
    message = f"The loss is {now.loss:.4g} and the norm of the gradient {now.grad_norm:.4g}"
    if now.nonfinite_share > 0:
        share = now.nonfinite_share
        text = f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
        message += f", of which {text} is NaN or inf"
    return _skip_or_roll_back(window, "non_finite", f"{message}; both must be finite.")


# --- Jumps of the weight norm ---------------------------------------------------------------------

_SPANS = {1: 16, 4: 32, 16: 64, 64: 192}
"""Spans in steps over which jumps of the weight norm are looked for (the longest finds a drift),
each with the least number of earlier changes to compare with: long spans overlap, so they need
more."""
_JUMP_SIGMAS = 12.0
"""Least distance of a jump of the weight norm from its usual change, in robust standard deviations.
Undisturbed runs reach 5."""
_JUMP_TIMES_LARGEST = 2.0
"""Least distance of a jump of the weight norm, as a multiple of the largest one in the window.
Undisturbed runs reach 1."""
_MIN_JUMP_FRACTION = 2e-3
"""Least distance of a jump, as a share of the weight norm. The epoch-end defect behind this rule
added 0.7 % at once; an undisturbed run of that size changes by less than 0.1 % in 16 steps."""
_MOST_TIMES_THE_RATE = 12.0
"""Earlier changes of the weight norm at a rate lower by more than this factor are ignored."""
_MAX_STEPS_AFTER_EDGE = 16
"""Number of steps after the edge of an epoch or stage in which a jump of the weight norm is
attributed to the edge; fewer if epochs are short."""
_JUMP_UPDATE_GROWTH = 3.0
"""Growth factor of recent updates from which a jump of the weight norm is attributed to them."""


def detect_weight_norm_jump(window: StepWindow) -> GuardVerdict | None:
    """Return `roll_back` if the weight norm jumped, which a loss often does not show.

    Unlike other detectors it compares steps of different stages, since jumps are likely where a
    stage begins.
    """
    rows = window.past
    if len(rows) < window.settings.warmup_steps:
        return None
    rows = rows.append(window.row)
    rows = rows.select(np.isfinite(rows.column("weight_norm")))
    for span, least in _SPANS.items():
        most = max(window.settings.window, 2 * least)
        usual = _usual_change(rows, span, least, most)
        if usual is not None:
            began = int(rows.column("step")[-1 - span])
            norm = float(rows.column("weight_norm")[-1 - span])
            return _weight_norm_verdict(window, began, span, norm, usual)
    return None


def _usual_change(rows: StepRows, span: int, least: int, most: int) -> float | None:
    """Return the weight norm's usual change in `span` steps if the last is an outlier, else None.

    Compares with at least `least` and at most `most` earlier changes; None if there are fewer. They
    are taken as they are, and as they would be at the learning rates of the last `span` updates:
    weights that move in one direction change in proportion to the rate, weights that walk at random
    with its square. A jump is an outlier in all three ways, and remains one if the growth of the
    updates, up to that of a divergence, is accounted for: a LoRA that learns a feature at last
    grows so.
    """
    norms, rates = rows.column("weight_norm"), rows.column("rate")
    changes = norms[span:] - norms[:-span]
    # Changes that overlap the last one would contain a part of the jump.
    num_past = max(0, len(changes) - span)
    if num_past < least:
        return None
    ways = [path[span:] - path[:-span] for path in (np.cumsum(rates**2), np.cumsum(rates))]
    past, ratios = changes[:num_past], [np.ones(num_past)] * 2
    if ways[1][-1] > 0:
        is_comparable = ways[1][:num_past] * _MOST_TIMES_THE_RATE >= ways[1][-1]
        past = past[is_comparable]
        ratios = [way[-1] / way[:num_past][is_comparable] for way in ways]
    if len(past) < least:
        return None

    def is_outlier(ratio: Numbers) -> bool:
        expected = (past * ratio)[-most:]
        if expected.min() <= changes[-1] <= expected.max():  # a quick way to the same answer
            return False
        usual = median(expected)
        distance = abs(float(changes[-1]) - usual)
        largest = float(np.abs(expected - usual).max())
        limit = max(abs(usual), _JUMP_TIMES_LARGEST * largest, _MIN_JUMP_FRACTION * norms[-1])
        return bool(distance > max(limit, _JUMP_SIGMAS * spread(expected, usual)))

    if not all(map(is_outlier, [np.ones(len(past)), *ratios])):
        return None
    growth = _growth_within_limits(rows, span)
    grown = [ratios[0] * growth**2, ratios[-1] * growth]
    return median(past[-most:]) if all(map(is_outlier, grown)) else None


def _growth_within_limits(rows: StepRows, span: int) -> float:
    """Return the growth factor of the last `span` updates, from 1 to `_JUMP_UPDATE_GROWTH`."""
    sizes = np.linalg.norm(rows.select(rows.have_update).updates, axis=1)
    recent, past = sizes[-span:], sizes[:-span][-NUM_NEWEST_UPDATES:]
    if len(past) < MIN_USUAL_UPDATES:
        return 1.0
    mean_square = float(np.square(recent / median(past)).mean())
    return min(_JUMP_UPDATE_GROWTH, max(1.0, math.sqrt(mean_square)))


def _weight_norm_verdict(
    window: StepWindow, began: int, span: int, norm: float, usual: float
) -> GuardVerdict:
    now = window.now.weight_norm
    share = (now - norm) / norm if norm else math.inf
    message = (
        f"The norm of the weights went from {norm:.6g} to {now:.6g} ({share:+.2%}) within "
        f"{span} step{'s' * (span > 1)}, in which it usually changes by {usual:+.2g}"
    )
    reason: VerdictReason = "weight_step"
    growth = update_growth(window, span, _JUMP_UPDATE_GROWTH) if window.is_warm else None
    # A learning rate that is too high moves the weights at any step, so that a jump with grown
    # updates is attributed to an edge only if it happened exactly there.
    first = began + 1
    if not growth:  # less than a quarter of the longest remembered epoch before it
        rows = window.history.rows
        at_edge = rows.column("step")[rows.column("at_edge") > 0]
        epochs = np.diff(np.concatenate([rows.column("step")[:1], at_edge, [window.now.step]]))
        first -= int(min(_MAX_STEPS_AFTER_EDGE, epochs.max() // 4))
    steps = [*(each.statistics for each in window.history), window.now]
    edges = (each.edge for each in reversed(steps) if each.edge and each.step >= first)
    edge = next(edges, None)
    if edge is not None:
        reason, message = "edge_step", f"{message}, where {edge}"
    elif growth is not None:
        reason = "divergence"
    if growth is not None:
        message, began = f"{message}. {growth}", min(began, growth.began)
    return GuardVerdict("roll_back", reason, f"{message.rstrip('.')}.", began)


# --- Small changes that recur at the edges of epochs ----------------------------------------------
# A single such change is too small to detect. If each of several edges exceeds all the steps before
# it, that is no chance: with eight earlier steps it happens by chance at one edge in nine, and at
# five edges in a row once in 60,000. They must also be twice as far off as any of those steps.

_NUM_EDGES = 5
"""Number of successive epochs at whose edges (ends) a change must recur."""
_LEAST_BETWEEN, _MOST_BETWEEN = 8, 32
"""Least and largest number of steps before an epoch's edge with which it is compared."""
_TIMES_FURTHEST = 2.0
"""Least distance of an epoch's edge from the usual value of the steps before it, as a multiple of
their largest distance."""
_EDGE_UPDATE_GROWTH = 2.0
_MIN_EDGES_FRACTION = 1e-3
"""Least share of the weight norm that the changes at the edges of epochs have added together."""


def detect_recurring_edge(window: StepWindow) -> GuardVerdict | None:
    """Return `roll_back` if each of the last epochs ended with a change seen only at their ends."""
    if window.now.edge is None or not window.is_warm:
        return None
    rows = window.past.append(window.row)
    at = np.flatnonzero(rows.column("at_edge") > 0)
    edges = at[-_NUM_EDGES:]
    if len(edges) < _NUM_EDGES:
        return None
    starts = [0, *at][-_NUM_EDGES - 1 : -1]
    between = [
        slice(max(start + 1, edge - _MOST_BETWEEN), edge)
        for start, edge in zip(starts, edges, strict=True)
    ]
    if min(before.stop - before.start for before in between) < _LEAST_BETWEEN:
        return None
    # The last batch of an epoch may be smaller, and its gradient wilder.
    samples = rows.column("num_samples")
    if any(samples[before.stop - 1] < median(samples[before]) for before in between):
        return None
    norms = rows.column("weight_norm")
    changes = np.diff(norms, prepend=norms[:1])
    excess, usual = _excess_at_edges(changes, edges, between)
    count, began = f"each of the last {_NUM_EDGES} edges", int(rows.column("step")[edges[-1] - 1])
    where = f", the last where {window.now.edge}."
    if abs(excess.sum()) > _MIN_EDGES_FRACTION * norms[-1]:
        message = (
            f"The norm of the weights changed by {median(excess + usual):+.3g} at {count}, and "
            f"before them by {median(usual):+.2g} in a step{where}"
        )
        return GuardVerdict("roll_back", "edge_step", message, began)
    for number, group in enumerate(GROUPS):
        excess, usual = _excess_at_edges(rows.updates[:, number], edges, between)
        growth = (excess + usual) / np.where(usual > 0, usual, np.inf)
        if (growth > _EDGE_UPDATE_GROWTH).all():
            message = (
                f"The updates of the {group} weights were {median(growth):.3g} times as large at "
                f"{count} as in the steps before them{where}"
            )
            return GuardVerdict("roll_back", "edge_step", message, began)
    return None


def _excess_at_edges(
    values: Numbers, edges: NDArray[np.intp], between: Sequence[slice]
) -> tuple[Numbers, Numbers]:
    """Return how far a value at epochs' edges lies from the usual one before, and that value.

    Both are arrays [edges]. The distances are 0 unless all edges exceed these steps, and to the
    same side.
    """
    usual = np.array([median(values[before]) for before in between])
    excess = values[edges] - usual
    furthest = np.array(
        [np.abs(values[before] - each).max() for before, each in zip(between, usual, strict=True)]
    )
    is_beyond = np.abs(excess) > _TIMES_FURTHEST * furthest
    is_found = bool(is_beyond.all()) and abs(np.sign(excess).sum()) == len(excess)
    return excess if is_found else np.zeros(len(excess)), usual


# --- Slow divergence ------------------------------------------------------------------------------

_UPDATE_GROWTH = ((8, 4.0), (32, 3.0))
"""Number of recent updates, and the factor by which their median may exceed the usual one.
Undisturbed runs reach 2.6 and 2.0. A learning rate raised tenfold gives 10, or 3 with bf16 weights,
which round small updates up or away."""
_RECENT_STEPS = 16
_LEVEL_STEPS = 64
"""Number of steps whose median loss or gradient norm is one level of it."""
_LOSS_RISE = 1.5
"""Least rise of the loss over its lowest level in the history; undisturbed runs reach 1.2."""
_GRAD_NORM_RISE = 4.0
_LOSS_RISE_WITH_GRAD_NORM = 1.15
"""Least rise of the loss for a rise of the gradient norm to count: early in a run, gradients may
grow tenfold while the loss falls."""
_LOSS_RISE_SIGMAS = 4.0
"""Least rise of the loss, in standard errors, for a rise of the gradient norm to count: losses of a
model that has learnt four clips vary threefold."""
_MAX_SHARE_ABOVE = 0.05
"""Largest share of the steps at the lowest level that may reach the recent gradient norm. With
random sigmas in a small batch, one step in five may have six times the usual norm, by chance ten
of 16."""
_RISE_SIGMAS = 6.0
"""Least rise of the loss or gradient norm in standard errors of its median, required in
addition."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median of normal numbers, relative to that of their mean."""


def detect_divergence(window: StepWindow) -> GuardVerdict | None:
    """Return `roll_back` if updates, loss or gradient norm have been too high for many steps."""
    if not window.is_warm:
        return None
    for num_recent, factor in _UPDATE_GROWTH:
        if (growth := update_growth(window, num_recent, factor)) is not None:
            return GuardVerdict("roll_back", "divergence", str(growth), growth.began)
    return _level_verdict(window)


def _level_verdict(window: StepWindow) -> GuardVerdict | None:
    """Return a verdict if the loss has stayed higher, alone or together with the gradient norm."""
    rows = _without_annealed(window.same_shape.append(window.row))
    losses, grad_norms = _losses_without_captions_share(rows), rows.column("grad_norm")
    is_measured = np.isfinite(losses) & np.isfinite(grad_norms) & (grad_norms > 0)
    rows, loss = rows.select(is_measured), losses[is_measured]
    if len(rows) < _LEVEL_STEPS + _RECENT_STEPS:
        return None
    steps, loss_rise = rows.column("step"), _rise(loss)
    if _is_significant(loss, loss_rise, _LOSS_RISE):
        return _rise_verdict("loss", steps, loss, loss_rise)
    if _is_significant(loss, loss_rise, _LOSS_RISE_WITH_GRAD_NORM, _LOSS_RISE_SIGMAS):
        grad_norm = np.log(rows.column("grad_norm"))
        grad_norm_rise = _rise(grad_norm)
        share_above = np.mean(_lowest_level(grad_norm) >= median(grad_norm[-_RECENT_STEPS:]))
        if share_above <= _MAX_SHARE_ABOVE and _is_significant(
            grad_norm, grad_norm_rise, _GRAD_NORM_RISE
        ):
            return _rise_verdict("gradient norm", steps, grad_norm, grad_norm_rise)
    return None


def _without_annealed(rows: StepRows) -> StepRows:
    """Leave out steps at a low learning rate before a restart of the schedule raised the loss."""
    rates, restarts = rows.column("rate"), rows.column("restarts")
    is_low = rates < median(rates[-_RECENT_STEPS:]) / MOST_TIMES_A_LOWER_RATE
    return rows.select(~(is_low & (restarts < restarts[-1])))


def _losses_without_captions_share(rows: StepRows) -> Numbers:
    """Return logarithms of the loss [steps] as if each step had the same share of captions.

    A model that has learnt its clips has many times the loss on samples without a caption, so each
    loss is taken relative to the usual one of its population. NaN where a step has no sample.
    """
    sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
    usual_sum, usual_count = 0.0, 0.0
    for population in POPULATIONS:
        losses, samples = rows.column(f"{population}_loss"), rows.column(f"{population}_samples")
        is_measured = np.isfinite(losses) & (losses > 0) & (samples > 0)
        if is_measured.any():
            logs, weights = np.log(losses[is_measured]), samples[is_measured]
            usual, total = median(logs), float(weights.sum())
            sums[is_measured] += weights * (logs - usual)
            counts[is_measured] += weights
            usual_sum, usual_count = usual_sum + total * usual, usual_count + total
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / counts + usual_sum / max(1.0, usual_count))


def _rise(logs: Numbers) -> float:
    return median(logs[-_RECENT_STEPS:]) - median(_lowest_level(logs))


def _lowest_level(logs: Numbers) -> Numbers:
    """Return the values of the steps in a row with the lowest median, without recent steps."""
    past = logs[: len(logs) - _RECENT_STEPS]
    # The steps that fill no level are cut off at the oldest end.
    levels = past[len(past) % _LEVEL_STEPS :].reshape(-1, _LEVEL_STEPS)
    return np.asarray(levels[medians(levels.T).argmin()])


def _is_significant(
    logs: Numbers, rise: float, factor: float, sigmas: float = _RISE_SIGMAS
) -> bool:
    if rise <= math.log(factor):
        return False
    error = _MEDIAN_ERROR * noise(logs[: len(logs) - _RECENT_STEPS]) / math.sqrt(_RECENT_STEPS)
    return rise > sigmas * error


def _rise_verdict(name: str, steps: Numbers, logs: Numbers, rise: float) -> GuardVerdict:
    level = median(logs[-_RECENT_STEPS:])
    width = _RECENT_STEPS // 2
    smooth = medians(np.lib.stride_tricks.sliding_window_view(logs, width).T)
    normal = np.flatnonzero(smooth <= level - rise / 2)
    # The first step of the last window below the midpoint: up to half of the window may be above.
    began = int(steps[normal[-1]]) if len(normal) else int(steps[0])
    message = (
        f"The {name} has risen and stays up: the median of the last {_RECENT_STEPS} steps is "
        f"{math.exp(level):.4g}, {math.exp(rise):.3g} times the lowest earlier level of "
        f"{math.exp(level - rise):.4g}."
    )
    return GuardVerdict("roll_back", "divergence", message, began)


# --- Spikes ---------------------------------------------------------------------------------------

_USUAL_STEPS = 32
"""Number of newest steps that define the usual loss: as a loss falls, older ones mislead."""
_MIN_SAME_SHAPE = 16
"""Least number of steps with this clip shape or noise level that define a usual loss."""
_MIN_NOISE = 0.02
"""Least standard deviation of a loss's logarithms; else any change of nearly equal losses is a
spike."""


@dataclass(frozen=True)
class _Excess:
    """How far a step's loss or gradient norm lies above the usual one, in logarithms."""

    value: float
    usual: float  # logarithm of the usual value
    distance: float  # logarithm of the factor above it, without the explained part
    sigmas: float  # distance in robust standard deviations of the logarithms

    def __str__(self) -> str:
        times = math.exp(min(math.log(self.value) - self.usual, 99.0))
        return (
            f"{self.value:.4g} is {times:.3g} times the usual {math.exp(self.usual):.4g} of its "
            f"window, {self.sigmas:.1f} robust standard deviations above it"
        )


class _SpikeLimit(NamedTuple):
    """Thresholds of a spike in standard deviations and as a factor; it must exceed both."""

    sigmas: float
    factor: float

    def is_exceeded(self, excess: _Excess | None) -> bool:
        if excess is None:
            return False
        return excess.distance > math.log(self.factor) and excess.sigmas > self.sigmas


_LOSS_LIMIT = _SpikeLimit(6.0, 2.0)
_GRAD_NORM_LIMIT = _SpikeLimit(7.0, 5.0)
"""Limit of spikes of gradient norms, which are clipped, with a heavier tail than losses."""
_RESTART_LIMIT = _SpikeLimit(7.0, 30.0)
"""Limit of spikes of gradient norms in the first steps after a restart of the schedule, relative to
steps before it: gradients of a model that had come to rest may grow eightfold there."""
_RARE_LIMIT = _SpikeLimit(6.0, 1000.0)
"""Limit of spikes of the loss at rare clip shapes and noise levels. Near sigma = 0 a model
that predicts the clip has a hundred times its usual loss without any defect."""


def detect_spike(window: StepWindow) -> GuardVerdict | None:
    """Return `skip` if loss or gradient norm are far above past ones; after skips, `roll_back`."""
    if not window.is_warm:
        return None
    is_known_shape = len(window.same_shape) >= _MIN_SAME_SHAPE
    rows = window.same_shape if is_known_shape else window.same_stage
    for population in window.populations if is_known_shape else ():
        spike = _loss_spike(window, rows, population)
        if spike is not None:
            return _skip_or_roll_back(window, "spike", spike)
    now, newest = window.now, rows.select(slice(-window.settings.window, None))
    loss = _excess(newest.column("loss"), now.loss, _noise_factor(newest, "num", now.num_samples))
    if _RARE_LIMIT.is_exceeded(loss):
        return _skip_or_roll_back(window, "spike", f"The loss of {loss}.")
    # Batches without captions have gradients of their own. So have models that do not move yet,
    # because an optimizer is still searching its rate, and those that had come to rest before a
    # restart of the schedule: their gradients are smaller.
    since_restart = newest.select(newest.column("restarts") == now.num_restarts)
    is_settled = len(since_restart) >= _MIN_SAME_SHAPE
    if is_settled:  # otherwise also rows before: those have the low rates at the end of a cycle
        rate = float(window.row.column("rate")[0]) / MOST_TIMES_A_LOWER_RATE
        rates = since_restart.column("rate")
        newest = since_restart.select((rates >= rate) | (rates == 0))
    have_dropped = newest.column("dropped_samples") > 0
    alike = newest.select(have_dropped == (now.population("dropped")[1] > 0))
    if len(alike) >= _MIN_SAME_SHAPE:
        newest = alike
    noise_factor = _noise_factor(newest, "num", now.num_samples)
    # A higher loss raises the gradient norm by the same factor: that part is not counted as a
    # spike of the gradient.
    loss = _excess(newest.column("loss"), now.loss, noise_factor)
    explained = max(0.0, loss.distance) if loss is not None else 0.0
    grad_norm = _excess(newest.column("grad_norm"), now.grad_norm, noise_factor, explained)
    limit = _GRAD_NORM_LIMIT if is_settled else _RESTART_LIMIT
    if not (limit if is_known_shape else _RARE_LIMIT).is_exceeded(grad_norm):
        return None
    message = f"The gradient norm of {grad_norm}; the loss is {now.loss:.4g}."
    return _skip_or_roll_back(window, "spike", message)


_OF_POPULATION = {"captioned": "", "dropped": " of samples without a caption"}


def _loss_spike(window: StepWindow, rows: StepRows, population: str) -> str | None:
    """Describe the loss of samples with (or without) captions if it is a spike; else None."""
    loss, count, *by_sigma = window.now.population(population)
    rows = rows.select(rows.column(f"{population}_samples") > 0)
    newest = rows.select(slice(-window.settings.window, None))
    noise_factor = _noise_factor(newest, population, count)
    excess = _excess(newest.column(f"{population}_loss"), loss, noise_factor)
    if not _LOSS_LIMIT.is_exceeded(excess):
        return None
    # Noise levels are compared with the whole history, since some of them are rare.
    past = rows.losses_by_sigma(population)
    present = [quarter for quarter, loss in enumerate(by_sigma) if loss > 0]
    excesses = [_excess(past[:, each], by_sigma[each], noise_factor) for each in present]
    pairs = zip(present, excesses, strict=True)
    spikes = [quarter for quarter, each in pairs if _LOSS_LIMIT.is_exceeded(each)]
    if present and not spikes:  # at no known noise level
        return None
    at = ", at all noise levels" if present else ""
    if len(spikes) < len(present):
        names = " and ".join(f"{quarter / 4:g} to {(quarter + 1) / 4:g}" for quarter in spikes)
        at = f", but only at sigmas of {names}"
    return f"The loss{_OF_POPULATION[population]} of {excess}{at}."


def _noise_factor(rows: StepRows, population: str, count: float) -> float:
    """Return the factor by which a mean loss varies more, over fewer samples than usual."""
    if not len(rows):
        return 1.0
    return math.sqrt(max(1.0, median(rows.column(f"{population}_samples")) / max(1, count)))


def _excess(
    past: Numbers, value: float, noise_factor: float, explained: float = 0.0
) -> _Excess | None:
    """Return how far `value` lies above past numbers; None if there are too few of these.

    `explained` is subtracted from the distance.
    """
    known = past[np.isfinite(past) & (past > 0)]
    if len(known) < _MIN_SAME_SHAPE or not value > 0:
        return None
    logs = np.log(known)
    usual = median(logs[-_USUAL_STEPS:])
    distance = math.log(value) - usual - explained
    sigmas = distance / (noise_factor * max(_MIN_NOISE, noise(logs)))
    return _Excess(value, usual, distance, sigmas)


# --- Skip, or roll back after too many skips ------------------------------------------------------

_STEPS_BETWEEN_SKIPS = 16
"""Largest number of steps between related skips: a single bad clip does not spoil the state, and
skipping its batch is enough."""
_MIN_ORDINARY_LOSSES = 16
"""Least number of losses that distinguish an ordinary loss from an outlier."""
_ORDINARY_SIGMAS = 3.0


def _skip_or_roll_back(window: StepWindow, reason: VerdictReason, message: str) -> GuardVerdict:
    """Return `skip`, or `roll_back` after `max_skips` skipped updates in close succession."""
    now = window.now.step
    first, num_skips = now, 0
    # Counted from the newest skip backwards, up to a gap that separates unrelated ones.
    for step in window.past.column("step")[window.past.have_verdict("skip")][::-1].astype(int):
        if first - step > _STEPS_BETWEEN_SKIPS:
            break
        first, num_skips = int(step), num_skips + 1
    if num_skips < window.settings.max_skips:
        return GuardVerdict("skip", reason, message, now)
    if num_skips:
        message += (
            f" It would be skipped update number {num_skips + 1} in close succession; the first "
            f"was that of step {first + 1}."
        )
    return GuardVerdict("roll_back", reason, message, _began(window, reason, first))


def _began(window: StepWindow, reason: VerdictReason, first: int) -> int:
    """Return the step at which a divergence may have begun: by its batch, or the update before.

    An ordinary loss after the first skipped step shows that its batch was the cause. Otherwise it
    may have been the update before, since skipped steps leave the state as it is.
    """
    if reason == "non_finite":
        return first
    steps, losses = window.same_stage.column("step"), window.same_stage.column("loss")
    past = losses[(steps < first) & np.isfinite(losses) & (losses > 0)][-window.settings.window :]
    if len(past) < _MIN_ORDINARY_LOSSES:
        return max(0, first - 1)
    logs = np.log(past)
    ordinary = steps[np.log(losses) <= median(logs) + _ORDINARY_SIGMAS * noise(logs)]
    return first if ordinary[-1] > first else int(ordinary[-1])
