"""Costs of streaming or quantising the frozen weights of blocks: bytes, and time on the link.

Both follow from shapes, so that one trace of a step serves every choice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from longtake.config import Quantization
from longtake.errors import RecipeError
from longtake.models.quantized import frozen_linears, quantize_linears
from longtake.models.streamed import NUM_BUFFERS, look_up_weights, streamed_bytes
from longtake.planner.devices import DeviceBudget, rounded
from longtake.planner.record import BlockWeights, is_streamed, quantization_of

Floats = NDArray[np.float64]
_PASSES: Mapping[Quantization, float] = {"int8": 1, "fp8": 3, "nf4": 5}
"""How often dequantising reads or writes as many bytes as a bf16 weight has, beside its codes: int8
writes it; fp8 writes it, and reads and writes it to scale it; nf4 also writes and reads its codes
as integers."""


@dataclass(frozen=True)
class WeightCosts:
    """Costs of one treatment of frozen weights (`stream`, `int8` ...), by block: bytes or seconds.

    `work` and `seconds` come from formulas; the trace of a plan runs the layers themselves.
    """

    name: BlockWeights
    away: Floats  # bytes that the choice frees on the device
    streamed: Floats  # bytes in host memory that are copied for each pass
    work: Floats  # bytes of the largest dequantised weight
    seconds: Floats  # to dequantise all weights once


def weight_costs(
    name: BlockWeights, blocks: Sequence[nn.Module], device: DeviceBudget
) -> WeightCosts:
    """Return the costs of one treatment of these blocks' frozen weights, from shapes alone."""
    rows = [_block_costs(name, block, device) for block in blocks]
    return WeightCosts(name, *np.array(rows, dtype=np.float64).reshape(-1, 4).T)


def _block_costs(
    name: BlockWeights, block: nn.Module, device: DeviceBudget
) -> tuple[float, float, float, float]:
    if name == "keep":
        return 0, 0, 0, 0
    kind = quantization_of(name)
    # a CPU's memory is host memory, so that streaming frees nothing
    is_away = is_streamed(name) and device.target == "cuda"
    if kind is None:
        streamed = streamed_bytes(block)
        return (streamed if is_away else 0), streamed, 0, 0
    granule = device.granule
    weights = [layer.weight for layer in frozen_linears(block).values()]
    whole = sum(rounded(weight.nbytes, granule) for weight in weights)
    kept = sum(_quantized_bytes(kind, weight.shape, weight.dtype, granule) for weight in weights)
    largest = max((weight.nbytes for weight in weights), default=0)
    moved = kept + sum(_PASSES[kind] * weight.nbytes for weight in weights)
    seconds = moved / device.reached_bandwidth
    return whole - kept * (not is_away), kept * is_streamed(name), largest, seconds


def module_bytes(module: nn.Module, granule: int = 1) -> int:
    held = (*module.parameters(), *module.buffers())
    return sum(rounded(tensor.nbytes, granule) for tensor in held)


def can_quantize(kind: Quantization | None, blocks: Sequence[nn.Module]) -> bool:
    """Return true if this kind of quantisation supports the shapes of all frozen linear layers."""
    if kind is None:
        return True
    try:
        for block in blocks:
            for layer in frozen_linears(block).values():
                _quantized_bytes(kind, layer.weight.shape, layer.weight.dtype, 1)
    except RecipeError:
        return False
    return True


@cache
def _quantized_bytes(
    kind: Quantization, shape: torch.Size, dtype: torch.dtype, granule: int
) -> int:
    """Return the bytes of one quantised weight with its scales."""
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=dtype)
    host = nn.Sequential(layer.requires_grad_(False))
    quantize_linears(host, kind)
    return sum(rounded(buffer.nbytes, granule) for buffer in host.buffers())


@contextmanager
def blocks_with(
    names: Sequence[BlockWeights], blocks: Sequence[nn.Module], mode: FakeTensorMode
) -> Iterator[dict[nn.Module, int]]:
    """Let blocks of fake tensors compute with streamed or quantised weights inside the context.

    Yields the bytes of each block whose weights are streamed from host memory.
    """
    layers: list[Any] = [layer for block in blocks for layer in frozen_linears(block).values()]
    before = [(layer, layer._parameters["weight"], dict(layer._buffers)) for layer in layers]
    streamed: dict[nn.Module, int] = {}
    try:
        for name, block in zip(names, blocks, strict=True):
            if (kind := quantization_of(name)) is not None:
                _quantize_fake(block, kind, mode)
            if is_streamed(name):
                look_up_weights(block)
                streamed[block] = streamed_bytes(block)
        yield streamed
    finally:
        # Undo the new classes, weights and buffers of streamed or quantised layers.
        for layer, weight, buffers in before:
            layer.__class__ = nn.Linear
            layer._parameters["weight"] = weight
            layer._buffers = buffers


def _quantize_fake(block: nn.Module, kind: Quantization, mode: FakeTensorMode) -> None:
    layers: list[Any] = list(frozen_linears(block).values())
    for layer in layers:
        weight = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_linears(block, kind)
    with mode:
        for layer in layers:
            for key, buffer in layer.named_buffers():
                layer._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)


def buffer_bytes(streamed: Floats) -> float:
    """Return the device bytes of the two buffers that all streamed blocks' weights share.

    Each is as large as the weights of the largest streamed block.
    """
    return float(streamed.max() * min(NUM_BUFFERS, np.count_nonzero(streamed)))


def link_seconds(
    forward: Floats, backward: Floats, streamed: Floats, offloaded: Floats, link: float
) -> float:
    """Return the seconds that a step waits for copies between the device and host memory.

    Activations leave while the next block runs forward, and return while it runs backward; those of
    the last block stay. The weights of a streamed block are copied while the streamed block before
    it runs; the last two of one pass are still there when the other begins. Both directions of the
    link work at the same time; in the backward pass weights and activations share one of them.

    Args:
        forward: [blocks] seconds of the forward passes.
        backward: [blocks] seconds of the backward passes; 0 where no gradient passes.
        streamed: [blocks] bytes of weights that are copied to the device for each pass.
        offloaded: [blocks] bytes of activations that leave and return.
        link: bytes per second in each direction.
    """
    leaving = np.append(offloaded[:-1], 0) / link
    away = np.maximum(0, leaving - np.append(forward[1:], 0))
    back = np.maximum(0, leaving - np.append(backward[1:], 0)) * (backward > 0)
    copies = streamed / link
    rows = np.flatnonzero(streamed)
    waits = away.sum() + back.sum()
    # From the third streamed block on, as the first two are in the buffers.
    for before, row in pairwise(rows[1:]):
        waits += max(0.0, copies[row] - forward[before:row].sum())
    upwards = np.flatnonzero(streamed * (backward > 0))[::-1]
    for before, row in pairwise(upwards[1:]):
        # Activations that return on the same link in between, without those already waited for.
        others = leaving[row:before].sum() - back[row:before].sum()
        waits += max(0.0, copies[row] + others - backward[row + 1 : before + 1].sum())
    return float(waits)
