"""Counts a model's floating-point operations without running it."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


def count_flops(module: nn.Module, inputs: Mapping[str, object]) -> int:
    """Return the floating-point operations of one forward pass (a multiply-add is two).

    Matrix products, convolutions and attention count; elementwise work does not. Weights and inputs
    are replaced by shapes without memory, so the size of the model does not matter, nothing is
    computed and the module is left as it was. On a real CPU device torch's counter would miss
    fused attention.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    weights = {name: tensor.detach().to("meta") for name, tensor in named}
    shapes = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        functional_call(module, weights, kwargs=shapes)
    return int(counter.get_total_flops())


def training_flops(forward: int, *, trains_all: bool = True) -> int:
    """Return the operations of a training step: three times the forward pass's.

    The backward pass forms two products for each one of the forward pass: the gradients of the
    inputs and of the weights. Where nearly all weights are frozen (LoRA, an added module), the
    second is left out: twice. Recomputed activations are left out on purpose: they are not
    progress, and utilisation (MFU) must not rise with them.
    """
    return (3 if trains_all else 2) * forward
