"""Frozen linear layers with weights in 4 or 8 bits: quantised when read, dequantised when used.

A quantised layer keeps its weight in buffers that no state dict has. The forward and the backward
pass each dequantise it, so that autograd keeps no dequantised weight; or they multiply in 8 bits
(`low_bit`).
"""

import importlib.util
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.config import Quantization
from longtake.errors import RecipeError
from longtake.models import low_bit

_NF4_BLOCK = 64
"""Number of weights that share a scale in the nf4 format, as in QLoRA (Dettmers et al., 2023)."""
_NF4_SCALES = 256  # the most scales that share a factor, by which they are quantised themselves
_NF4_ZERO = 0x77  # two weights of level 7, which is 0
_DYNAMIC = "_dynamic"  # ending of kinds that multiply in 8 bits
_ROWS: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Number formats with one scale per row: the dtype of the codes."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "int8": ("codes", "scale"),
    "fp8": ("codes", "scale"),
    "nf4": ("codes", "scale_codes", "factor", "mean", "levels"),
}
"""Names of the buffers that replace a quantised layer's weight, by number format."""
_ONE_AT_A_TIME = Lock()
"""Lock that lets threads quantise one weight at a time, which takes several times its memory."""


class FrozenLinear(nn.Linear):
    """Linear layer whose frozen weight is looked up again in the backward pass.

    autograd keeps no reference to the weight, which may be elsewhere between the two passes.
    """

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        given = _as_autocast_has_it(inputs)
        return _FrozenProduct.apply(given, self)  # type: ignore[no-untyped-call]


