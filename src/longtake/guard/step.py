"""A step that is judged, and the steps that it can be compared with."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longtake.config import GuardSection
from longtake.guard.history import History
from longtake.guard.rows import Rows, row_of
from longtake.guard.statistics import Statistics


@dataclass(frozen=True)
class Step:
    """The case before the judge."""

    history: History
    now: Statistics
    section: GuardSection

    @cached_property
    def row(self) -> Rows:
        """The step itself, as a row."""
        return Rows(row_of(self.now)[None])

    @cached_property
    def before(self) -> Rows:
        """The steps before; only those after a roll-back that was no more than reported."""
        rows = self.history.rows
        found = np.flatnonzero(rows.are("roll_back"))
        return rows.where(slice(int(found[-1]) + 1, None)) if len(found) else rows

    @cached_property
    def alike(self) -> Rows:
        """Those of the same stage whose updates were made."""
        same_stage = self.before.column("stage") == self.row.column("stage")
        return self.before.where(same_stage & ~self.before.are("skip"))

    @cached_property
    def of_same_shape(self) -> Rows:
        """Those of them with clips of the same shape."""
        return self.alike.where(self.alike.column("bucket") == self.row.column("bucket"))

    @property
    def is_warm(self) -> bool:
        """Whether there are enough of them to compare with."""
        return len(self.alike) >= self.section.warmup_steps
