"""Attention whose result is kept while the rest of a block is recomputed.

No operation passes through Python for it: while a block runs, in the forward pass and when it is
recomputed, torch.nn.functional's attention is replaced by an autograd function.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend
from torch.overrides import _get_current_function_mode, handle_torch_function

from longtake.parallel.context_parallel import AttentionMode

_aten = torch.ops.aten
_FLASH_CHANNELS = 8  # of other multiples torch pads heads for FlashAttention
_BIAS_ALIGNMENT = 8  # of a bias's rows, which torch pads for the memory-efficient kernel


class ScoreTerms(NamedTuple):
    """How scores are made of queries and keys."""

    bias: Tensor | None  # added to them
    is_causal: bool
    scale: float | None


class AttentionKernel(NamedTuple):
    """One of torch's kernels: what it computes, and its derivative."""

    forward: Callable[[Tensor, Tensor, Tensor, ScoreTerms], Sequence[Any]]
    """The output first, then all that the derivative needs."""
    backward: Callable[[Tensor, Sequence[Tensor], Sequence[Any], ScoreTerms], Sequence[Tensor]]
    """Gradients of query, key and value from that of the output."""


# Arguments are those of torch's own formulas (tools/autograd/derivatives.yaml).
FLASH_ON_CPU = AttentionKernel(
    lambda query, key, value, scores: _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, scores.is_causal, attn_mask=scores.bias, scale=scores.scale
    ),
    lambda gradient, inputs, made, scores: (
        _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(gradient, *inputs, *made, 0.0, scores.is_causal),
            attn_mask=scores.bias,
            scale=scores.scale,
        )
    ),
)
FLASH = AttentionKernel(
    lambda query, key, value, scores: _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, scores.is_causal, scale=scores.scale
    )[:8],
    lambda gradient, inputs, made, scores: _aten._scaled_dot_product_flash_attention_backward(
        *(gradient, *inputs, *made[:6], 0.0, scores.is_causal, *made[6:]), scale=scores.scale
    ),
)
EFFICIENT = AttentionKernel(
    lambda query, key, value, scores: _aten._scaled_dot_product_efficient_attention(
        query, key, value, scores.bias, True, 0.0, scores.is_causal, scale=scores.scale
    ),
    lambda gradient, inputs, made, scores: _aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, *inputs, scores.bias, *made, 0.0, [True, True, True, False]),
        scores.is_causal,
        scale=scores.scale,
    )[:3],
)
CUDNN = AttentionKernel(
    lambda query, key, value, scores: _aten._scaled_dot_product_cudnn_attention(
        query, key, value, scores.bias, True, 0.0, scores.is_causal, False, scale=scores.scale
    )[:8],
    lambda gradient, inputs, made, scores: _aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient, *inputs, *made[:2], *made[6:8], scores.bias, *made[2:6]),
        *(0.0, scores.is_causal),
        scale=scores.scale,
    ),
)


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]
) -> AttentionKernel | None:
    """The kernel that torch chooses; None for one that is not known here.

    Of fake tensors torch chooses none; they are the CPU's (see `longtake.planner.kernels`).
    """
    if isinstance(query, FakeTensor):
        inputs = (query, key, value)
        sizes = {(each.dim(), each.shape[1], each.shape[-1], each.stride(-1)) for each in inputs}
        is_plain = len(sizes) == 1 and query.dim() == 4 and query.stride(-1) == 1
        return FLASH_ON_CPU if is_plain else None
    number = torch._fused_sdp_choice(query, key, value, attn_mask=mask, **how)
    backend, on_cuda = SDPBackend(number), query.device.type == "cuda"
    if backend == SDPBackend.FLASH_ATTENTION and not on_cuda:
        return FLASH_ON_CPU
    if backend == SDPBackend.FLASH_ATTENTION and query.shape[-1] % _FLASH_CHANNELS == 0:
        return FLASH
    if backend == SDPBackend.CUDNN_ATTENTION and mask is None:
        return CUDNN
    return EFFICIENT if backend == SDPBackend.EFFICIENT_ATTENTION and on_cuda else None


def as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as kernels take it: added to the scores; on a GPU, given for every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if query.device.type == "cpu":
        return mask
    if any(stride % _BIAS_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % _BIAS_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


class KeptAttention:
    """Results of the attentions of one run of a block, until it is recomputed."""

    def __init__(self) -> None:
        self._results: deque[tuple[list[Any], int]] = deque()

    def contexts(self) -> tuple["_Replaced", "_Replaced"]:
        """Contexts of the forward pass and of recomputation, for torch's checkpointing."""
        return _Replaced(self._keep), _Replaced(self._take)

    def _keep(self, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        made = compute()
        kept = [each.detach() if isinstance(each, Tensor) else each for each in made]
        self._results.append((kept, kept[0]._version))
        return made

    def _take(self, compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """What was kept; computed again after a change in place, or for a second backward pass."""
        if self._results:
            made, version = self._results.popleft()
            if made[0]._version == version:
                return made
        return compute()


_Obtain = Callable[[Callable[[], Sequence[Any]]], Sequence[Any]]


class _Replaced:
    """A context in which this thread's attention obtains its results in another way."""

    def __init__(self, obtain: _Obtain) -> None:
        self._obtain = obtain
        self._original: Any = None
        self._thread = 0

    def __enter__(self) -> None:
        self._original, self._thread = F.scaled_dot_product_attention, threading.get_ident()
        functions: Any = F
        functions.scaled_dot_product_attention = self._attend

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._original

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> Tensor:
        mode: Any = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if isinstance(mode, AttentionMode):  # it calls this again within
            options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
            given = (query, key, value)
            public: Any = F.scaled_dot_product_attention
            exchanged: Tensor = handle_torch_function(public, given, *given, **options, **how)
            return exchanged
        how = {"dropout_p": dropout_p, "is_causal": is_causal, **how}
        is_other = threading.get_ident() != self._thread or not torch.is_grad_enabled()
        mask_learns = attn_mask is not None and attn_mask.requires_grad
        if is_other or mask_learns or dropout_p or how.get("enable_gqa"):
            return self._original(query, key, value, attn_mask, **how)  # type: ignore[no-any-return]
        query, key, value = (_as_computed(each) for each in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.is_floating_point():
            mask = _as_computed(mask)
        kernel = choose_kernel(query, key, value, mask, how)
        if kernel is None:
            return self._original(query, key, value, mask, **how)  # type: ignore[no-any-return]
        scores = ScoreTerms(as_bias(mask, query, key), is_causal, how.get("scale"))
        attended: Tensor = _Attention.apply(kernel, scores, self._obtain, query, key, value)  # type: ignore[no-untyped-call]
        return attended


class _Attention(torch.autograd.Function):
    """Attention that obtains its result by computing it or from what was kept."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: AttentionKernel,
        scores: ScoreTerms,
        obtain: _Obtain,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        made = obtain(lambda: kernel.forward(query, key, value, scores))
        ctx.kernel, ctx.scores = kernel, scores._replace(bias=None)
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in made]
        tensors = (each if isinstance(each, Tensor) else None for each in made)
        ctx.save_for_backward(query, key, value, scores.bias, *tensors)
        output: Tensor = made[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, *tensors = ctx.saved_tensors
        pairs = zip(tensors, ctx.numbers, strict=True)
        made = [number if tensor is None else tensor for tensor, number in pairs]
        scores = ctx.scores._replace(bias=bias)
        found = ctx.kernel.backward(gradient, (query, key, value), made, scores)
        return None, None, None, *found


def _as_computed(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
