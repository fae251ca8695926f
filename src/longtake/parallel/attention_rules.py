"""Rules by which torch chooses attention kernels in training, and the layout of their gradients.

Both hold for every attention of this process: they are rules of torch's dispatcher, not of
`torch.nn.functional`. Families, user-defined modules, compiled code, and attention that is kept or
shared all end in the same operations.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import SDPBackend

REPAIRED_IN = "2.14.1"
"""First version of torch without two faults of cuDNN's backward pass of attention. It cached
compiled graphs by the layouts of query, key and value but not of the output's gradient, which it
then read with wrong gaps or beyond its end. With a mask, the gradient of the queries may be NaN
(pytorch issue 196678)."""
INSTALL = f"Install PyTorch {REPAIRED_IN} or newer with CUDA 13."
Kernel = Literal["flash", "cudnn", "efficient", "math"]
NAMES: Mapping[Kernel, str] = {
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN",
    "efficient": "memory-efficient",
    "math": "math",
}
_KERNELS: Mapping[SDPBackend, Kernel] = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
_of_cuda = torch.backends.cuda
_SWITCHES: Mapping[Kernel, tuple[Any, Any]] = {
    "flash": (_of_cuda.flash_sdp_enabled, _of_cuda.enable_flash_sdp),
    "cudnn": (_of_cuda.cudnn_sdp_enabled, _of_cuda.enable_cudnn_sdp),
    "efficient": (_of_cuda.mem_efficient_sdp_enabled, _of_cuda.enable_mem_efficient_sdp),
}
Layout = tuple[tuple[int, int], ...]
"""Memory layout of a tensor: its dimensions larger than 1, from the outermost, each with its stride
over that of a tensor without gaps.
"""


class AttentionKind(NamedTuple):
    """Properties of an attention call, apart from its sizes, that decide torch's code path."""

    dtype: str
    widths: tuple[int, int]  # keys, values
    layouts: tuple[Layout, Layout, Layout]  # query, key, value
    is_masked: bool
    is_causal: bool
    shares_keys: bool  # several heads of the queries have the same keys


class KernelChoice(NamedTuple):
    """The kernel that computes one kind of attention on this machine, and the refused kernels."""

    chosen: Kernel
    refused: tuple[Kernel, ...] = ()


CHOICES: dict[AttentionKind, KernelChoice] = {}
"""Chosen kernel of each kind of attention, found by `longtake.planner.attention_check` before
training."""


def has_cudnn_faults() -> bool:
    # Not a comparison of texts: torch.__version__ is a TorchVersion, which compares numbers.
    return torch.__version__ < REPAIRED_IN


def cudnn_note(capability: tuple[int, int]) -> str:
    """Return a note on torch's faulty cuDNN attention, for GPUs that prefer cuDNN; else "".

    These are Hopper and Blackwell.
    """
    if capability < (9, 0) or not has_cudnn_faults():
        return ""
    return (
        f"PyTorch {torch.__version__}'s cuDNN attention has a faulty backward pass on this GPU "
        f"(repaired in {REPAIRED_IN}): longtake hands it gradients of one layout and computes "
        "masked attention by another kernel. Other programs may train on wrong gradients here."
    )


def kind_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> AttentionKind:
    """Return the properties of query, key and value [B, H, T, D] that decide the kernel."""
    of_query, of_key, of_value = (_numbers(each.shape) for each in (query, key, value))
    return AttentionKind(
        str(query.dtype).removeprefix("torch."),
        (of_key[-1], of_value[-1]),
        (_layout(query), _layout(key), _layout(value)),
        mask is not None,
        is_causal,
        of_query[-3] != of_key[-3],
    )


def _layout(tensor: Tensor) -> Layout:
    strides, shape = _numbers(tensor.stride()), _numbers(tensor.shape)
    dims, packed = list[tuple[int, int]](), 1
    used = [dim for dim in range(tensor.dim()) if shape[dim] > 1]
    # From the innermost dimension: `packed` is the memory that the inner dimensions span.
    for dim in sorted(used, key=lambda each: strides[each]):
        dims.append((dim, math.ceil(strides[dim] / packed)))
        packed = max(packed, strides[dim] * shape[dim])
    return tuple(reversed(dims))


def _numbers(sizes: Sequence[Any]) -> list[int]:
    """Return sizes as numbers, also in code that is compiled for any length.

    There they are those of the call at which it is compiled. Comparing the symbols would restrict
    the code to that length, and a kind with symbols could not be looked up.
    """
    return [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in sizes]


