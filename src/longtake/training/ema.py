"""The running average of the weights, in fp32 and laid out over the ranks like the model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtake.models.trainable import trained_state


class Ema:
    """Exponential moving average of a model's trained parameters.

    ema <- d ema + (1 - d) weights after each update n, where d = min(decay, (1 + n) / (10 + n)):
    the ramp, as in Tensorflow's ExponentialMovingAverage, forgets the random start of a short run.
    The half-life is ln 0.5 / ln decay updates: 69 at 0.99, 693 at 0.999.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
        self._trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.averages: dict[str, Tensor] = {
            name: parameter.detach().float().clone() for name, parameter in self._trained.items()
        }

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Take in the weights after the `num_updates`-th update (counted from 1)."""
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        exact: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, weight in self._trained.items():
            average, current = _local(self.averages[name]), _local(weight.detach())
            if current.dtype == torch.float32:
                exact[0].append(average)
                exact[1].append(current)
            else:  # one at a time: fp32 copies of all of them would be twice the model
                average.lerp_(current.float(), 1 - decay)
        if exact[0]:
            torch._foreach_lerp_(*exact, 1 - decay)

    def state(self) -> dict[str, Any]:
        """The model's `trained_state` with the averages in place of the weights."""
        return trained_state(self._model) | self.averages


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory: averaging needs no other rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
