"""Statistics of training steps, and a bounded history of them for the guard; imports no torch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, TypeAdapter

from longtake import fsio
from longtake.config import GuardSection

Numbers = NDArray[np.float64]

GROUPS = ("embedding", "attention", "mlp", "added", "other")
"""Names of the groups of trained weights whose norms are measured separately."""

MAX_WINDOWS = 4
"""Number of windows (`guard.window` steps each) that a history holds, for comparisons with slow
changes."""

_MIN_RATE_SHARE = 0.01
"""Least learning rate, as a share of the largest, at which updates are measured: below it, rounding
of the weights, mostly in bf16, dominates them."""

POPULATIONS = ("captioned", "dropped")
"""Kinds of samples: with a caption, and with a dropped one. Their losses differ once a model has
learnt."""

_BLOCK, _GROWS = 8, 1.1
"""Number of steps in a block, and the growth of updates from block to block by which
`num_finding_rate` recognises an optimizer that still searches its learning rate."""

_NUM_DIGITS = 8
"""Significant digits of a float saved in a history: fp32's precision, in half the bytes of a
checkpoint."""

_VERDICT_KINDS = ("ok", "skip", "roll_back", "stop")
_COLUMNS = (
    "step",
    "kind",
    "stage",
    "bucket",
    "at_edge",
    "num_samples",
    "loss",
    "grad_norm",
    "weight_norm",
    "rate",
    "restarts",
    *(f"{each}_{what}" for each in POPULATIONS for what in ("loss", "samples", *range(4))),
    *(f"update_{group}" for group in GROUPS),
)
_INDEX = {name: number for number, name in enumerate(_COLUMNS)}
_UPDATES = slice(len(_COLUMNS) - len(GROUPS), len(_COLUMNS))


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of one training step, reduced over all ranks; floats may be NaN or infinite."""

    step: fsio.Count  # number of steps before this one
    batch: fsio.Count  # number of the step's batch in the run's data
    stage: str
    edge: str | None  # epoch or stage that begins with this batch, as text; None for others
    bucket: str  # shape of the clips, as text
    loss: float  # mean over the samples
    num_samples: fsio.Count
    # Mean loss at sigmas in [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]; NaN without a sample.
    loss_by_sigma: tuple[float, float, float, float]
    grad_norm: float  # norm for the mean loss, before clipping
    nonfinite_share: float  # fraction of the gradient's elements that are NaN or inf
    weight_norm: float  # norm of the trained weights, before this step's update
    update_ratio: float  # norm of the previous update over that of the weights; 0 without one
    learning_rate_factor: float  # rate of the previous update, in multiples of the recipe's
    num_restarts: fsio.Count = 0  # of the learning rate, by the schedule, up to that update
    # Norms and ratio by each of `GROUPS` that has trained weights.
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    group_weight_norms: dict[str, float] = field(default_factory=dict)
    group_update_ratios: dict[str, float] = field(default_factory=dict)
    # [6] of the samples with and without a caption: mean loss, number, and `loss_by_sigma`.
    captioned: tuple[float, ...] = ()  # empty: all samples count as captioned
    dropped: tuple[float, ...] = ()

    def population(self, name: str) -> tuple[float, ...]:
        """Return mean loss, number and `loss_by_sigma` [6] of samples with or without captions."""
        if self.captioned:
            return self.captioned if name == "captioned" else self.dropped
        if name == "captioned":
            return (self.loss, self.num_samples, *self.loss_by_sigma)
        return (math.nan, 0.0, *[math.nan] * 4)

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {n: _mapped(each, _to_json, list) for n, each in values.items()}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "StepStatistics":
        """Read a step's statistics that `as_dict` wrote; text such as "nan" becomes a number."""
        return _STATISTICS.validate_python(values)

    def rounded(self) -> Self:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(**{n: _mapped(each, _rounded, tuple) for n, each in values.items()})


_STATISTICS = TypeAdapter(StepStatistics)