def refusals(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Kernel, ...]:
    """Return the kernels that must not compute this attention in training, as they are wrong."""
    known: tuple[Kernel, ...] = ("cudnn",) if mask is not None and has_cudnn_faults() else ()
    if not CHOICES:
        return known
    choice = CHOICES.get(kind_of(query, key, value, mask, is_causal=is_causal))
    return known if choice is None else (*known, *choice.refused)


@contextmanager
def without(kernels: Iterable[Kernel]) -> Iterator[None]:
    """Keep torch from choosing these attention kernels in the context, in all threads."""
    switches = [_SWITCHES[each] for each in kernels]
    changed = [enable for is_on, enable in dict.fromkeys(switches) if is_on()]
    for enable in changed:
        enable(False)
    try:
        yield
    finally:
        for enable in changed:
            enable(True)


def kernel_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Mapping[str, Any]
) -> Kernel:
    """Return the kernel that torch chooses for an attention in training."""
    is_causal = bool(how.get("is_causal"))
    with without(refusals(query, key, value, mask, is_causal=is_causal)):
        chosen = torch._fused_sdp_choice(query, key, value, attn_mask=mask, **how)
    return _KERNELS.get(SDPBackend(chosen), "math")


@cache
def guard_attention(device_type: str = "cuda") -> None:
    """Keep attention in training, anywhere in this process, from kernels with faults.

    "cpu" is for tests of the rules that are meant for a GPU.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        return
    # In torch's dispatcher, where every caller ends: functions of `torch.nn.functional` may have
    # been imported before, and compiled code or user modules call the operation directly.
    _LIBRARIES.append(obey_refusals(f"Autograd{device_type.upper()}"))
    if device_type == "cpu" or has_cudnn_faults():
        _LIBRARIES.append(give_whole_gradients(_BACKWARDS[device_type], device_type.upper()))


_LIBRARIES: list[Any] = []  # kept alive: a rule ends with its Library
_BACKWARDS = {
    "cuda": "_scaled_dot_product_cudnn_attention_backward",
    "cpu": "_scaled_dot_product_flash_attention_for_cpu_backward",
}


def obey_refusals(dispatch_key: str) -> Any:
    """Make attention in training use no refused kernel, as long as the returned library lives."""
    name = "scaled_dot_product_attention"
    torchs = get_kernel(f"aten::{name}", dispatch_key)

    def attend(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Any:
        # Without gradients no kernel is refused: the known faults are in backward passes.
        trains = torch.is_grad_enabled() and (
            query.requires_grad or key.requires_grad or value.requires_grad
        )
        refused: tuple[Kernel, ...] = ()
        if trains:
            refused = refusals(query, key, value, attn_mask, is_causal=is_causal)
        with without(refused):
            return torchs.call_boxed(
                keys, query, key, value, attn_mask, dropout_p, is_causal, **how
            )

    return replace_kernel(name, attend, dispatch_key)


def give_whole_gradients(operation: str, dispatch_key: str) -> Any:
    """Give a kernel's backward pass the output's gradient in the layout of the output itself."""
    torchs = get_kernel(f"aten::{operation}", dispatch_key)

    def backward(
        keys: Any,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *rest: Any,
        **how: Any,
    ) -> Any:
        output: Tensor = rest[0]
        # The cached graph reads the gradient by the strides of an earlier call: another layout
        # gives wrong gradients or reads beyond the tensor's end.
        if gradient.stride() != output.stride():
            gradient = torch.empty_like(output).copy_(gradient)
        return torchs.call_boxed(keys, gradient, query, key, value, *rest, **how)

    return replace_kernel(operation, backward, dispatch_key)


def replace_kernel(operation: str, function: Any, dispatch_key: str) -> Any:
    """Replace a kernel of torch's dispatcher by a function, as long as the result lives.

    The function also gets torch's dispatch key set.
    """
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(operation, function, dispatch_key, with_keyset=True, allow_override=True)
    # The compiler keeps the kernels that it has looked up, and would not see this one.
    getattr(torch.ops.aten, operation).default._dispatch_cache.clear()
    return library


def fingerprint() -> str:
    """Return a text that changes whenever compiled code might hold another attention kernel."""
    return repr((has_cudnn_faults(), sorted(CHOICES.items())))
