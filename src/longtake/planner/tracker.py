"""Counts the memory of the tensors of a traced step, and predicts the time of its operations."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from longtake.planner import kernels
from longtake.planner.block_weights import Floats, buffer_bytes
from longtake.planner.devices import DeviceBudget, rounded
from longtake.planner.fake_tensors import sent_bytes

# An operation takes as long as its arithmetic or its memory traffic, whichever is longer: a
# roofline (Williams, Waterman and Patterson, 2009), with the shares of a data sheet's figures that
# `DeviceBudget` has.
_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_FORMULAS = {
    **flop_registry,  # knows formulas of CUDA's attention only
    _aten._int_mm: flop_registry[_aten.mm],
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}

_MASK_AT = {
    _aten._scaled_dot_product_efficient_attention: 3,
    _aten._scaled_dot_product_efficient_attention_backward: 4,
}
"""Place of the mask among the arguments of CUDA's kernel of attention that takes one."""


@dataclass(frozen=True)
class Span:
    """One section of a traced step, such as a block's forward pass: its memory and seconds."""

    begin_bytes: int
    end_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class StepSection:
    """One section of a traced step, from a mark to the next; `name` is that of its end."""

    name: str
    span: Span
    sent_bytes: int = 0  # to ranks that share a clip's tokens, all-to-all
    ring_bytes: int = 0  # to such ranks, around a ring
    attention: tuple[float, ...] = ()  # seconds of each attention operation, included in `span`

    def moved(self, num_bytes: int, name: str | None = None) -> "StepSection":
        """Return an equal section that begins with more allocated bytes."""
        span = Span(
            self.span.begin_bytes + num_bytes,
            self.span.end_bytes + num_bytes,
            self.span.peak_bytes + num_bytes,
            self.span.seconds,
        )
        return replace(self, name=self.name if name is None else name, span=span)

    def is_like(self, other: "StepSection") -> bool:
        """Return whether both sections took the same memory above their begin, and time."""
        return self.moved(-self.span.begin_bytes, "") == other.moved(-other.span.begin_bytes, "")


