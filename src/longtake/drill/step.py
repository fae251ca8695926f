"""What a training step calls, for whoever tampers with it, and when that is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.models.assemble import Components
from longtake.models.losses import Examples, flow_losses
from longtake.models.precision import Precision
from longtake.parallel.mesh import World
from longtake.training import loop
from longtake.training import step as training_step
from longtake.training.step import SampleLosses, TrainingState, apply_update, compute_gradients


class Step(NamedTuple):
    """The two functions that a training step consists of, and the heart of the first."""

    compute: Callable[[TrainingState, Batch, Recipe, World], SampleLosses] = compute_gradients
    update: Callable[[TrainingState, Recipe, float, float], float] = apply_update
    losses: Callable[[Components, Examples, Precision, torch.device], Tensor] = flow_losses

    def put_in_place(self) -> None:
        """Let this process's training call these, instead of its own."""
        vars(loop).update(compute_gradients=self.compute, apply_update=self.update)
        vars(training_step).update(flow_losses=self.losses)


@dataclass
class When:
    """When harm is done."""

    at: int
    is_lasting: bool = False
    _last_step: int = -1
    _went_back: bool = False

    def is_since(self, step: int) -> bool:
        """Whether it is done in a step: from `at` on, until the process goes back."""
        self._went_back = self._went_back or step <= self._last_step
        self._last_step = step
        return step >= self.at and (self.is_lasting or not self._went_back)