def _as_autocast_has_it(inputs: Tensor) -> Tensor:
    device = inputs.device.type
    # autocast converts the inputs of torch's own operations, not those of autograd functions.
    enabled = torch.is_autocast_enabled(device)
    return inputs.to(torch.get_autocast_dtype(device)) if enabled else inputs


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FrozenLinear) -> Tensor:
        # The layer and not its weight: a saved tensor would stay in memory, and streaming would
        # overwrite it with another block's before the backward pass.
        ctx.layer = layer
        bias: Tensor | None = layer.bias
        if bias is not None:
            bias = bias.to(inputs.dtype)
        return F.linear(inputs, layer.weight_as(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return _product_gradient(gradient, ctx.layer.weight_as(gradient.dtype)), None


def _product_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    rows = gradient.reshape(-1, gradient.shape[-1]).mm(weight)
    return rows.view(*gradient.shape[:-1], -1)


class QuantizedLinear(FrozenLinear):
    """Frozen linear layer whose weight is stored in fewer bits.

    It has no parameter `weight`; that attribute is the dequantised weight, made at each access.
    """

    kind: str
    """Number format of the stored weight: "int8", "fp8" or "nf4"."""
    is_dynamic: bool
    """True if inputs and gradients are quantised as well, and multiplied in 8 bits."""
    dtype: torch.dtype
    """Dtype that the layer's weight had before it was quantised."""
    codes: Tensor

    @property
    def weight_bytes(self) -> int:
        """Bytes that the layer's weight had before it was quantised."""
        return self.in_features * self.out_features * self.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        # For code that reads a linear layer's weight, such as merging and DoRA's norms.
        if name == "weight" and "weight" not in self._parameters:
            return self.weight_as(self.dtype)
        return super().__getattr__(name)

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Quantise a weight into the layer's buffers, on the layer's device."""
        with _ONE_AT_A_TIME:
            exact = weight.to(self.codes.device, self.dtype).float()
            made = (
                _quantized_nf4(exact) if self.kind == "nf4" else _quantized_rows(exact, self.kind)
            )
            for buffer, value in zip(self.stored(), made, strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def load_codes(self, codes: Tensor, scale: Tensor) -> bool:
        """Take a weight's codes as they are, and its scales [rows, 1] rounded to bf16.

        False, and nothing is taken, if the layer has another number format.
        """
        if self.kind == "nf4" or codes.dtype != self.codes.dtype:
            return False
        self.codes.copy_(codes)
        self.get_buffer("scale").copy_(scale)
        return True

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        return _dequantized(self.kind, self.stored(), self.in_features, dtype)

    def stored(self) -> list[Tensor]:
        return [getattr(self, name) for name in _NAMES[self.kind]]

    def forward(self, inputs: Tensor) -> Tensor:
        num_rows = inputs.numel() // self.in_features
        if self.is_dynamic and low_bit.can_multiply(num_rows, self.codes):
            return self._multiplied(_as_autocast_has_it(inputs))
        if not torch.compiler.is_compiling():
            return super().forward(inputs)
        given = _as_autocast_has_it(inputs), self.stored(), self.bias, self.kind, self.out_features
        return _compiled_product(*given)

    def _multiplied(self, inputs: Tensor) -> Tensor:
        is_compiled = torch.compiler.is_compiling()
        weight = (None, *self.stored()) if is_compiled else (self, None, None)
        made: Tensor = low_bit.LowBitProduct.apply(inputs, *weight)  # type: ignore[no-untyped-call]
        bias: Tensor | None = self.bias
        return made if bias is None else made + bias.to(made.dtype)


def _dequantized(
    kind: str, stored: Sequence[Tensor], num_columns: int, dtype: torch.dtype
) -> Tensor:
    if kind == "int8":
        codes, scale = stored
        # Promoted within one kernel, which reads the codes and writes the weight once.
        return codes * scale.to(dtype)
    if kind == "fp8":  # torch promotes no float8
        codes, scale = stored
        return codes.to(dtype).mul_(scale.to(dtype))
    codes, scale_codes, factor, mean, levels = stored
    scales = scale_codes.view(len(factor), -1) / factor.unsqueeze(1) + mean
    # A byte holds two weights: `levels` is a table [256, 2] of all pairs of levels.
    pairs = F.embedding(codes.int(), levels.to(dtype))
    weight = pairs.view(-1, _NF4_BLOCK).mul_(scales.view(-1, 1).to(dtype))
    return weight.view(-1, num_columns)


# A compiled block must not see into the product: the compiler would dequantise once, and keep the
# weight for the backward pass. As a custom operation it is opaque.


@torch.library.custom_op("longtake::quantized_product", mutates_args=())
def _compiled_product(
    inputs: Tensor, stored: Sequence[Tensor], bias: Tensor | None, kind: str, num_rows: int
) -> Tensor:
    weight = _dequantized(kind, stored, inputs.shape[-1], inputs.dtype)
    return F.linear(inputs, weight, None if bias is None else bias.to(inputs.dtype))


@_compiled_product.register_fake
def _product_shape(
    inputs: Tensor, stored: Sequence[Tensor], bias: Tensor | None, kind: str, num_rows: int
) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], num_rows)


@torch.library.custom_op("longtake::quantized_product_gradient", mutates_args=())
def _compiled_gradient(
    gradient: Tensor, stored: Sequence[Tensor], kind: str, num_columns: int
) -> Tensor:
    return _product_gradient(gradient, _dequantized(kind, stored, num_columns, gradient.dtype))


@_compiled_gradient.register_fake
def _gradient_shape(
    gradient: Tensor, stored: Sequence[Tensor], kind: str, num_columns: int
) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], num_columns)


def _keep_stored(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, stored, _, ctx.kind, _ = inputs
    ctx.num_columns = given.shape[-1]
    ctx.save_for_backward(*stored)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    stored = list(ctx.saved_tensors)
    of_inputs = _compiled_gradient(gradient, stored, ctx.kind, ctx.num_columns)
    return of_inputs, [None] * len(stored), None, None, None


_compiled_product.register_autograd(_gradients, setup_context=_keep_stored)


def quantize_linears(module: nn.Module, kind: Quantization, key: str = "model.quantize") -> None:
    """Quantise every frozen linear layer inside a module, on any device, one after the other.

    On the meta device the layers get buffers without values, for `QuantizedLinear.load`. Layers
    that train, such as those of LoRA, and subclasses of nn.Linear stay as they are.

    Args:
        module: changed in place; each layer stays the same object.
        kind: number format of the weights.
        key: recipe key that asks for it, for messages.

    Raises:
        RecipeError: torchao is missing, or a layer's weights do not divide into blocks.
    """
    layers = frozen_linears(module)
    stored = kind.removesuffix(_DYNAMIC)
    if kind == "nf4":
        if importlib.util.find_spec("torchao") is None:
            raise RecipeError(
                f'{key} = "nf4" needs torchao, which is not installed. Install it with: pip '
                'install "longtake[eightbit]" (or: pip install torchao). "int8" and "fp8" need no '
                "torchao."
            )
        for name, layer in layers.items():
            if layer.weight.numel() % _NF4_BLOCK:
                raise RecipeError(
                    f'{key} = "nf4": {name} has {layer.out_features} x {layer.in_features} '
                    f"weights, and their number is not a multiple of {_NF4_BLOCK}, of which each "
                    'block has a scale. Set it to "int8" or "fp8".'
                )
    for linear in layers.values():
        weight = linear._parameters.pop("weight")
        assert weight is not None
        quantized: Any = linear
        # The same object with another class: names, hooks and references to the layer stay valid.
        quantized.__class__ = QuantizedLinear
        quantized.kind, quantized.is_dynamic = stored, stored != kind
        quantized.dtype = weight.dtype
        shapes = _shapes(stored, *weight.shape)
        for name, (shape, dtype) in zip(_NAMES[stored], shapes, strict=True):
            empty = torch.empty(shape, dtype=dtype, device=weight.device)
            quantized.register_buffer(name, empty, persistent=False)
        if not weight.is_meta:
            quantized.load(weight)


def frozen_linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the plain frozen linear layers inside a module, which can be quantised, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and not layer.weight.requires_grad
    }


def _shapes(
    kind: str, num_rows: int, num_columns: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of the buffers that replace a weight of these sizes."""
    if kind != "nf4":
        return [((num_rows, num_columns), _ROWS[kind]), ((num_rows, 1), torch.bfloat16)]
    num_blocks = num_rows * num_columns // _NF4_BLOCK
    return [
        ((num_rows * num_columns // 2,), torch.uint8),
        ((num_blocks,), torch.int8),
        ((num_blocks // _scales_per_factor(num_blocks),), torch.float32),
        ((), torch.float32),
        ((256, 2), torch.float32),
    ]


def _scales_per_factor(num_blocks: int) -> int:
    # torchao wants a whole number of scales for each factor.
    return next(size for size in range(_NF4_SCALES, 0, -1) if num_blocks % size == 0)


def _quantized_rows(weight: Tensor, kind: str) -> list[Tensor]:
    """Quantise a weight with a scale per row that bf16 can hold.

    Dequantising to bf16 then rounds only once.
    """
    dtype, largest = _ROWS[kind], low_bit.LARGEST_CODE[_ROWS[kind]]
    scale = weight.abs().amax(1, keepdim=True) / largest
    scale = scale.clamp(min=low_bit.LEAST_SCALE).bfloat16()
    scaled = weight / scale.float()
    if not dtype.is_floating_point:
        scaled.round_()
    # Clamped, because rounding the scale to bf16 may put a row's largest weight beyond the format.
    return [scaled.clamp_(-largest, largest).to(dtype), scale]


def _quantized_nf4(weight: Tensor) -> list[Tensor]:
    from torchao.quantization import to_nf4

    num_blocks = weight.numel() // _NF4_BLOCK
    made = to_nf4(weight.contiguous(), _NF4_BLOCK, _scales_per_factor(num_blocks))
    # torchao would divide 0 by 0 in such a block.
    is_zero = weight.reshape(num_blocks, -1).abs().amax(1, keepdim=True) == 0
    codes = made.quantized_data.view(num_blocks, -1).masked_fill(is_zero, _NF4_ZERO)
    return [
        codes.flatten(),
        made.quantized_scalers,
        made.quantization_factor,
        made.scaler_mean,
        torch.cartesian_prod(made.nf4, made.nf4),  # both weights of each byte
    ]