class MemoryTracker:
    """Counts bytes of tensors from allocation to release, and the predicted time of operations.

    A storage belongs to the `owner` that is set when it is first counted, such as a block; the
    storages of an owner can be counted several times (`repeat`).
    """

    def __init__(self, device: DeviceBudget) -> None:
        self.current_bytes = 0
        self.marks: list[StepSection] = []
        self.owner: object = None
        on_cuda = device.target == "cuda"
        self._device = device
        self._granule = device.granule
        self._workspace_bytes = (
            kernels.cuda_workspace_bytes if on_cuda else kernels.cpu_workspace_bytes
        )
        self._sizes: dict[int, tuple[int, Any, object]] = {}  # bytes, weak reference, owner
        self._owned: Counter[object] = Counter()
        self._repeats: Counter[object] = Counter()
        self._begin_bytes = self._peak_bytes = 0
        self._seconds = 0.0
        self._sent_bytes = self._ring_bytes = 0
        self._attention: list[float] = []
        # Storages of weights whose casts take no memory, as they come in that type.
        self._uncast: set[int] = set()

    def ignore_casts_of(self, weights: Iterable[Tensor]) -> None:
        self._uncast = {weight.untyped_storage()._cdata for weight in weights}

    def count_module(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self.count(tensor)

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor's storage, once, until it is released."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            size, owner = rounded(storage.nbytes(), self._granule), self.owner
            # A weak reference: the tracker must not keep storages alive.
            gone = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = size, gone, owner
            self._owned[owner] += size
            self.hold(size * (1 + self._repeats[owner]))

    def give(self, values: Iterable[Tensor], owner: object) -> None:
        """Let the storages of these tensors belong to an owner from now on."""
        for tensor in values:
            key = tensor.untyped_storage()._cdata
            if key in self._sizes:
                size, gone, before = self._sizes[key]
                self._owned[before] -= size
                self._owned[owner] += size
                self._sizes[key] = size, gone, owner

    def owned_bytes(self, owner: object) -> int:
        """Return the bytes of an owner's storages that are allocated now, each counted once."""
        return self._owned[owner]

    def repeat(self, owner: object, times: int) -> None:
        """Count the storages of an owner so many times more from now on, in place of before."""
        self.hold((times - self._repeats[owner]) * self._owned[owner])
        self._repeats[owner] = times

    def begin(self) -> int:
        """Start to measure a section of a step; return the bytes that are allocated."""
        self._begin_bytes = self._peak_bytes = self.current_bytes
        return self.current_bytes

    def continue_from(self, num_bytes: int) -> None:
        """Let the section that has just begun begin with this number of allocated bytes."""
        self._begin_bytes = num_bytes
        self._peak_bytes = max(num_bytes, self.current_bytes)

    def is_idle_at(self, num_bytes: int) -> bool:
        """Return whether no operation ran since the last mark, with this number of bytes."""
        return (self.current_bytes, self._seconds) == (num_bytes, 0.0)

    def hold(self, num_bytes: int) -> None:
        """Add bytes that belong to no tensor to the counted memory, or subtract them."""
        self.current_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.current_bytes)

    def hold_streamed(self, streamed: Floats) -> None:
        """Count the buffers of streamed weights; on a GPU, subtract the weights [blocks]."""
        if self._device.target == "cuda":
            self.hold(-int(streamed.sum()))
        self.hold(int(buffer_bytes(streamed)))

    def mark(self, name: str) -> None:
        """End the section of the step that is measured, under this name, and start the next."""
        span = Span(self._begin_bytes, self.current_bytes, self._peak_bytes, self._seconds)
        counts = self._sent_bytes, self._ring_bytes, tuple(self._attention)
        self.marks.append(StepSection(name, span, *counts))
        self.begin()
        self._seconds, self._sent_bytes, self._ring_bytes = 0.0, 0, 0
        self._attention.clear()

    def observe(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Count the results, workspace and time of one operation of the traced step."""
        if func is _CAST and args[0].untyped_storage()._cdata in self._uncast:
            self._seconds += seconds(func, args, kwargs, result, self._device)
            return
        made = tensors(result)
        before = self.current_bytes
        for tensor in made:
            self.count(tensor)
        # A view takes neither memory nor time.
        if func.is_view:
            return
        exchanged, around = sent_bytes(func, args)
        self._sent_bytes += exchanged
        self._ring_bytes += around
        extra = self._workspace_bytes(func, args, made)
        # A workspace is freed before the operation returns, so it counts in the peak alone.
        self._peak_bytes = max(self._peak_bytes, self.current_bytes + extra)
        # Other operations only read metadata.
        if self.current_bytes > before or func._schema.is_mutable:
            taken = seconds(func, args, kwargs, result, self._device)
            self._seconds += taken
            if _is_attention(func):
                self._attention.append(taken)

    def _forget(self, key: int) -> None:
        size, _, owner = self._sizes.pop(key)
        self._owned[owner] -= size
        self.current_bytes -= size * (1 + self._repeats[owner])


def seconds(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, device: DeviceBudget
) -> float:
    """Predict the seconds of one operation that creates or changes a tensor."""
    packet = operation.overloadpacket if hasattr(operation, "overloadpacket") else operation
    touched = [tensor for value in (*args, *kwargs.values()) for tensor in tensors(value)]
    moved = sum(tensor.numel() * tensor.itemsize for tensor in (*touched, *tensors(result)))
    traffic = moved / device.reached_bandwidth
    formula = _FORMULAS.get(packet)
    if formula is None:
        return traffic
    share = device.share_of_products
    if _is_attention(packet):
        is_masked = packet in _MASK_AT and args[_MASK_AT[packet]] is not None
        share = device.share_of_masked_attention if is_masked else device.share_of_attention
    # torch's formulas take longer than the operations of a trace, which are few and repeat.
    key = packet, *map(_shape, (*args, *kwargs.items(), result))
    if key not in _COUNTS:
        _COUNTS[key] = float(formula(*args, **kwargs, out_val=result))
    count = _COUNTS[key]
    is_convolution = "convolution" in str(packet)
    rate = (device.convolution_flops if is_convolution else device.flops)(touched[0].dtype)
    return max(traffic, count / (rate * share))


_COUNTS: dict[tuple[Any, ...], float] = {}
"""Floating-point operations of an operation by its name and the shapes of arguments and results."""


def _shape(value: Any) -> Any:
    """Return what a formula of floating-point operations may read of an argument."""
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, list | tuple) else value


def _is_attention(operation: Any) -> bool:
    return "attention" in str(operation)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operation's result or argument, which may be a sequence."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Iterable):
        return [each for each in value if isinstance(each, Tensor)]
    return []
