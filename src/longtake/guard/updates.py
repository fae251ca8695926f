"""Whether the updates of some weights have become larger: there a wrong learning rate shows first.

They are measured by group, at a full learning rate: whatever the schedule, AdamW's and Muon's keep
their size. Relative to the weights they would shrink as those grow.
"""

import math
from dataclasses import dataclass

import numpy as np

from longtake.guard.robust import medians
from longtake.guard.statistics import GROUPS
from longtake.guard.step import Step

_LEAST = 16
"""Earlier updates that say what is usual."""
_NEWEST = 64
"""Of them: in the hundreds of steps after a start Adam's updates may shrink to a fifth."""
_MOST = 128
"""As many of all of them say it as well as all do, and are sorted sooner."""


@dataclass(frozen=True)
class Growth:
    """A group whose updates are too large."""

    group: str
    recent: float
    """Median norm of the last updates."""
    usual: float
    """Of those before: the newest or all, whichever is less."""
    began: int
    """The last step before which they were not."""

    def __str__(self) -> str:
        return (
            f"The updates of the {self.group} weights are {self.recent / self.usual:.3g} times as "
            f"large as usual: norm {self.recent:.3g} instead of {self.usual:.3g}, the schedule "
            "left aside."
        )


def growth(step: Step, num_recent: int, least_factor: float) -> Growth | None:
    """The group whose last updates have grown most, if any has by more than this factor."""
    rows = step.alike.and_(step.row)
    rows = rows.where(rows.are_updated)
    past = len(rows) - num_recent
    if past < _LEAST:
        return None
    recent, before = medians(rows.updates[past:]), rows.updates[:past]
    usual = np.minimum(medians(before[-_NEWEST:]), medians(before[:: max(1, past // _MOST)]))
    factors = recent / np.where(usual > 0, usual, np.inf)
    group = int(factors.argmax())
    if factors[group] <= least_factor:
        return None
    halfway = math.sqrt(recent[group]) * math.sqrt(usual[group])
    normal = np.flatnonzero(rows.updates[:, group] <= halfway)
    began = int(rows.column("step")[normal[-1]])
    return Growth(GROUPS[group], float(recent[group]), float(usual[group]), began)
