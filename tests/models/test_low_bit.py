"""Products of 8-bit numbers: exact but for the rounding, near enough for training, nothing kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake.config import Quantization, TrainableSection
from longtake.models.low_bit import can_multiply, product, product_gradient, quantized_rows
from longtake.models.quantized import quantize_linears
from longtake.models.trainable import add_lora

_KINDS: tuple[Quantization, ...] = ("int8_dynamic", "fp8_dynamic")
_DTYPES = {"int8_dynamic": torch.int8, "fp8_dynamic": torch.float8_e4m3fn}


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def _layer(kind: Quantization, num_inputs: int = 64, num_outputs: int = 48) -> Any:
    host = nn.Sequential(nn.Linear(num_inputs, num_outputs)).requires_grad_(False)
    quantize_linears(host, kind)
    return host[0]


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
def test_products_are_those_of_the_rounded_matrices(dtype: torch.dtype) -> None:
    """With a scale per row: the row of zeros stays zero, and a large row spoils no other one."""
    torch.manual_seed(1)
    inputs, weight, gradient = torch.randn(33, 64), torch.randn(48, 64), torch.randn(33, 48)
    inputs[3] = 0
    inputs[4] *= 1e4
    codes, scale = quantized_rows(weight, dtype)
    rounded = codes.double() * scale
    rows, scale_of_rows = quantized_rows(inputs, dtype)
    expected = (rows.double() * scale_of_rows) @ rounded.t()
    found = product(inputs, codes, scale).double()
    torch.testing.assert_close(
        found / scale_of_rows, expected / scale_of_rows, rtol=1e-5, atol=0.01
    )
    rows, scale_of_rows = quantized_rows(gradient * scale.t(), dtype)
    expected = (rows.double() * scale_of_rows) @ codes.double()
    found = product_gradient(gradient, codes, scale)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "most"), [("int8_dynamic", 0.02), ("fp8_dynamic", 0.06)])
def test_gradients_of_a_lora_are_near_those_of_exact_weights(
    kind: Quantization, most: float
) -> None:
    """In three residual blocks with norms, whose activations have an outlying channel."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(128), nn.Linear(128, 512)
            self.down = nn.Linear(512, 128)

        def forward(self, tokens: Tensor) -> Tensor:
            changed: Tensor = self.down(nn.functional.gelu(self.up(self.norm(tokens))))
            return tokens + changed

    def gradients(kind: Quantization | None) -> list[Tensor]:
        torch.manual_seed(2)
        model = nn.Sequential(Block(), Block(), Block()).requires_grad_(False)
        if kind is not None:
            quantize_linears(model, kind)
        names = [f"{block}.{layer}" for block in range(3) for layer in ("up", "down")]
        add_lora(model, names, TrainableSection(kind="lora", rank=4), torch.float32)
        trained = [each for each in model.parameters() if each.requires_grad]
        torch.manual_seed(3)
        for parameter in trained:
            nn.init.normal_(parameter, std=0.02)
        tokens, target = torch.randn(2, 32, 128), torch.randn(2, 32, 128)
        tokens[..., 5] *= 20
        (model(tokens) - target).square().mean().backward()
        return [each.grad for each in trained if each.grad is not None]

    exact, found = gradients(None), gradients(kind)
    assert len(exact) == len(found) == 12
    together = [torch.cat([each.flatten() for each in every]) for every in (found, exact)]
    assert _relative(together[0], together[1]) < most


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(16, 64), (17, 72)])
def test_what_cannot_be_multiplied_in_8_bits_is_dequantised(
    kind: Quantization, num_rows: int, num_inputs: int
) -> None:
    layer, inputs = _layer(kind, num_inputs), torch.randn(num_rows, num_inputs)
    assert not can_multiply(num_rows, layer.codes)
    expected = nn.functional.linear(inputs, layer.weight_as(torch.float32), layer.bias)
    torch.testing.assert_close(layer(inputs), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("under_autocast", [False, True])
def test_a_recomputed_layer_has_the_same_gradient_and_keeps_nothing(
    kind: Quantization, under_autocast: bool
) -> None:
    torch.manual_seed(3)
    layer, inputs, saved, found = _layer(kind), torch.randn(2, 20, 64), list[Tensor](), []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def recomputed(tokens: Tensor) -> Any:
        return checkpoint(layer, tokens, use_reentrant=False)

    for call in (layer, recomputed):
        saved.clear()
        tokens = inputs.clone().requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=under_autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            output = call(tokens)
        assert call is not layer or not saved
        assert output.dtype == (torch.bfloat16 if under_autocast else torch.float32)
        output.square().sum().backward()
        found.append(tokens.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    exact = inputs.clone().requires_grad_()
    exact_output: Any = nn.functional.linear(exact, layer.weight_as(torch.float32), layer.bias)
    exact_output.square().sum().backward()
    assert found[0] is not None
    assert exact.grad is not None
    assert 0 < _relative(found[0], exact.grad) < 0.06


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
@pytest.mark.parametrize("kind", _KINDS)
def test_a_compiled_block_multiplies_alike_without_a_break(kind: Quantization) -> None:
    torch.manual_seed(4)
    block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False)
    quantize_linears(block, kind)
    inputs, found = torch.randn(2, 16, 64), []
    alone = torch.compile(block, dynamic=False, fullgraph=True, backend="eager")
    assert _relative(alone(inputs), block(inputs)) < 0.01  # no gradient: a LoRA's first block
    for call in (block, torch.compile(block, dynamic=False, fullgraph=True)):
        tokens = inputs.clone().requires_grad_()
        output = call(tokens)
        output.square().sum().backward()
        assert tokens.grad is not None
        found.append((output.detach(), tokens.grad))
    # A compiled norm may round an input to the next code.
    assert all(_relative(*both) < 0.01 for both in zip(found[1], found[0], strict=True))
