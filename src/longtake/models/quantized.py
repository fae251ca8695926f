"""Frozen linear layers in fewer bits: quantised as they are read, dequantised where they are used.

A quantised layer keeps its weight in buffers that no state dict has. Forward and backward pass each
dequantise it for themselves: autograd keeps no dequantised weight.
"""

import importlib.util
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import Quantization
from longtake.errors import RecipeError

_NF4_BLOCK = 64
"""Weights that share a scale, as in QLoRA (Dettmers et al., 2023)."""
_NF4_SCALES = 256  # at most so many scales share the factor by which they are quantised themselves
_NF4_ZERO = 0x77  # two weights of level 7, which is 0
_LEAST_SCALE = 2.0**-100  # of a row of zeros
_ROWS: Mapping[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Kinds with a scale per row: the dtype of the weights, and the largest of them."""
_ONE_AT_A_TIME = Lock()
"""Threads that read weights quantise one after the other: it takes several times a weight."""


class FrozenLinear(nn.Linear):
    """A linear layer whose frozen weight is looked up in the backward pass again.

    autograd keeps no reference to it, so that between the two passes it may be elsewhere.
    """

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        return _FrozenProduct.apply(inputs, self)  # type: ignore[no-any-return, no-untyped-call]


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer
        bias: Tensor | None = layer.bias
        if bias is not None:
            bias = bias.to(inputs.dtype)
        return F.linear(inputs, layer.weight_as(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        weight = ctx.layer.weight_as(gradient.dtype)
        rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight)
        return rows.view(*gradient.shape[:-1], -1), None


class QuantizedLinear(FrozenLinear):
    """A frozen linear layer in fewer bits.

    It has no parameter `weight`; that attribute is the dequantised weight, made at each access.
    """

    kind: Quantization
    dtype: torch.dtype
    """What the weight was in."""
    codes: Tensor

    @property
    def weight_bytes(self) -> int:
        """Of the weight before it was quantised."""
        return self.in_features * self.out_features * self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "weight" not in self._parameters:
            return self.weight_as(self.dtype)
        return super().__getattr__(name)

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Quantise a weight, on the device where the layer is, into the layer's buffers."""
        with _ONE_AT_A_TIME:
            exact = weight.to(self.codes.device, self.dtype).float()
            made = (
                _quantized_nf4(exact) if self.kind == "nf4" else _quantized_rows(exact, self.kind)
            )
            for name, value in made.items():
                self.get_buffer(name).copy_(value)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        if self.kind != "nf4":
            scale: Tensor = self.scale
            return self.codes.to(dtype).mul_(scale.to(dtype))
        scales = self.scale_codes.view(len(self.factor), -1) / self.factor.unsqueeze(1) + self.mean
        pairs = F.embedding(self.codes.int(), self.levels.to(dtype))
        weight = pairs.view(-1, _NF4_BLOCK).mul_(scales.view(-1, 1).to(dtype))
        return weight.view(self.out_features, self.in_features)


def quantize_linears(module: nn.Module, kind: Quantization, key: str = "model.quantize") -> None:
    """Quantise every frozen linear layer inside a module, on any device, one after the other.

    On the meta device the layers get buffers without values, for `QuantizedLinear.load`. Layers
    that train, such as those of LoRA, and subclasses of nn.Linear stay as they are.

    Args:
        module: changed in place; each layer stays the same object.
        kind: of numbers.
        key: of the recipe, which asks for it.

    Raises:
        RecipeError: torchao is missing, or a layer's weights do not divide into blocks.
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and not layer.weight.requires_grad
    }
    if kind == "nf4":
        _refuse_missing_torchao(key)
        for name, layer in layers.items():
            if layer.weight.numel() % _NF4_BLOCK:
                raise RecipeError(
                    f'{key} = "nf4": {name} has {layer.out_features} x {layer.in_features} '
                    f"weights, and their number is not a multiple of {_NF4_BLOCK}, of which each "
                    'block has a scale. Set it to "int8" or "fp8".'
                )
    for layer in layers.values():
        _convert(layer, kind)


def _refuse_missing_torchao(key: str) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise RecipeError(
            f'{key} = "nf4" needs torchao, which is not installed. Install it with: pip install '
            '"longtake[eightbit]" (or: pip install torchao). "int8" and "fp8" need no torchao.'
        )


def _convert(linear: nn.Linear, kind: Quantization) -> None:
    weight = linear._parameters.pop("weight")
    assert weight is not None
    layer: Any = linear
    layer.__class__ = QuantizedLinear
    layer.kind, layer.dtype = kind, weight.dtype
    for name, (shape, dtype) in _buffers(kind, *weight.shape).items():
        empty = torch.empty(shape, dtype=dtype, device=weight.device)
        layer.register_buffer(name, empty, persistent=False)
    if not weight.is_meta:
        layer.load(weight)


def _buffers(
    kind: Quantization, num_rows: int, num_columns: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what stands for a weight."""
    if kind != "nf4":
        return {
            "codes": ((num_rows, num_columns), _ROWS[kind][0]),
            "scale": ((num_rows, 1), torch.bfloat16),
        }
    num_blocks = num_rows * num_columns // _NF4_BLOCK
    return {
        "codes": ((num_rows * num_columns // 2,), torch.uint8),
        "scale_codes": ((num_blocks,), torch.int8),
        "factor": ((num_blocks // _scales_per_factor(num_blocks),), torch.float32),
        "mean": ((), torch.float32),
        "levels": ((256, 2), torch.float32),
    }


def _scales_per_factor(num_blocks: int) -> int:
    return next(size for size in range(_NF4_SCALES, 0, -1) if num_blocks % size == 0)


def _quantized_rows(weight: Tensor, kind: Quantization) -> dict[str, Tensor]:
    """With a scale that bf16 can hold: dequantised to bf16, a weight is rounded once."""
    dtype, largest = _ROWS[kind]
    scale = (weight.abs().amax(1, keepdim=True) / largest).clamp(min=_LEAST_SCALE).bfloat16()
    scaled = weight / scale.float()
    if not dtype.is_floating_point:
        scaled.round_()
    return {"codes": scaled.clamp_(-largest, largest).to(dtype), "scale": scale}


def _quantized_nf4(weight: Tensor) -> dict[str, Tensor]:
    from torchao.quantization import to_nf4

    num_blocks = weight.numel() // _NF4_BLOCK
    made = to_nf4(weight.contiguous(), _NF4_BLOCK, _scales_per_factor(num_blocks))
    is_zero = weight.reshape(num_blocks, -1).abs().amax(1, keepdim=True) == 0  # 0 / 0 in torchao
    codes = made.quantized_data.view(num_blocks, -1).masked_fill(is_zero, _NF4_ZERO)
    return {
        "codes": codes.flatten(),
        "scale_codes": made.quantized_scalers,
        "factor": made.quantization_factor,
        "mean": made.scaler_mean,
        "levels": torch.cartesian_prod(made.nf4, made.nf4),  # of both weights of a byte
    }
