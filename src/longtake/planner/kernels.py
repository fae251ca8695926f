"""Predicts bytes that CUDA and CPU kernels save for the backward pass, and their workspaces.

Fake tensors live on the CPU, where torch decomposes some operations that are one kernel on CUDA.
Each part would save activations, so that predictions were a sixth to a third too high.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode, handle_torch_function

from longtake.models.numerics import in_backward
from longtake.parallel import attention, attention_rules
from longtake.planner.devices import rounded

_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_MOST_CHANNELS = 256
_FP32_UNDER_AUTOCAST = ("layer_norm", "group_norm", "softmax", "mse_loss", "rms_norm")
"""Functions of torch.nn.functional that CUDA's autocast runs in fp32 and the CPU's does not: of the
lists in torch's autocast_mode.h, those that diffusion transformers call."""
_FP32_BYTES = 4
_RANDOM_STATE_BYTES = torch.get_rng_state().nbytes
_aten = torch.ops.aten


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let operations on fake CPU tensors save what CUDA's kernels save, inside the context.

    It replaces functions of torch.nn.functional: a function mode would be off when a block is
    recomputed in the backward pass.
    """
    stand_ins: dict[str, Callable[..., Any]] = {
        name: _in_fp32_under_autocast(getattr(F, name)) for name in _FP32_UNDER_AUTOCAST
    }
    stand_ins["rms_norm"] = _in_fp32_under_autocast(_rms_norm)
    stand_ins["scaled_dot_product_attention"] = _cuda_attention
    before = {name: getattr(F, name) for name in stand_ins}
    of_real_tensors = attention.choose_kernel
    for name, function in stand_ins.items():
        setattr(F, name, function)
    attention.choose_kernel = _cuda_kernel
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
        attention.choose_kernel = of_real_tensors


def cuda_workspace_bytes(operation: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Return the bytes of a CUDA kernel's workspace, which it frees before it returns; 0 if few.

    FlashAttention's backward pass in torch (mha_bwd in flash_api.cpp) sums the queries' gradient in
    fp32 and keeps a number per row; both are padded to whole tiles. It copies a gradient that is
    not contiguous, and where heads share keys, it first creates the keys' and values' gradients for
    every head.
    """
    if operation is not _aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    gradient, query, key = args[:3]  # [B, heads, T, channels]
    num_samples, num_heads, length, channels = query.shape
    widths = rounded(channels, 32 if channels <= 128 else 64) + 1
    sums = 4 * num_samples * num_heads * rounded(length, 128) * widths
    copy = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    shared = 0 if key.shape[1] == num_heads else 2 * key.nbytes * (num_heads // key.shape[1])
    return int(sums + copy + shared)


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the kernel that CUDA would choose: FlashAttention, or memory-efficient.

    Both save queries, keys, values, output and one number per row.
    """
    mode: Any = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if isinstance(mode, attention.AttentionMode):  # the mode wraps torch's own function
        options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        options |= {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value)
        return handle_torch_function(_cuda_attention, given, *given, **options)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (part.to(torch.bfloat16) for part in (query, key, value))
    kernel = _chosen(query, key, value, attn_mask, is_causal)
    if kernel == "flash":  # takes shared keys and values as they are
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if kernel == "math":
        of_math: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        of_scores = (attn_mask, dropout_p, is_causal)
        by_formula = _aten._scaled_dot_product_attention_math
        return by_formula(query, key, value, *of_scores, **of_math)[0]
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        # The memory-efficient kernel takes one key and value per head.
        key, value = (part.repeat_interleave(repeats, -3) for part in (key, value))
    bias = attn_mask
    if bias is not None:  # the kernel takes a bias for every head, added to the scores
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, float("-inf"))
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    efficient = _aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def _chosen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> attention_rules.Kernel:
    """Return the attention kernel that was found correct on this GPU, or that torch would choose.

    cuDNN's counts as one of the others, which save the same tensors.
    """
    is_narrow = query.dtype in _FLASH_TYPES and query.shape[-1] <= _FLASH_MOST_CHANNELS
    found = None
    # Without a trial on this GPU, torch's usual choice is assumed.
    if attention_rules.CHOICES:
        kind = attention_rules.kind_of(query, key, value, mask, is_causal=is_causal)
        found = attention_rules.CHOICES.get(kind)
    if found is not None and found.chosen in ("efficient", "math"):
        return found.chosen
    return "flash" if mask is None and is_narrow else "efficient"


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]
) -> attention.AttentionKernel | None:
    """Choose the CUDA kernel for an attention whose result is kept for recomputation."""
    kernel = _chosen(query, key, value, mask, bool(how.get("is_causal")))
    return {"flash": attention.FLASH, "efficient": attention.EFFICIENT}.get(kernel)


def _in_fp32_under_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return call


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in _FLASH_TYPES
    return value.float() if is_narrow else value


def _rms_norm(
    input: Tensor,  # noqa: A002 - torch's own name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    assert isinstance(input, FakeTensor), "only shapes are known here"
    assert len(normalized_shape) == 1
    return _fused_rms_norm(input, weight)[0]


# CUDA has one kernel that saves input and rstd, where the CPU would save each part's input.
@torch.library.custom_op("longtake::rms_norm", mutates_args=())
def _fused_rms_norm(input: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: A002
    raise NotImplementedError("this operation has shapes, but computes nothing")


@torch.library.custom_op("longtake::rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(
    gradient: Tensor,
    input: Tensor,  # noqa: A002
    rstd: Tensor,
    weight: Tensor | None,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("this operation has shapes, but computes nothing")


@_fused_rms_norm.register_fake
def _rms_norm_shapes(input: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: A002
    return torch.empty_like(input), input.new_empty(*input.shape[:-1], 1, dtype=torch.float32)


@_fused_rms_norm_backward.register_fake
def _rms_norm_backward_shapes(
    gradient: Tensor,
    input: Tensor,  # noqa: A002
    rstd: Tensor,
    weight: Tensor | None,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    if weight is None or not wants_weight:
        return torch.empty_like(input), rstd.new_empty(0)
    return torch.empty_like(input), weight.new_empty(weight.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # What CUDA's kernel saves: input, rstd and weight.
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _rms_norm_backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None]:
    input, rstd, weight = ctx.saved_tensors  # noqa: A001
    wants_weight = weight is not None and ctx.needs_input_grad[1]
    of_input, of_weight = _fused_rms_norm_backward(gradient, input, rstd, weight, wants_weight)
    return of_input, of_weight if wants_weight else None


_fused_rms_norm.register_autograd(_rms_norm_backward, setup_context=_save_for_backward)


def cpu_workspace_bytes(operation: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Return the bytes of a CPU kernel's workspace, which it frees before it returns.

    The formulas are exact to the byte on torch 2.13, measured with the profiler's allocator events.
    oneDNN's own scratchpads (bf16 products, convolutions) depend on the processor and have no
    formula; without oneDNN (`torch.backends.mkldnn.flags(enabled=False)`) nothing is missing.
    """
    if operation in _CPU_FORMULAS:
        return _CPU_FORMULAS[operation](args)
    is_combining = torch.Tag.pointwise in operation.tags or operation in _SUMS
    return _widened_bytes(args, made) if is_combining else 0


def with_random_state(block: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor]:
    """Wrap a block that is recomputed, so that the saved state of the CPU's random numbers counts.

    Returns a function and its first argument, a tensor of the state's size. torch saves the state
    for each such block, and once more while it is recomputed. For a GPU that state is in host
    memory too.
    """

    def call(state: Tensor, *args: Any) -> Any:
        saved = torch.empty_like(state)  # every time: a block must do the same operations again
        if not in_backward():
            del saved
        return block(*args)

    return call, torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _attention_bytes(args: Sequence[Any]) -> int:
    """Return the workspace bytes of attention on a CPU.

    Each thread has a tile of scores, its maxima and sums, and an output tile.
    """
    query, key = args[0], args[1]
    rows, columns = _tile(query, key)
    elements = rows * columns + 2 * rows + rows * query.shape[-1]
    narrow = _narrow_bytes(query) * rows * columns
    return torch.get_num_threads() * int(_FP32_BYTES * elements + narrow)


def _attention_backward_bytes(args: Sequence[Any]) -> int:
    """Return the workspace bytes of the backward pass of CPU attention.

    Each thread has two tiles of scores, and row sums; a strided gradient is copied.
    """
    gradient, query, key = args[:3]
    rows, columns = _tile(query, key)
    scores = 2 * rows * columns
    tile = _FP32_BYTES * (scores + rows) + _narrow_bytes(query) * scores
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else int(gradient.nbytes)
    return int(torch.get_num_threads() * tile) + copied


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[-2]
    # Tile sizes of torch 2.13's flash attention for the CPU.
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(length, rows), min(key.shape[-2], 512)


def _narrow_bytes(tensor: Tensor) -> int:
    return tensor.itemsize if tensor.itemsize < _FP32_BYTES else 0


def _layer_norm_backward_bytes(args: Sequence[Any]) -> int:
    """Return the workspace bytes of layer norm's backward pass on a CPU.

    Each thread has gradients of weight and bias, if one of them is wanted.
    """
    tensor, shape, wanted = args[1], args[2], args[7]
    if not any(wanted[1:]):
        return 0
    width = int(torch.Size(shape).numel())
    return int(torch.get_num_threads() * 2 * width * tensor.itemsize)


def _widened_bytes(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Return the bytes of fp32 copies that a CPU operation makes of operands in narrower types."""
    widest = max((tensor.itemsize for tensor in made if tensor.is_floating_point()), default=0)
    return sum(
        value.numel() * widest
        for value in args
        if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < widest
    )


_SUMS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim, _aten.mean.default, _aten.sum.default})
_CPU_FORMULAS: Mapping[Any, Callable[[Sequence[Any]], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_bytes,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_bytes,
    _aten.native_layer_norm_backward.default: _layer_norm_backward_bytes,
    # unfolded patches
    _aten.convolution.default: lambda args: int(args[0].nbytes),
    _aten.convolution_backward.default: lambda args: int(args[1].nbytes),
}
