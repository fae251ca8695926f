"""Holds the prediction of a step's memory against what the step really takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longtake.config import Bucket
from longtake.data.batch import Batch
from longtake.recompute.measure import measured


@dataclass(frozen=True)
class PeakComparison:
    """The most that forward and backward pass took beside the weights, in bytes."""

    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """How much too high the prediction was, as a share."""
        return self.predicted_bytes / self.measured_bytes - 1


class PeakCheck:
    """Measures one step of a launch: not its first, in which libraries take what they keep.

    Args:
        predicted_bytes: of forward and backward pass, beside the weights; None: nothing to check.
        bucket: the shape of clips that this was predicted for.
        device: that is trained on.
    """

    def __init__(self, predicted_bytes: int | None, bucket: Bucket, device: torch.device) -> None:
        self._predicted_bytes = predicted_bytes
        self._bucket = bucket
        self._device = device
        self._is_first_step = True
        self.comparison: PeakComparison | None = None
        """There after the step that was measured, until the next one."""

    @contextmanager
    def of_step(self, batch: Batch) -> Iterator[None]:
        """Runs a forward and backward pass, and measures it if it is the one."""
        self.comparison, is_first = None, self._is_first_step
        self._is_first_step = False
        if self._predicted_bytes is None or is_first or batch.bucket != self._bucket:
            yield
            return
        with measured(self._device) as memory:
            yield
        self.comparison = PeakComparison(self._predicted_bytes, max(1, memory.peak_bytes))
        self._predicted_bytes = None