def _mapped(value: Any, change: Callable[[Any], Any], sequence: type) -> Any:
    """Apply `change` to a number, or to each number in a dict or sequence of numbers."""
    if isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return sequence(map(change, value)) if isinstance(value, list | tuple) else change(value)


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_NUM_DIGITS}g}") if isinstance(value, float) else value


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class StepRows:
    """Statistics of training steps as rows of numbers, oldest first, for comparisons by column."""

    numbers: Numbers  # [steps, `_COLUMNS`]; read-only

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, wanted: NDArray[np.bool_] | slice) -> "StepRows":
        if not isinstance(wanted, slice) and wanted.all():
            return self  # the usual case, without a copy
        return StepRows(self.numbers[wanted])

    def append(self, more: "StepRows") -> "StepRows":
        return StepRows(np.concatenate([self.numbers, more.numbers]))

    def column(self, name: str) -> Numbers:
        return self.numbers[:, _INDEX[name]]

    def losses_by_sigma(self, population: str) -> Numbers:
        first = _INDEX[f"{population}_0"]
        return self.numbers[:, first : first + 4]

    @property
    def updates(self) -> Numbers:
        """Norm of the update before each step, divided by its learning rate: [steps, groups].

        0 where no update was made. The norm is not relative to the weights' norm, because updates
        of AdamW and Muon keep their size while weights grow.
        """
        rates = self.column("rate")[:, None]
        norms = self.numbers[:, _UPDATES] / np.where(rates > 0, rates, np.inf)
        return np.where(np.isfinite(norms), norms, 0.0)

    @property
    def have_update(self) -> NDArray[np.bool_]:
        rates = self.column("rate")
        is_measured = rates >= _MIN_RATE_SHARE * rates.max(initial=0.0)
        return is_measured & (self.updates.max(axis=1) > 0)

    @property
    def num_finding_rate(self) -> int:
        """Number of first steps in which the updates of all weight groups grew steadily.

        An optimizer that searches for its learning rate, and does not report it, starts like this,
        while no fault does. Training has not begun then: the weights are those that the run began
        with.
        """
        updates = self.updates
        # A group without trained weights has no updates.
        has_any = updates.max(axis=0, initial=0.0) > 0
        if not has_any.any() or len(updates) < 2 * _BLOCK:
            return 0
        levels = block_medians(updates[:, has_any])
        # The appended 0 ends the growth at the last block, if not before.
        least_growth = np.append((levels[1:] / np.maximum(levels[:-1], 1e-300)).min(axis=1), 0.0)
        return _BLOCK * int((least_growth <= _GROWS).argmax())

    def have_verdict(self, kind: str) -> NDArray[np.bool_]:
        return self.column("kind") == _VERDICT_KINDS.index(kind)


def medians(values: Numbers) -> Numbers:
    ordered = np.sort(values, axis=0)
    # Cannot overflow, unlike (low + high) / 2.
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return np.asarray(low + (high - low) / 2)


def block_medians(updates: Numbers) -> Numbers:
    """Return the medians [blocks, groups] of blocks of successive updates [steps, groups]."""
    blocks = len(updates) // _BLOCK
    whole = updates[: blocks * _BLOCK].reshape(blocks, _BLOCK, -1)
    return medians(whole.swapaxes(0, 1))


def _row(statistics: StepStatistics, verdict_kind: str = "ok") -> Numbers:
    """Return a training step's row [columns] of `StepRows.numbers`."""
    rate = statistics.learning_rate_factor
    return np.array(
        [
            statistics.step,
            _VERDICT_KINDS.index(verdict_kind),
            crc32(statistics.stage.encode()),  # only compared for equality
            crc32(statistics.bucket.encode()),
            statistics.edge is not None,
            statistics.num_samples,
            statistics.loss,
            statistics.grad_norm,
            statistics.weight_norm,
            rate if math.isfinite(rate) and rate > 0 else 0.0,
            statistics.num_restarts,
            *(number for each in POPULATIONS for number in statistics.population(each)),
            *(
                statistics.group_update_ratios.get(group, 0.0)
                * statistics.group_weight_norms.get(group, 0.0)
                for group in GROUPS
            ),
        ]
    )


@dataclass(frozen=True)
class JudgedStep:
    """Statistics of a training step, and the kind of the guard's verdict on it."""

    statistics: StepStatistics
    verdict_kind: str


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Turn columns of a saved history, equally long, into one dict of numbers for each step."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_columns(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Refuse a saved history whose columns differ in length, or lack a number of a step."""
    for row in _rows(columns):
        if row.get("verdict_kind") not in _VERDICT_KINDS:
            raise ValueError(f"verdict_kind: expected one of {', '.join(_VERDICT_KINDS)}")
        _STATISTICS.validate_python(row)
    if "verdict_kind" not in columns:
        raise ValueError("verdict_kind is missing")
    return columns


HistoryColumns = Annotated[dict[str, list[Any]], AfterValidator(_check_columns)]
"""Columns of a history in a checkpoint, as `History.as_json` writes them; validated."""


