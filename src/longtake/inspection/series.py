"""Reduces a run's metrics to what a plot draws: minimum, maximum and mean for each pixel.

Blocks of 64 rows are reduced once for each column, so that a window of any length is reduced from a
few numbers for each pixel. The range of a pixel covers every number of its steps: no spike is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from longtake.config import Bucket
from longtake.inspection.columns import ABSENT, Column
from longtake.inspection.rows import MetricRows
from longtake.metrics import METRIC_COLUMNS, METRICS, Metric

SERIES: Final[Mapping[str, Metric]] = {
    **{name: metric for name, metric in METRICS.items() if metric.label},
    "loss_smoothed": Metric("loss, smoothed", panel="loss", is_logarithmic=True),
    "samples_per_second": Metric("clips", "1/s", panel="speed"),
}
"""Quantities that `read_series` can return: metrics of metrics.jsonl, and some computed from
them."""

MAX_PIXELS: Final = 10_000
_BLOCK_ROWS = 64
_BLOCKS_PER_PIXEL = 4
_BLOCKS_AT_A_TIME = 1024
_MOST_BRANCHES = 100
# Rows over which the loss is smoothed: a share of all rows, and its lower and upper limit.
_SMOOTHED_SHARE, _LEAST_SMOOTHED, _MOST_SMOOTHED = 1 / 100, 8, 512

XAxis = Literal["step", "time", "batch"]


@dataclass(frozen=True)
class Series:
    """One metric over the steps, reduced to a bucket per pixel; all arrays have one length.

    A bucket without rows, or without a finite number, contains NaN.
    """

    name: str
    x: Column
    """Position on the x axis of the first row in each bucket: its step (int64), time in seconds
    since 1970, or batch. It never falls."""
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]
    is_not_finite: NDArray[np.bool_]
    """True for each bucket in which a number was NaN or infinite."""

    @property
    def metric(self) -> Metric:
        return SERIES[self.name]


@dataclass(frozen=True)
class AbandonedBranch:
    """Steps that a run trained, then gave up when it went back to an earlier step."""

    first_step: int
    last_step: int
    returned_to: int
    """The earlier step that the run went back to, and after which training continued."""
    rows: MetricRows
    """Rows of the abandoned steps, after the row that they continue, so that their curves join."""

    def read(self, names: Sequence[str], first: int, last: int, pixels: int) -> list[Series]:
        return _reduce(self.rows, names, first, last, pixels, "step")


def read_series(
    rows: MetricRows,
    names: Sequence[str],
    first: int,
    last: int,
    pixels: int,
    *,
    x: XAxis = "step",
) -> list[Series]:
    """Return metrics of the steps `first` to `last` (inclusive) in at most `pixels` buckets each.

    Args:
        rows: rows of the run, as `read_rows` returns them.
        names: names in `SERIES`.
        first: the first step.
        last: the last step.
        pixels: the width of the plot; at most `MAX_PIXELS` are used.
        x: unit of the buckets' `x`. Buckets are always formed by steps; unless `x` is "step",
            buckets without rows are left out.
    """
    return _reduce(rows.kept, names, first, last, pixels, x)


def abandoned_branches(rows: MetricRows) -> list[AbandonedBranch]:
    """Return the branches (steps that the run gave up by going back) in order: the 100 longest."""
    firsts, lasts = abandoned_spans(rows)
    longest = np.sort(np.argsort(firsts - lasts, kind="stable")[:_MOST_BRANCHES])
    found = []
    for begin, end in zip(firsts[longest].tolist(), lasts[longest].tolist(), strict=True):
        after = rows.step[end + 1] if end + 1 < len(rows) else rows.step[begin]
        joins = begin > 0 and rows.step[begin - 1] < rows.step[begin]
        found.append(
            AbandonedBranch(
                first_step=int(rows.step[begin]),
                last_step=int(rows.step[end]),
                returned_to=max(0, int(after) - 1),
                rows=rows[begin - joins : end + 1],
            )
        )
    return found


def abandoned_spans(rows: MetricRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the first and last row of each branch (steps that the run gave up)."""
    lines = np.flatnonzero(rows.is_abandoned)
    # Steps rise within a pass; a step that does not rise begins the next pass.
    passes = np.cumsum(np.diff(rows.step, prepend=0) <= 0)
    _, begins = np.unique(passes[lines], return_index=True)
    return lines[begins], np.append(lines[begins[1:] - 1], lines[-1:])


