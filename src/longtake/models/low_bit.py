"""Products of inputs and a frozen weight that are both in 8 bits, forward and backward.

A weight [N, K] has one scale per row. Inputs [M, K] and gradients [M, N] get one scale per row
(token) in each pass, as in LLM.int8() (Dettmers et al., 2022), without its outliers:

    output   = (codes of inputs @ codes of weight.T) * scale of inputs [M, 1] * scale of weight [N]
    gradient = codes of (gradient * scale of weight [N]) @ codes of weight, times its scale [M, 1]

The scales of the weight's rows belong to the sum over N in the backward pass, so that they are
multiplied into the gradient before it is quantised.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

LARGEST_CODE: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST_SCALE = 2.0**-100  # scale of a row of zeros
_LEAST_ROWS = 17
"""Fewest rows that torch's product of int8 numbers takes on CUDA; layers with fewer rows, which
take the timestep, are fast anyway."""
FIRST_WITH_FP8 = (8, 9)  # compute capability of Ada
_MULTIPLE = 16
"""Multiple of a weight's rows and columns that cuBLAS needs for products of fp8."""


def can_multiply(num_rows: int, codes: Tensor) -> bool:
    """Return whether inputs of so many rows and codes [N, K] can be multiplied on their device."""
    if codes.dtype != torch.int8 and codes.is_cuda and _capability(codes.device) < FIRST_WITH_FP8:
        return False
    return num_rows >= _LEAST_ROWS and not any(size % _MULTIPLE for size in codes.shape)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def quantized_rows(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise a matrix with one scale per row: codes in `dtype` and scales [rows, 1] in fp32."""
    largest = LARGEST_CODE[dtype]
    scale = values.abs().amax(1, keepdim=True).float().div_(largest).clamp_(min=LEAST_SCALE)
    scaled = values / scale  # in fp32, as the scale is
    if not dtype.is_floating_point:
        scaled.round_()
    return scaled.clamp_(-largest, largest).to(dtype), scale


def product(inputs: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply inputs [M, K] by a weight with codes [N, K] and scales [N, 1]; [M, N] as inputs."""
    rows, scale_of_rows = quantized_rows(inputs, codes.dtype)
    summed = _multiplied(rows, codes.t())
    return summed.mul_(scale_of_rows).mul_(scale.float().t()).to(inputs.dtype)


def product_gradient(gradient: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply a gradient [M, N] by a weight as `product` has it: the gradient of inputs [M, K]."""
    rows, scale_of_rows = quantized_rows(gradient * scale.float().t(), codes.dtype)
    # cuBLAS multiplies fp8, and int8 on some GPUs, only by a second matrix whose columns are
    # contiguous.
    weight = codes.t().contiguous().t()
    return _multiplied(rows, weight).mul_(scale_of_rows).to(gradient.dtype)


def _multiplied(first: Tensor, second: Tensor) -> Tensor:
    """Multiply matrices of codes; the sums, without scales, are in fp32."""
    if first.dtype == torch.int8:
        return torch._int_mm(first, second).float()
    one = torch.ones((), device=first.device)
    summed: Tensor = torch._scaled_mm(
        first, second, scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    return summed


class LowBitProduct(torch.autograd.Function):
    """`product` of inputs [..., K] and a layer's weight; autograd keeps neither of them.

    `layer` gives the weight again in the backward pass: streaming may have overwritten it. While a
    model is compiled, `codes` and `scale` are the weight, which the compiler can follow.
    """

    # Without `*stored`: where no gradient is wanted, torch 2.13's compiler would drop an argument.
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, layer: Any, codes: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        ctx.layer = layer
        if codes is None or scale is None:
            codes, scale = layer.stored()
        else:
            ctx.save_for_backward(codes, scale)
        rows = inputs.reshape(-1, inputs.shape[-1])
        return product(rows, codes, scale).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        codes, scale = ctx.saved_tensors if ctx.layer is None else ctx.layer.stored()
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = product_gradient(rows, codes, scale).view(*gradient.shape[:-1], -1)
        return of_inputs, None, None, None
