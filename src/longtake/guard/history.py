"""The steps before, as the guard remembers them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Required

import numpy as np
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from longtake.fsio import Count, NumberOrText
from longtake.guard.rows import NUM_COLUMNS, Numbers, Rows, row_of
from longtake.guard.statistics import Statistics

WINDOWS = 4
"""Windows that are remembered: what changes slowly is compared with all of them."""


@dataclass(frozen=True)
class Judged:
    """One past step, and the kind of its verdict."""

    statistics: Statistics
    verdict_kind: str


_Floats = list[NumberOrText]
_Groups = list[dict[str, NumberOrText]]


class Columns(TypedDict, total=False):
    """What `History.as_json` returns."""

    step: list[Count]
    batch: list[Count]
    stage: list[str]
    edge: list[str | None]
    bucket: list[str]
    loss: _Floats
    num_samples: list[Count]
    loss_by_sigma: list[Annotated[_Floats, Field(min_length=4, max_length=4)]]
    grad_norm: _Floats
    nonfinite_share: _Floats
    weight_norm: _Floats
    update_ratio: _Floats
    learning_rate_factor: _Floats
    group_grad_norms: _Groups
    group_weight_norms: _Groups
    group_update_ratios: _Groups
    verdict_kind: Required[list[str]]


def _is_table(columns: Columns) -> Columns:
    """Check that all columns are there, unless there are no steps, and have the same length."""
    lengths = {len(each) for each in columns.values()}  # type: ignore[arg-type]
    if len(lengths) > 1 or (lengths != {0} and len(columns) != len(Columns.__annotations__)):
        raise ValueError("expected columns of the same length for each number of a step")
    return columns


HistoryColumns = Annotated[Columns, AfterValidator(_is_table)]


class _Tape:
    """Rows to which only more are added, so that the histories of a run can share them."""

    def __init__(self, capacity: int) -> None:
        self.numbers: Numbers = np.empty((capacity, NUM_COLUMNS))
        self.judged: list[Judged] = []


class History:
    """The last steps, at most four windows of them, the oldest first; never changed.

    What it remembers of a step is rounded to what `as_json` keeps, so that a run that was resumed
    judges as one that never stopped.

    Args:
        window: of the recipe's guard section, in steps.
    """

    def __init__(self, window: int) -> None:
        self._limit = WINDOWS * window
        self._tape = _Tape(2 * self._limit)
        self._end = 0

    def with_(self, judged: Judged) -> "History":
        """Another history, with one more step."""
        rounded = replace(judged, statistics=judged.statistics.rounded())
        tape, end = self._tape_to_add_to()
        tape.judged.append(rounded)
        tape.numbers[end] = row_of(rounded.statistics, rounded.verdict_kind)
        longer = History.__new__(History)
        longer._limit, longer._tape, longer._end = self._limit, tape, end + 1
        return longer

    def _tape_to_add_to(self) -> tuple[_Tape, int]:
        """This tape, or a copy of what matters of it where it is full or goes on otherwise."""
        if self._end == len(self._tape.judged) < len(self._tape.numbers):
            return self._tape, self._end
        tape = _Tape(2 * self._limit)
        tape.judged = list(self)
        tape.numbers[: len(self)] = self.rows.numbers
        return tape, len(self)

    @property
    def rows(self) -> Rows:
        """The steps as numbers."""
        return Rows(self._tape.numbers[self._start : self._end])

    @property
    def _start(self) -> int:
        return max(0, self._end - self._limit)

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[Judged]:
        return iter(self._tape.judged[self._start : self._end])

    def batch_of(self, step: int) -> int | None:
        """Number of the batch that a step was made of; None where it is not remembered."""
        rows = (each.statistics for each in reversed(list(self)))
        return next((each.batch for each in rows if each.step == step), None)

    def as_json(self) -> dict[str, Any]:
        """For checkpoints: a list for each number, and in them an item for each step."""
        rows = [each.statistics.as_dict() for each in self]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        return {**columns, "verdict_kind": [each.verdict_kind for each in self]}

    @classmethod
    def from_json(cls, columns: Mapping[str, Any], window: int) -> "History":
        """The history that `as_json` was made of, or as much of it as this window wants."""
        history = cls(window)
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            kind = row.pop("verdict_kind")
            history = history.with_(Judged(Statistics.from_dict(row), kind))
        return history
