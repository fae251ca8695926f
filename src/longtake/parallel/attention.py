"""torch's attention kernels with logsumexp and derivative, and a mode that replaces attention."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from longtake.parallel import attention_rules

_aten = torch.ops.aten
_FLASH_CHANNELS = 8  # torch pads heads of other multiples for FlashAttention
_BIAS_ALIGNMENT = 8  # torch pads the rows of a bias to it for the memory-efficient kernel


class ScoreTerms(NamedTuple):
    """What attention scores have besides products of queries and keys: bias, causal mask, scale."""

    bias: Tensor | None  # added to them
    is_causal: bool
    scale: float | None


class AttentionKernel(NamedTuple):
    """One of torch's attention kernels as two functions: its forward pass and its derivative."""

    forward: Callable[[Tensor, Tensor, Tensor, ScoreTerms], Sequence[Any]]
    """Function that computes attention: it returns the output first, then all that the derivative
    needs."""
    backward: Callable[[Tensor, Sequence[Tensor], Sequence[Any], ScoreTerms], Sequence[Tensor]]
    """Derivative of attention: from the gradient of the output to those of query, key and value."""


def _lengths(inputs: Sequence[Tensor]) -> tuple[int, int]:
    query, key, _ = inputs
    return query.shape[-2], key.shape[-2]


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
        *(gradient, *inputs, *made[:4], *_lengths(inputs), 0.0, scores.is_causal, *made[6:]),
        scale=scores.scale,
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
        *(gradient, *inputs, *made[:2], *made[6:8], scores.bias, *made[2:4]),
        *(*_lengths(inputs), 0.0, scores.is_causal),
        scale=scores.scale,
    ),
)


def choose_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]
) -> AttentionKernel | None:
    """Return the kernel with which torch would compute an attention; None for other kernels.

    torch chooses none for fake tensors; they get the CPU's (see `longtake.planner.kernels`).
    """
    if isinstance(query, FakeTensor):
        inputs = (query, key, value)
        sizes = {(each.dim(), each.shape[1], each.shape[-1], each.stride(-1)) for each in inputs}
        is_plain = len(sizes) == 1 and query.dim() == 4 and query.stride(-1) == 1
        return FLASH_ON_CPU if is_plain else None
    kernel = attention_rules.kernel_of(query, key, value, mask, how)
    if kernel == "flash" and query.device.type == "cpu":
        return FLASH_ON_CPU
    # torch would pad these heads first, which `FLASH` does not.
    if kernel == "flash" and query.shape[-1] % _FLASH_CHANNELS:
        return None
    return {"flash": FLASH, "cudnn": CUDNN, "efficient": EFFICIENT}.get(kernel)


def as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Convert an attention mask to a bias of the scores; on a GPU it is expanded to every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if query.device.type == "cpu":
        return mask
    # Rows are padded in memory, and the bias is a view of them in its own length.
    if any(stride % _BIAS_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % _BIAS_ALIGNMENT))[..., :length]
    return mask.expand(*query.shape[:-1], key.shape[-2])


Obtain = Callable[[Callable[[], Sequence[Any]]], Sequence[Any]]
"""A function that gives the result of attention: it is passed the function that computes it, and
calls this or returns a kept result."""


class _OfThread(threading.local):
    obtain: Obtain | None = None


THIS_THREAD = _OfThread()
"""Function that gives `attend` the results of attention in this thread; None: they are computed."""


def attend(
    kernel: AttentionKernel, scores: ScoreTerms, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Compute attention [B, H, T, d] by one of torch's kernels."""
    obtain = THIS_THREAD.obtain if torch.is_grad_enabled() else None
    return _Attention.apply(  # type: ignore[no-untyped-call]
        kernel, scores, obtain or (lambda compute: compute()), query, key, value
    )


class _Attention(torch.autograd.Function):
    """Attention by a torch kernel, with autograd; `obtain` may return a kept forward result."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: AttentionKernel,
        scores: ScoreTerms,
        obtain: Obtain,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        made = obtain(lambda: kernel.forward(query, key, value, scores))
        ctx.kernel, ctx.scores = kernel, scores._replace(bias=None)
        # Tensors are saved by autograd; only other values may be attributes of `ctx`.
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in made]
        tensors = (each if isinstance(each, Tensor) else None for each in made)
        ctx.save_for_backward(query, key, value, scores.bias, *tensors)
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, *tensors = ctx.saved_tensors
        pairs = zip(tensors, ctx.numbers, strict=True)
        made = [number if tensor is None else tensor for tensor, number in pairs]
        scores = ctx.scores._replace(bias=bias)
        gradients = ctx.kernel.backward(gradient, (query, key, value), made, scores)
        return None, None, None, *gradients


def as_computed(tensor: Tensor) -> Tensor:
    """Convert an input of attention to the dtype in which autocast would compute it."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


class AttentionMode(TorchFunctionMode):
    """Context in which the method `attend` computes all `scaled_dot_product_attention` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace calls of `scaled_dot_product_attention`; all other functions run as they are."""
        given = kwargs or {}
        if func is Tensor.unflatten:  # the compiler follows it as a method, not as a function
            return args[0].unflatten(*args[1:], **given)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        self.num_calls += 1
        return self.attend(*args, **given)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """Compute attention [B, H, T, d]; `how` are the other arguments of the torch function."""
        raise NotImplementedError
