"""What torch's CPU kernels allocate for themselves, and free before they return.

Measured with the profiler's allocator events on torch 2.13, exact to the byte there. oneDNN's own
scratchpads (bf16 products, convolutions) follow the processor and have no formula: without it, by
`torch.backends.mkldnn.flags(enabled=False)`, nothing is missing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longtake.recompute.upstream import in_backward

_FP32_BYTES = 4
_RANDOM_STATE_BYTES = torch.get_rng_state().nbytes
_aten = torch.ops.aten


def workspace_bytes(operation: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Bytes that a CPU kernel takes beside its results."""
    if operation in _FORMULAS:
        return _FORMULAS[operation](args)
    is_combining = torch.Tag.pointwise in operation.tags or operation in _SUMS
    return _widened_bytes(args, made) if is_combining else 0


def with_random_state(block: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor]:
    """What is called instead of a block that is recomputed, and its first argument.

    They stand for the state of the CPU's random numbers. torch keeps it for each such block, and
    puts another aside while the block is computed again; a card's is in this same memory too.
    """

    def call(state: Tensor, *args: Any) -> Any:
        aside = torch.empty_like(state)  # every time: a block must do the same operations again
        if not in_backward():
            del aside
        return block(*args)

    return call, torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _attention(args: Sequence[Any]) -> int:
    """Per thread: a tile of scores, its maxima and sums, and a tile of the output."""
    query, key = args[0], args[1]
    rows, columns = _tile(query, key)
    elements = rows * columns + 2 * rows + rows * query.shape[-1]
    return torch.get_num_threads() * int(_FP32_BYTES * elements + _narrow(query) * rows * columns)


def _attention_backward(args: Sequence[Any]) -> int:
    """Per thread: two tiles of scores and their rows' sums; and the gradient, where it has gaps."""
    gradient, query, key = args[:3]
    rows, columns = _tile(query, key)
    scores = 2 * rows * columns
    tiles = torch.get_num_threads() * (_FP32_BYTES * (scores + rows) + _narrow(query) * scores)
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else int(gradient.nbytes)
    return int(tiles) + copied


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of the scores that a thread works on at once."""
    length = query.shape[-2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(length, rows), min(key.shape[-2], 512)


def _narrow(tensor: Tensor) -> int:
    """Bytes of an element that is kept beside its fp32 copy; 0 for fp32, which needs none."""
    return tensor.itemsize if tensor.itemsize < _FP32_BYTES else 0


def _layer_norm_backward(args: Sequence[Any]) -> int:
    """Per thread: the gradients of weight and bias, where they are wanted."""
    tensor, shape, wanted = args[1], args[2], args[7]
    if not any(wanted[1:]):
        return 0
    width = int(torch.Size(shape).numel())
    return int(torch.get_num_threads() * 2 * width * tensor.itemsize)


def _convolution(args: Sequence[Any]) -> int:
    """The patches, unfolded."""
    return args[0].numel() * args[0].itemsize  # type: ignore[no-any-return]


def _convolution_backward(args: Sequence[Any]) -> int:
    return _convolution(args[1:])


def _widened_bytes(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """fp32 copies of narrower operands: the CPU makes them where types are mixed."""
    widest = max((tensor.itemsize for tensor in made if tensor.is_floating_point()), default=0)
    return sum(
        value.numel() * widest
        for value in args
        if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < widest
    )


_SUMS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim, _aten.mean.default, _aten.sum.default})
_FORMULAS: Mapping[Any, Callable[[Sequence[Any]], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
}
