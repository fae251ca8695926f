"""Steps as rows of numbers, for comparisons with many of them at once."""

import math
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from longtake.guard.statistics import GROUPS, Statistics

Numbers = NDArray[np.float64]

LEAST_FACTOR = 0.01
"""Updates at a smaller share of the learning rate say nothing: they drown in the rounding of the
weights, in bf16 above all."""

_KINDS = ("ok", "skip", "roll_back", "stop")
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
    *(f"loss_{quarter}" for quarter in range(4)),
    *(f"update_{group}" for group in GROUPS),
)
_INDEX = {name: number for number, name in enumerate(_COLUMNS)}
_QUARTERS = slice(_INDEX["loss_0"], _INDEX["loss_0"] + 4)
_UPDATES = slice(_INDEX["loss_0"] + 4, len(_COLUMNS))
NUM_COLUMNS = len(_COLUMNS)


@dataclass(frozen=True)
class Rows:
    """Some steps, the oldest first."""

    numbers: Numbers
    """[steps, NUM_COLUMNS]; not to be written to."""

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, wanted: NDArray[np.bool_] | slice) -> "Rows":
        """Those of them that are wanted."""
        if not isinstance(wanted, slice) and wanted.all():
            return self  # most often, and for nothing
        return Rows(self.numbers[wanted])

    def and_(self, more: "Rows") -> "Rows":
        """These and then those."""
        return Rows(np.concatenate([self.numbers, more.numbers]))

    def column(self, name: str) -> Numbers:
        """One number of each step."""
        return self.numbers[:, _INDEX[name]]

    @property
    def losses_by_sigma(self) -> Numbers:
        """[steps, 4] NaN where no sample had such a noise level."""
        return self.numbers[:, _QUARTERS]

    @property
    def updates(self) -> Numbers:
        """[steps, groups] norms of the updates before each step, at a full learning rate.

        0 where there was no update, or one that is too small to be measured.
        """
        return self.numbers[:, _UPDATES]

    @property
    def are_updated(self) -> NDArray[np.bool_]:
        """[steps] whether there was an update before each: not where a step was skipped."""
        found: NDArray[np.bool_] = self.updates.max(axis=1) > 0
        return found

    def are(self, verdict_kind: str) -> NDArray[np.bool_]:
        """[steps] whether each had a verdict of this kind."""
        found: NDArray[np.bool_] = self.column("kind") == _KINDS.index(verdict_kind)
        return found


def row_of(statistics: Statistics, verdict_kind: str = "ok") -> Numbers:
    """[NUM_COLUMNS] the numbers of one step."""
    return np.array(
        [
            statistics.step,
            _KINDS.index(verdict_kind),
            crc32(statistics.stage.encode()),  # to be compared, whatever was seen before
            crc32(statistics.bucket.encode()),
            statistics.edge is not None,
            statistics.num_samples,
            statistics.loss,
            statistics.grad_norm,
            statistics.weight_norm,
            *statistics.loss_by_sigma,
            *(_update(statistics, group) for group in GROUPS),
        ]
    )


def _update(statistics: Statistics, group: str) -> float:
    """The norm that an optimizer's update had, for a learning rate factor of 1."""
    # Not relative to the weights: they may grow, where AdamW's and Muon's updates stay as large.
    if statistics.learning_rate_factor < LEAST_FACTOR:
        return 0.0
    ratio = statistics.group_update_ratios.get(group, 0.0)
    weight = statistics.group_weight_norms.get(group, 0.0)
    norm = ratio * weight / statistics.learning_rate_factor
    return norm if math.isfinite(norm) else 0.0