@dataclass(frozen=True)
class BucketSpeed:
    """Training speed of the steps whose clips have one shape."""

    bucket: Bucket
    num_steps: int
    median: float
    """Tokens per second, median of the steps."""
    mean: float
    """Tokens of the steps divided by their seconds, with data loading and checkpoints."""
    step_seconds: float
    """Median of the steps."""
    mfu: float | None
    """Model FLOPs utilisation, median of the steps; None if no step has it."""


def speeds_by_bucket(rows: MetricRows) -> list[BucketSpeed]:
    """Return the training speed for each shape of clips, the shape with the most steps first.

    Abandoned steps do not count. Rows of older runs, which have no tokens per second, are left out.
    """
    kept = rows.kept
    is_known = kept.is_recorded("tokens_per_second") & kept.is_recorded("num_frames")
    names = ("tokens_per_second", "step_seconds", *METRIC_COLUMNS["bucket"])
    rates, seconds, frames, height, width = (
        kept.raw_column(name)[is_known].astype(np.float64) for name in names
    )
    utilisations = kept.column("mfu")[is_known].astype(np.float64)
    # One integer for each shape, which is sorted fast: sides are at most 2**16.
    shapes = (frames * 2.0**34 + height * 2.0**17 + width).astype(np.int64)
    order = np.argsort(shapes, kind="stable")
    begins = np.flatnonzero(np.diff(shapes[order], prepend=-1))
    found = []
    for steps in np.split(order, begins[1:]) if len(order) else []:
        shape = (int(each[steps[0]]) for each in (frames, height, width))
        bucket = Bucket(**dict(zip(METRIC_COLUMNS["bucket"], shape, strict=True)))
        with np.errstate(all="ignore"):
            mean = float(rates[steps] @ seconds[steps] / seconds[steps].sum())
        known = utilisations[steps][~np.isnan(utilisations[steps])]
        found.append(
            BucketSpeed(
                bucket,
                len(steps),
                float(np.median(rates[steps])),
                mean,
                float(np.median(seconds[steps])),
                float(np.median(known)) if len(known) else None,
            )
        )
    return sorted(found, key=lambda each: -each.num_steps)


# --- Reduction --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reduced:
    """Minimum, maximum, sum and count of a metric's finite numbers in each group of rows."""

    low: NDArray[np.float64]  # inf if no number is finite
    high: NDArray[np.float64]  # -inf if no number is finite
    total: NDArray[np.float64]
    count: NDArray[np.int64]  # finite numbers
    has_bad: NDArray[np.bool_]

    def joined(self, starts: NDArray[np.int64]) -> "_Reduced":
        """Combine the numbers of consecutive groups of rows; new groups begin at `starts`."""
        with np.errstate(over="ignore"):
            return _Reduced(
                np.minimum.reduceat(self.low, starts),
                np.maximum.reduceat(self.high, starts),
                np.add.reduceat(self.total, starts),
                np.add.reduceat(self.count, starts),
                np.logical_or.reduceat(self.has_bad, starts),
            )

    def __getitem__(self, chosen: slice) -> "_Reduced":
        return _Reduced(*(each[chosen] for each in self._columns()))

    def followed_by(self, others: "Sequence[_Reduced]") -> "_Reduced":
        columns = zip(*(each._columns() for each in (self, *others)), strict=True)
        return _Reduced(*map(np.concatenate, columns))

    def _columns(self) -> tuple[Column, ...]:
        return self.low, self.high, self.total, self.count, self.has_bad


def _single(values: Column) -> _Reduced:
    """Return a metric's values as groups of one row each."""
    numbers = values.astype(np.float64, copy=False)
    is_finite = np.isfinite(numbers)
    return _Reduced(
        np.where(is_finite, numbers, np.inf),
        np.where(is_finite, numbers, -np.inf),
        np.where(is_finite, numbers, 0.0),
        is_finite.astype(np.int64),
        # A number that the line does not have is no fault.
        ~is_finite & (numbers != ABSENT),
    )


