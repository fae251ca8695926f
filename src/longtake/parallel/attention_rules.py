"""Chooses which of torch's attention kernels may train, and the layout of their backward pass.

Both hold for every attention of this process: they are rules of torch's dispatcher, and not of
`torch.nn.functional`. Families, modules of the user's own, compiled code, and attention that is
kept or shared all end in the same operations.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.attention import SDPBackend

REPAIRED_IN = "2.14.1"
"""The first torch without both faults of cuDNN's backward pass of attention. It kept compiled
graphs by the layouts of query, key and value, and not by that of the output's gradient, which it
then read with the gaps of another one, or beyond its end. With a mask the gradient of the queries
may be NaN (pytorch issue 196678)."""
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
"""Dimensions from the outermost in memory, each with its stride over that of a tensor without gaps;
without dimensions of size 1."""


class AttentionKind(NamedTuple):
    """The facts, beside lengths and numbers of samples and heads, that a code path depends on."""

    dtype: str
    widths: tuple[int, int]  # of keys and of values
    layouts: tuple[Layout, Layout, Layout]  # of query, key and value
    is_masked: bool
    is_causal: bool
    shares_keys: bool  # several heads of the queries have the same keys


class KernelChoice(NamedTuple):
    """The kernel that computes a kind of attention on this machine, and those that must not."""

    chosen: Kernel
    refused: tuple[Kernel, ...] = ()


CHOICES: dict[AttentionKind, KernelChoice] = {}
"""The findings of `longtake.planner.attention_check` before training."""


def has_cudnn_faults() -> bool:
    return torch.__version__ < REPAIRED_IN


def cudnn_note(capability: tuple[int, int]) -> str:
    """A sentence about this torch on a GPU that chooses cuDNN first (Hopper, Blackwell), or ''."""
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
    """Facts about query, key and value [B, H, T, D] that decide the kernel."""
    return AttentionKind(
        str(query.dtype).removeprefix("torch."),
        (key.shape[-1], value.shape[-1]),
        (_layout(query), _layout(key), _layout(value)),
        mask is not None,
        is_causal,
        query.shape[-3] != key.shape[-3],
    )


def _layout(tensor: Tensor) -> Layout:
    strides, found, packed = tensor.stride(), list[tuple[int, int]](), 1
    used = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    for dim in sorted(used, key=lambda each: strides[each]):
        found.append((dim, math.ceil(strides[dim] / packed)))
        packed = max(packed, strides[dim] * tensor.shape[dim])
    return tuple(reversed(found))


def refusals(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
) -> tuple[Kernel, ...]:
    """The kernels that must not compute an attention that trains."""
    known: tuple[Kernel, ...] = ("cudnn",) if mask is not None and has_cudnn_faults() else ()
    if not CHOICES:
        return known
    found = CHOICES.get(kind_of(query, key, value, mask, is_causal=is_causal))
    return known if found is None else (*known, *found.refused)


@contextmanager
def without(kernels: Iterable[Kernel]) -> Iterator[None]:
    """Torch chooses none of these kernels; in other threads of this process neither."""
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
    """The kernel that computes an attention that trains."""
    is_causal = bool(how.get("is_causal"))
    with without(refusals(query, key, value, mask, is_causal=is_causal)):
        chosen = torch._fused_sdp_choice(query, key, value, attn_mask=mask, **how)
    return _KERNELS.get(SDPBackend(chosen), "math")


@cache
def guard_attention(device_type: str = "cuda") -> None:
    """Keep every attention of this process that trains from kernels with faults.

    "cpu" is for trials of what is meant for a GPU.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        return
    _LIBRARIES.append(obey_refusals(f"Autograd{device_type.upper()}"))
    if device_type == "cpu" or has_cudnn_faults():
        _LIBRARIES.append(give_whole_gradients(_BACKWARDS[device_type], device_type.upper()))


_LIBRARIES: list[Any] = []  # kept for as long as the process lives
_BACKWARDS = {
    "cuda": "_scaled_dot_product_cudnn_attention_backward",
    "cpu": "_scaled_dot_product_flash_attention_for_cpu_backward",
}


def obey_refusals(dispatch_key: str) -> Any:
    """Have attention that trains use no refused kernel, for as long as the result lives."""
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
    """Have a kernel's backward pass get the output's gradient in the output's own layout."""
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
        if gradient.stride() != output.stride():
            gradient = torch.empty_like(output).copy_(gradient)
        return torchs.call_boxed(keys, gradient, query, key, value, *rest, **how)

    return replace_kernel(operation, backward, dispatch_key)


def replace_kernel(operation: str, function: Any, dispatch_key: str) -> Any:
    """Call a function with torch's key set in place of a kernel, while the result lives."""
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(operation, function, dispatch_key, with_keyset=True, allow_override=True)
    return library


def fingerprint() -> str:
    """Changes whenever compiled code might hold another kernel."""
    return repr((has_cudnn_faults(), sorted(CHOICES.items())))
