"""Statistics of training steps and a bounded history of them. Without torch."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Required, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from longtake import fsio
from longtake.config import GuardSection

Numbers = NDArray[np.float64]

GROUPS = ("embedding", "attention", "mlp", "added", "other")
"""Parts of a model whose trained weights are measured separately."""

MAX_WINDOWS = 4
"""Windows that a history holds: slow changes are compared with all of them."""

_MIN_RATE_SHARE = 0.01
"""Updates at a smaller share of the largest rate are not measured: rounding of the weights
dominates, most in bf16."""

POPULATIONS = ("captioned", "dropped")
"""Samples with a caption and without one: a model that has learnt has other losses on each."""

_BLOCK, _GROWS = 8, 1.1
"""Updates of a block, and the growth from each block to the next of a rate that is being found."""

_NUM_DIGITS = 8
"""Significant digits kept of a float: the precision of fp32, and half the bytes in checkpoints."""

_TEXT_FIELDS = ("stage", "edge", "bucket")
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
    *(f"{each}_{what}" for each in POPULATIONS for what in ("loss", "samples", *range(4))),
    *(f"update_{group}" for group in GROUPS),
)
_INDEX = {name: number for number, name in enumerate(_COLUMNS)}
_UPDATES = slice(len(_COLUMNS) - len(GROUPS), len(_COLUMNS))


@dataclass(frozen=True)
class StepStatistics:
    """Numbers of one step, reduced over all ranks; any float may be NaN or infinite."""

    step: int  # number of steps before this one
    batch: int  # number of its batch in the run's data
    stage: str
    edge: str | None  # what begins with this batch: "epoch 3 of stage all begins"
    bucket: str  # shape of its clips, as text
    loss: float  # mean over the samples
    num_samples: int
    # Mean loss at sigmas in [0, 1/4), [1/4, 1/2), [1/2, 3/4) and [3/4, 1]; NaN without a sample.
    loss_by_sigma: tuple[float, float, float, float]
    grad_norm: float  # of the mean loss, before clipping
    nonfinite_share: float  # fraction of the gradient's elements that are NaN or inf
    weight_norm: float  # of the trained weights, before this step's update
    update_ratio: float  # norm of the previous update over that of the weights; 0 without one
    learning_rate_factor: float  # the rate of the previous update, in multiples of the recipe's
    # The same norms and ratio for each of `GROUPS` that has trained weights.
    group_grad_norms: dict[str, float] = field(default_factory=dict)
    group_weight_norms: dict[str, float] = field(default_factory=dict)
    group_update_ratios: dict[str, float] = field(default_factory=dict)
    # Of the samples with a caption: mean loss, number, and `loss_by_sigma`; and of those without.
    captioned: tuple[float, ...] = ()  # empty: those of all samples
    dropped: tuple[float, ...] = ()

    def population(self, name: str) -> tuple[float, ...]:
        """[6] mean loss, number of samples, and mean loss at the four ranges of sigmas."""
        if self.captioned:
            return self.captioned if name == "captioned" else self.dropped
        if name == "captioned":
            return (self.loss, self.num_samples, *self.loss_by_sigma)
        return (math.nan, 0.0, *[math.nan] * 4)

    def as_dict(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {n: _mapped(each, _to_json, list) for n, each in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        numbers = values.keys() - set(_TEXT_FIELDS)
        return cls(**{**values, **{n: _mapped(values[n], _from_json, tuple) for n in numbers}})

    def rounded(self) -> Self:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(**{n: _mapped(each, _rounded, tuple) for n, each in values.items()})


def _mapped(value: Any, change: Callable[[Any], Any], sequence: type) -> Any:
    """The value with each number in it changed, and each sequence of this type."""
    if isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return sequence(map(change, value)) if isinstance(value, list | tuple) else change(value)


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_NUM_DIGITS}g}") if isinstance(value, float) else value


def _to_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class StepRows:
    """Steps as rows of numbers, oldest first, to compare one with many."""

    numbers: Numbers  # [steps, columns]; read-only

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, wanted: NDArray[np.bool_] | slice) -> "StepRows":
        if not isinstance(wanted, slice) and wanted.all():
            return self  # the usual case; saves a copy
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
        """[steps, groups] norms of the update before each step, divided by its rate.

        0 if no update was made. Not relative to the weights: while they grow, AdamW's and Muon's
        updates keep their size.
        """
        rates = self.column("rate")[:, None]
        norms = self.numbers[:, _UPDATES] / np.where(rates > 0, rates, np.inf)
        return np.where(np.isfinite(norms), norms, 0.0)

    @property
    def have_update(self) -> NDArray[np.bool_]:
        rates = self.column("rate")
        is_measured = rates >= _MIN_RATE_SHARE * rates.max(initial=0.0)
        found: NDArray[np.bool_] = is_measured & (self.updates.max(axis=1) > 0)
        return found

    @property
    def num_finding_rate(self) -> int:
        """Number of the first steps whose updates only ever grew, in all groups together.

        An optimizer that finds its rate and does not report it begins so. No fault does, and the
        weights are still those that the run began with: training has not begun.
        """
        updates = self.updates
        has_any = updates.max(axis=0, initial=0.0) > 0
        if not has_any.any() or len(updates) < 2 * _BLOCK:
            return 0
        levels = block_medians(updates[:, has_any])
        least_growth = np.append((levels[1:] / np.maximum(levels[:-1], 1e-300)).min(axis=1), 0.0)
        return _BLOCK * int((least_growth <= _GROWS).argmax())

    def have_verdict(self, kind: str) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.column("kind") == _VERDICT_KINDS.index(kind)
        return found


def medians(values: Numbers) -> Numbers:
    ordered = np.sort(values, axis=0)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return np.asarray(low + (high - low) / 2)


def block_medians(updates: Numbers) -> Numbers:
    """[blocks, groups] the median of each block of successive updates [steps, groups]."""
    blocks = len(updates) // _BLOCK
    whole = updates[: blocks * _BLOCK].reshape(blocks, _BLOCK, -1)
    return medians(whole.swapaxes(0, 1))


def _row(statistics: StepStatistics, verdict_kind: str = "ok") -> Numbers:
    """[columns] the numbers of one step."""
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
    statistics: StepStatistics
    verdict_kind: str


_Floats = list[fsio.NumberOrText]
_Groups = list[dict[str, fsio.NumberOrText]]


class _Columns(TypedDict, total=False):
    step: list[fsio.Count]
    batch: list[fsio.Count]
    stage: list[str]
    edge: list[str | None]
    bucket: list[str]
    loss: _Floats
    num_samples: list[fsio.Count]
    loss_by_sigma: list[Annotated[_Floats, Field(min_length=4, max_length=4)]]
    grad_norm: _Floats
    nonfinite_share: _Floats
    weight_norm: _Floats
    update_ratio: _Floats
    learning_rate_factor: _Floats
    group_grad_norms: _Groups
    group_weight_norms: _Groups
    group_update_ratios: _Groups
    captioned: list[_Floats]
    dropped: list[_Floats]
    verdict_kind: Required[list[str]]


def _require_equal_lengths(columns: _Columns) -> _Columns:
    """Refuse columns of different lengths, and missing ones unless there are no steps."""
    lengths = {len(each) for each in columns.values()}  # type: ignore[arg-type]
    missing = _Columns.__annotations__.keys() - columns.keys() - set(POPULATIONS)  # came later
    if len(lengths) > 1 or (lengths != {0} and missing):
        raise ValueError("expected columns of the same length for each number of a step")
    return columns


HistoryColumns = Annotated[_Columns, AfterValidator(_require_equal_lengths)]
"""Columns of `History.as_json`."""


class History:
    """The last four windows of steps, oldest first; immutable.

    Statistics are rounded as `as_json` keeps them, so that a resumed run comes to the same
    verdicts as an uninterrupted one. Successive histories share their steps and rows, which are
    only appended to.
    """

    def __init__(self, window: int) -> None:
        self._limit = MAX_WINDOWS * window
        self._numbers: Numbers = np.empty((2 * self._limit, len(_COLUMNS)))
        self._steps: list[JudgedStep] = []
        self._end = 0

    def append(self, step: JudgedStep) -> "History":
        """A new history with one more step."""
        rounded = replace(step, statistics=step.statistics.rounded())
        longer = copy(self)
        if not self._end == len(self._steps) < len(self._numbers):
            # It is full, or another history was appended to it.
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
        """Inverse of `as_json`; a smaller window keeps the newest steps."""
        history = cls(window)
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            kind = row.pop("verdict_kind")
            history = history.append(JudgedStep(StepStatistics.from_dict(row), kind))
        return history


class GuardSettings(GuardSection):
    """The recipe's `guard`, and constants."""

    max_skips: int = 3  # updates, each within 16 steps of the one before; then it rolls back
    margin_batches: int = 8  # skipped on each side of those that the divergence came with
    progress_steps: int = 500  # without trouble, beyond the furthest one that was rolled back


@dataclass(frozen=True)
class StepWindow:
    """A step and the past steps that it is compared with."""

    history: History
    now: StepStatistics
    settings: GuardSettings

    @cached_property
    def row(self) -> StepRows:
        return StepRows(_row(self.now)[None])

    @cached_property
    def past(self) -> StepRows:
        """Steps since the last rollback, and since the optimizer has found its rate."""
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
        """Those that the step has samples of."""
        return [each for each in POPULATIONS if self.now.population(each)[1] > 0]

    @property
    def is_warm(self) -> bool:
        return len(self.same_stage) >= self.settings.warmup_steps
