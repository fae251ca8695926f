"""The rows of a run's metrics, those of abandoned steps among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longtake.fsio import read_records
from longtake.run_dir import Metrics, RunDirectory


@dataclass(frozen=True)
class Row:
    """One line of metrics.jsonl."""

    metrics: Metrics
    is_abandoned: bool
    """Whether the run went back to before this step, after it."""

    @property
    def step(self) -> int:
        """Steps that were done with this one."""
        return self.metrics["step"]

    @property
    def batch(self) -> int:
        """Number of its batch in the run's data; an older longtake never skipped any."""
        return self.metrics.get("batch", self.step - 1)


def read_rows(run: RunDirectory) -> list[Row]:
    """All rows, in the order in which they were written."""
    found: list[Metrics] = read_records(run.metrics_path, Metrics)
    lowest = _given_up_since(run, found[-1]) if found else math.inf
    rows: list[Row] = []
    for metrics in reversed(found):
        rows.append(Row(metrics, metrics["step"] >= lowest))
        lowest = min(lowest, metrics["step"])
    return rows[::-1]


def _given_up_since(run: RunDirectory, last: Metrics) -> float:
    """The first step that was given up although none was trained since; infinite: there is none.

    It is told by steps, not by times: clocks may be set back.
    """
    rollbacks = run.rollbacks()
    if rollbacks and "verdict" in last and last["step"] == rollbacks[-1]["from_step"]:
        return rollbacks[-1]["to_step"] + 1
    return math.inf


def passes(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each time that the run went forward; one more than it went back."""
    found: list[list[Row]] = []
    for row in rows:
        if found and row.step > found[-1][-1].step:
            found[-1].append(row)
        else:
            found.append([row])
    return found
