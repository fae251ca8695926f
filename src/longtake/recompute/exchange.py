"""Ranks that share tokens, where there is only one process: what arrives has its shape, no values.

A step is traced as one rank of several would run it, by the model's own code, and what that rank
sends is seen as one operation among others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longtake.parallel.context_parallel import TokenSharing


class ImaginedSharing(TokenSharing):
    """The first of so many ranks, which has most tokens if they do not divide."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self._rows: list[list[int]] = []
        self._counts: list[int] = []

    def _exchange(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived: Tensor = _exchanged(tensor.contiguous(), sent, received)
        return arrived


def sent_bytes(operation: Any, args: Sequence[Any]) -> int:
    """What the first rank sends to others, where an operation is such an exchange."""
    if operation is not torch.ops.longtake.exchange.default:
        return 0
    tensor, sent, _ = args
    return int(tensor.nbytes * (sum(sent) - sent[0]) // sum(sent))


@torch.library.custom_op("longtake::exchange", mutates_args=())
def _exchanged(tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    raise NotImplementedError("this operation has shapes, but computes nothing")


@_exchanged.register_fake
def _exchanged_shape(tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    return tensor.new_empty(sum(received), *tensor.shape[1:])


def _keep_counts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sent, ctx.received = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _exchanged(gradient.contiguous(), ctx.received, ctx.sent), None, None


_exchanged.register_autograd(_backward, setup_context=_keep_counts)