def _reduce(
    rows: MetricRows, names: Sequence[str], first: int, last: int, pixels: int, x: XAxis
) -> list[Series]:
    steps, begin, end = rows.step, 0, 0
    if len(rows):
        # All buckets are spent on steps that exist, however far the plot is zoomed out.
        first, last = max(first, int(steps[0])), min(last, int(steps[-1]))
        begin, end = np.searchsorted(steps, [first, last + 1]).tolist()
    if begin >= end:
        none, bad = np.empty(0), np.empty(0, bool)
        return [Series(name, steps[:0], none, none, none, bad) for name in names]
    # All buckets have `width` steps; the last may reach beyond `last`, where its rows end.
    width = -(-(last - first + 1) // min(max(1, pixels), MAX_PIXELS))
    edges = np.arange(first, last + width + 1, width)
    places = np.searchsorted(steps, np.append(edges[:-1], last + 1))
    pieces = _pieces(begin, end, len(edges) - 1)
    starts = np.searchsorted(pieces, places)
    # Where blocks are longer than buckets, a bucket may have rows but no piece that begins in it:
    # its rows are part of the bucket before, and it is not shown as a gap.
    has_rows, is_gap = np.diff(starts) > 0, np.diff(places) == 0
    is_shown = has_rows | (is_gap if x == "step" else False)
    positions = edges[:-1].copy()
    begins = pieces[starts[:-1][has_rows]]
    positions[has_rows] = steps[begins]
    if x != "step":
        column = rows.column(x)
        positions = positions.astype(column.dtype)
        # The clock may have been set back; positions must not fall.
        positions[has_rows] = np.maximum.accumulate(column)[begins]
    found = []
    for name in names:
        groups = _groups(rows, name, pieces, end).joined(starts[:-1][has_rows])
        numbers = np.full((3, len(positions)), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            # Sums of floats round, and may overflow: a mean stays within its range.
            mean = np.clip(groups.total / groups.count, groups.low, groups.high)
        is_known = groups.count > 0
        numbers[:, has_rows] = np.where(is_known, (groups.low, groups.high, mean), np.nan)
        has_bad = np.zeros(len(positions), bool)
        has_bad[has_rows] = groups.has_bad
        low, high, mean = numbers[:, is_shown]
        where = positions[is_shown]
        found.append(Series(name, where, low, high, mean, has_bad[is_shown]))
    return found


def _pieces(begin: int, end: int, num_buckets: int) -> NDArray[np.int64]:
    """Return the first row of each group to reduce: single rows, or blocks of 64 if there are many.

    With blocks, a bucket may begin up to 63 rows later than its pixel.
    """
    # Blocks only where a pixel has several: its border is then off by a part of a pixel at most.
    if end - begin <= num_buckets * _BLOCK_ROWS * _BLOCKS_PER_PIXEL:
        return np.arange(begin, end)
    first = -(-begin // _BLOCK_ROWS) * _BLOCK_ROWS
    whole = np.arange(first, end, _BLOCK_ROWS)
    return whole if first == begin else np.insert(whole, 0, begin)


def _groups(rows: MetricRows, name: str, pieces: NDArray[np.int64], end: int) -> _Reduced:
    """Return a metric reduced over each piece of rows; the first and last may be partial blocks."""
    begin = int(pieces[0])
    if len(pieces) == end - begin:
        return _single(_values(rows, name, begin, end))
    first, last = -(-begin // _BLOCK_ROWS), end // _BLOCK_ROWS
    groups, zero = _blocks(rows, name, last)[first:], np.zeros(1, np.int64)
    if begin < first * _BLOCK_ROWS:
        before = _single(_values(rows, name, begin, first * _BLOCK_ROWS))
        groups = before.joined(zero).followed_by([groups])
    if last * _BLOCK_ROWS < end:
        after = _single(_values(rows, name, last * _BLOCK_ROWS, end))
        groups = groups.followed_by([after.joined(zero)])
    return groups


def _blocks(rows: MetricRows, name: str, num_blocks: int) -> _Reduced:
    """Return a metric's first blocks of 64 rows, reduced; cached blocks are not reduced again."""
    # The smoothing depends on the number of rows, so blocks of another decay do not count.
    key = (name, _decay(rows)) if name == "loss_smoothed" else name
    known: list[_Reduced] = [rows.reduced[key]] if key in rows.reduced else []
    begin = len(known[0].low) if known else 0
    while begin < num_blocks:
        end = min(num_blocks, begin + _BLOCKS_AT_A_TIME)
        values = _values(rows, name, begin * _BLOCK_ROWS, end * _BLOCK_ROWS)
        known.append(_single(values).joined(np.arange(0, len(values), _BLOCK_ROWS)))
        begin = end
    rows.reduced[key] = known[0] if len(known) == 1 else known[0].followed_by(known[1:])
    reduced: _Reduced = rows.reduced[key]
    return reduced[:num_blocks]


# --- The smoothed loss ------------------------------------------------------------------------


def _values(rows: MetricRows, name: str, begin: int, end: int) -> Column:
    if name == "loss_smoothed":
        return _smoothed_loss(rows)[begin:end]
    if name == "samples_per_second":
        samples, seconds = (rows.part(each, begin, end) for each in ("num_samples", "step_seconds"))
        with np.errstate(all="ignore"):
            return np.where(seconds > 0, samples / seconds, ABSENT)
    return rows.part(name, begin, end)


def _decay(rows: MetricRows) -> float:
    """Return the smoothed loss's decay per row (0 to 1); longer runs are smoothed more."""
    length = np.clip(len(rows) * _SMOOTHED_SHARE, _LEAST_SMOOTHED, _MOST_SMOOTHED)
    # A power of two, so that a growing run seldom has to be smoothed again from its start.
    return float(1 - 1 / 2.0 ** round(np.log2(length)))


def _smoothed_loss(rows: MetricRows) -> NDArray[np.float64]:
    """Return the exponential moving average of the loss up to each row.

    Only finite losses of steps without a verdict count. The mean is divided by the sum of the
    weights, as in Adam, so that it begins at the first loss. Rows that are cached are not computed
    again.
    """
    decay = _decay(rows)
    values, total, weight = rows.reduced.get(("smoothed", decay), (np.empty(0), 0.0, 0.0))
    parts, begin = [values], len(values)
    while begin < len(rows):
        end = min(len(rows), begin + _BLOCKS_AT_A_TIME * _BLOCK_ROWS)
        losses = rows.part("loss", begin, end)
        counts = np.isfinite(losses) & ~rows.part("has_verdict", begin, end)
        with np.errstate(all="ignore"):
            totals = _decaying_sum(np.where(counts, losses, 0.0), decay, total)
            weights = _decaying_sum(counts.astype(np.float64), decay, weight)
            parts.append(np.where(weights > 0, totals / weights, np.nan))
        begin, total, weight = end, float(totals[-1]), float(weights[-1])
    if len(parts) > 1:
        values = np.concatenate(parts)
        rows.reduced[("smoothed", decay)] = values, total, weight
    return values


def _decaying_sum(values: NDArray[np.float64], decay: float, before: float) -> NDArray[np.float64]:
    """Compute the decaying sum y[t] = decay * y[t - 1] + values[t], with y[-1] = `before`."""
    size = _BLOCK_ROWS
    blocks = np.zeros((-(-len(values) // size), size))
    blocks.reshape(-1)[: len(values)] = values
    # Within a block the sums are a product with a triangular matrix; the sums at the ends of blocks
    # follow the same recurrence with decay**size.
    age = np.subtract.outer(np.arange(size), np.arange(size))
    inside = blocks @ np.where(age >= 0, decay ** np.maximum(age, 0), 0.0).T
    carried = np.array([before])
    if len(blocks) > 1:
        carried = np.append(before, _decaying_sum(inside[:-1, -1], decay**size, before))
    inside += carried[:, None] * decay ** np.arange(1, size + 1)
    return inside.reshape(-1)[: len(values)]
