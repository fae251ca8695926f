"""Streamed blocks: frozen weights wait in host memory and are on the device just in time.

While one block computes, the weights of the next are copied, host to device only: upwards in the
forward pass, downwards in the backward pass. Two buffers on the device take turns.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from longtake.errors import ModelError
from longtake.formatting import format_size
from longtake.models.numerics import in_backward
from longtake.models.quantized import FrozenLinear, QuantizedLinear
from longtake.parallel.transfer import CopyStream

NUM_BUFFERS = 2
_ALIGNMENT = 512
"""Alignment in bytes of CUDA's memory allocator, kept for streamed weights: products of unaligned
weights may be computed by other kernels."""


@dataclass(frozen=True)
class _Place:
    """Place of a streamed layer's tensor in its block's memory; off the device it is None."""

    held: dict[str, Any]  # the layer's parameters, or its buffers
    name: str
    like: Tensor  # on the meta device
    offset: int  # bytes, in memory of the block's
    is_parameter: bool

    @property
    def end(self) -> int:
        return self.offset + self.like.nbytes

    def within(self, memory: Tensor) -> Tensor:
        flat = memory[self.offset : self.end].view(self.like.dtype)
        return flat.view(self.like.shape)

    def put(self, view: Tensor | None) -> None:
        """Make a view of a device buffer the layer's weight, as a new Parameter.

        Assigning `data` would not last, as `Module.to` changes it.
        """
        if view is not None and self.is_parameter:
            view = nn.Parameter(view, requires_grad=False)
        self.held[self.name] = view


@dataclass(eq=False)
class _Weights:
    """The frozen weights of one streamed block, kept in host memory."""

    places: Sequence[_Place]
    host: Tensor  # [bytes] uint8; on a machine with CUDA page-locked
    views: dict[int, list[Tensor]] = field(default_factory=dict)  # in each buffer of the device

    def put(self, tensors: Sequence[Tensor | None]) -> None:
        for place, tensor in zip(self.places, tensors, strict=True):
            place.put(tensor)

    def take_away(self) -> None:
        self.put([None] * len(self.places))


@dataclass(eq=False)
class _Buffer:
    """Device buffer for the streamed weights of one block."""

    memory: Tensor
    block: int | None = None  # number of the block whose weights it holds
    copied: Any = None  # event of the copy stream after the last copy


class StreamedBlocks:
    """Streams the frozen linear layers of blocks from host memory, just before they are needed.

    Other weights stay on the device. Weights that have values are moved to host memory at once;
    those on the meta device get values within `on_host`. Until a block is called its weights are
    None. Gradients are bitwise equal to those without streaming, whether activations are kept or
    recomputed: the layers become `FrozenLinear`, which looks its weight up again in the backward
    pass, and the gradient of a block's output calls for the weights first.

    Args:
        blocks: the blocks in the order in which they run.
        device: device on which the blocks run.
        pins: page-lock the host memory, from which copies to a GPU are several times faster.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, *, pins: bool = True
    ) -> None:
        self._blocks = [
            _move_to_host(block, device if pins else torch.device("cpu")) for block in blocks
        ]
        self._device = device
        self._buffers = self._new_buffers()
        self._copies = CopyStream(device)
        self._current: int | None = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._bring, number))
            block.register_forward_hook(partial(self._after, number), with_kwargs=True)

    def _new_buffers(self) -> list[_Buffer]:
        most = max((len(each.host) for each in self._blocks), default=0)
        return [
            _Buffer(torch.empty(most, dtype=torch.uint8, device=self._device))
            for _ in range(min(NUM_BUFFERS, len(self._blocks)))
        ]

    def free_buffers(self) -> None:
        """Free the device buffers of streamed weights until a block is called again."""
        self._copies.wait(self._copies.mark())  # the first block of the next pass may be in flight
        if self._current is not None:
            self._blocks[self._current].take_away()
        for each in self._blocks:
            each.views.clear()
        self._current, self._buffers = None, []

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Put the blocks' weights in host memory into their layers, to be filled in the context."""
        for each in self._blocks:
            each.put([place.within(each.host) for place in each.places])
        yield
        for each in self._blocks:
            each.take_away()

    def _after(
        self, number: int, block: nn.Module, args: Any, given: dict[str, Any], output: Any
    ) -> None:
        """Register hooks that bring a block's weights before its backward pass begins."""
        if in_backward():
            return  # recomputed: its backward pass has begun
        # The gradient of an output arrives before the block's backward pass. A tensor that the
        # block only passes on is not its output.
        inputs = [id(each) for each in (*args, *given.values())]
        for tensor in output if isinstance(output, tuple) else (output,):
            # A layer of a text encoder returns None, too.
            if tensor is not None and tensor.requires_grad and id(tensor) not in inputs:
                tensor.register_hook(partial(self._bring, number))

    def _bring(self, number: int, *_: object) -> None:
        """Put a block's weights on the device into its layers; start to copy the next block's."""
        if number == self._current:
            return
        if self._current is not None:
            self._blocks[self._current].take_away()
        # `free_buffers` may have given them back since.
        self._buffers = self._buffers or self._new_buffers()
        # None in the first pass, after `free_buffers`, and where blocks run in another order.
        buffer = self._having(number)
        if buffer is None:
            buffer = self._copy(number, besides=None)
        self._copies.wait(buffer.copied)
        block, place = self._blocks[number], self._buffers.index(buffer)
        # Views into each buffer are made once and kept.
        if place not in block.views:
            block.views[place] = [each.within(buffer.memory) for each in block.places]
        block.put(block.views[place])
        self._current = number
        # After the last block, the backward pass begins with that same block; without gradients,
        # the next forward pass begins with the first one.
        following: int | None = number + 1
        if in_backward():
            following = number - 1 if number else None
        elif following == len(self._blocks):
            following = None if torch.is_grad_enabled() else 0
        if following is not None and self._having(following) is None:
            self._copy(following, besides=buffer)

    def _having(self, number: int) -> _Buffer | None:
        return next((each for each in self._buffers if each.block == number), None)

    def _copy(self, number: int, besides: _Buffer | None) -> _Buffer:
        """Copy a block's weights to the other device buffer, after all that was computed so far."""
        buffer = next(each for each in self._buffers if each is not besides)
        host = self._blocks[number].host
        self._copies.copy(buffer.memory[: len(host)], host)
        buffer.copied, buffer.block = self._copies.mark(), number
        return buffer