class History:
    """The training steps of the last `MAX_WINDOWS` windows, oldest first; immutable.

    Statistics are rounded as `as_json` writes them, so that a resumed run reaches the same verdicts
    as an uninterrupted one. Successive histories share memory, to which they only append.
    """

    def __init__(self, window: int) -> None:
        # Twice the limit, so that the rows are copied only once in `limit` steps.
        self._limit = MAX_WINDOWS * window
        self._numbers: Numbers = np.empty((2 * self._limit, len(_COLUMNS)))
        self._steps: list[JudgedStep] = []
        self._end = 0

    def append(self, step: JudgedStep) -> "History":
        """Return a new history with one more training step."""
        rounded = replace(step, statistics=step.statistics.rounded())
        longer = copy(self)
        if not self._end == len(self._steps) < len(self._numbers):
            # The memory is full, or another history has appended to it.
            longer._numbers, longer._steps = np.empty_like(self._numbers), list(self)
            longer._numbers[: len(self)], longer._end = self.rows.numbers, len(self)
        longer._steps.append(rounded)
        longer._numbers[longer._end] = _row(rounded.statistics, rounded.verdict_kind)
        longer._end += 1
        return longer

    @property
    def rows(self) -> StepRows:
        return StepRows(self._numbers[self._start : self._end])

    @property
    def _start(self) -> int:
        return max(0, self._end - self._limit)

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[JudgedStep]:
        return iter(self._steps[self._start : self._end])

    def batch_of(self, step: int) -> int | None:
        rows = (each.statistics for each in reversed(list(self)))
        return next((each.batch for each in rows if each.step == step), None)

    def as_json(self) -> dict[str, Any]:
        rows = [each.statistics.as_dict() for each in self]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        return {**columns, "verdict_kind": [each.verdict_kind for each in self]}

    @classmethod
    def from_json(cls, columns: Mapping[str, Any], window: int) -> "History":
        """Read the history that `as_json` wrote; a smaller window keeps the newest steps."""
        history = cls(window)
        for row in _rows(columns):
            kind = row.pop("verdict_kind")
            history = history.append(JudgedStep(StepStatistics.from_dict(row), kind))
        return history


class GuardSettings(GuardSection):
    """The recipe's `guard` section, plus constants that a recipe cannot set."""

    max_skips: int = 3  # skips within 16 steps of each other, after which it rolls back
    margin_batches: int = 8  # skipped on each side of the batches that the divergence came with
    progress_steps: int = 500  # without trouble, after the furthest rollback: progress


@dataclass(frozen=True)
class StepWindow:
    """A training step to judge, with the past steps that it is compared with."""

    history: History
    now: StepStatistics
    settings: GuardSettings

    @cached_property
    def row(self) -> StepRows:
        return StepRows(_row(self.now)[None])

    @cached_property
    def past(self) -> StepRows:
        """Steps since the last rollback, without those in which the optimizer sought its rate."""
        rows = self.history.rows
        found = np.flatnonzero(rows.have_verdict("roll_back"))
        rows = rows.select(slice(int(found[-1]) + 1, None)) if len(found) else rows
        return rows.select(slice(rows.num_finding_rate, None))

    @cached_property
    def same_stage(self) -> StepRows:
        same_stage = self.past.column("stage") == self.row.column("stage")
        return self.past.select(same_stage & ~self.past.have_verdict("skip"))

    @cached_property
    def same_shape(self) -> StepRows:
        return self.same_stage.select(self.same_stage.column("bucket") == self.row.column("bucket"))

    @property
    def populations(self) -> list[str]:
        """Kinds of samples (`captioned`, `dropped`) that the step has."""
        return [each for each in POPULATIONS if self.now.population(each)[1] > 0]

    @property
    def is_warm(self) -> bool:
        return len(self.same_stage) >= self.settings.warmup_steps


# --- Robust statistics ----------------------------------------------------------------------------

_SIGMAS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, in multiples of its median absolute deviation."""


def median(values: Numbers) -> float:
    return float(medians(values))


def spread(values: Numbers, center: float) -> float:
    return _SIGMAS_PER_MAD * median(np.abs(values - center))


def noise(values: Numbers) -> float:
    """Return the standard deviation of [n] successive numbers, n > 1, around their trend.

    It is estimated from differences of neighbours, whose variance is twice that of the numbers:
    while a loss falls, its spread around a single center is many times its noise.
    """
    return _SIGMAS_PER_MAD * median(np.abs(np.diff(values))) / math.sqrt(2)