def streamed_bytes(block: nn.Module) -> int:
    """Count the bytes of a block's weights that are in host memory if it is streamed."""
    return _end(_places(block))


def layer_lists(module: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers that a module runs one after the other, such as an encoder's.

    Lists inside of a layer, and those too short to be worth streaming, are left out.
    """
    found: list[list[nn.Module]] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > NUM_BUFFERS:
            found.append(list(child))
        else:
            found += layer_lists(child)
    return found


def least_bytes(module: nn.Module, *lists: Sequence[nn.Module]) -> int:
    """Return the bytes of a module on a device if these lists of its blocks are streamed.

    Each list has buffers of its own.
    """
    num_bytes = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    for blocks in lists:
        sizes = [streamed_bytes(block) for block in blocks]
        num_bytes -= sum(sizes) - NUM_BUFFERS * max(sizes, default=0)
    return num_bytes


def look_up_weights(block: nn.Module) -> None:
    """Turn a block's frozen linear layers into `FrozenLinear`, whose weights can be streamed."""
    for layer in _frozen_linears(block):
        if type(layer) is nn.Linear:
            layer.__class__ = FrozenLinear


def _frozen_linears(block: nn.Module) -> Iterator[nn.Linear]:
    for layer in block.modules():
        is_plain = type(layer) in (nn.Linear, FrozenLinear)
        if isinstance(layer, QuantizedLinear) or (is_plain and not layer.weight.requires_grad):
            yield layer  # type: ignore[misc]


def _places(block: nn.Module) -> list[_Place]:
    places: list[_Place] = []
    for layer in _frozen_linears(block):
        is_plain = not isinstance(layer, QuantizedLinear)
        held: Any = layer._parameters if is_plain else layer._buffers
        # All buffers of a quantised layer are streamed; of a plain layer the weight, not the bias.
        for name in ["weight"] if is_plain else held:
            offset = -(-_end(places) // _ALIGNMENT) * _ALIGNMENT
            like = held[name].detach().to("meta")
            places.append(_Place(held, name, like, offset, is_parameter=is_plain))
    return places


def _end(places: Sequence[_Place]) -> int:
    return places[-1].end if places else 0


def _move_to_host(block: nn.Module, device: torch.device) -> _Weights:
    places = _places(block)
    weights = _Weights(places, _host_memory(_end(places), device))
    for place in places:
        tensor = place.held[place.name]
        if not tensor.is_meta:
            place.within(weights.host).copy_(tensor)
    look_up_weights(block)
    weights.take_away()
    return weights


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate page-locked memory of this size; torch's own allocator rounds to a power of 2."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda" and num_bytes:
        address = memory.data_ptr()
        try:
            pin_memory(address, num_bytes)
        except RuntimeError as error:
            raise ModelError(
                f"{format_size(num_bytes)} of the computer's memory, for the weights of a streamed "
                f"block, cannot be page-locked: {error} Raise the limit (ulimit -l) or free "
                'memory, or set model.stream = "none".'
            ) from error
        # Not at exit, when CUDA may have shut down; the system then unlocks the memory itself.
        weakref.finalize(memory, unpin_memory, address).atexit = False
    return memory
