"""Frozen linear layers in fewer bits: how near they are, what they keep, what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow, to_nf4

from longtake.config import Quantization, TrainableSection
from longtake.errors import RecipeError
from longtake.models.deferred_init import (
    DeferredWeights,
    deferred_parameters,
    on_meta,
    parameters_on_meta,
)
from longtake.models.numerics import main_dtype
from longtake.models.quantized import FrozenLinear, QuantizedLinear, quantize_linears
from longtake.models.stored_weights import Rows, StoredTensor
from longtake.models.trainable import add_lora, lora_state
from longtake.planner.profiler import measured

_CPU = torch.device("cpu")
_MOST_ERROR = {"int8": 0.01, "fp8": 0.04, "nf4": 0.1}
_KINDS: tuple[Quantization, ...] = ("int8", "fp8", "nf4")  # test_low_bit has the others


def _linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    linear = nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def _quantized(linear: nn.Linear, kind: Quantization) -> Any:
    holder = nn.Sequential(linear)
    quantize_linears(holder, kind)
    return holder[0]


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact.float()).norm() / exact.float().norm())


@pytest.mark.parametrize("kind", _KINDS)
def test_a_blocks_output_is_near_that_of_exact_weights(kind: Quantization) -> None:
    torch.manual_seed(3)
    linear, tokens = _linear(1024, 3072), torch.randn(16, 3072).bfloat16()
    exact = linear(tokens)
    assert 0 < _relative(_quantized(linear, kind)(tokens), exact) <= _MOST_ERROR[kind]
    block = FluxSingleTransformerBlock(256, 2, 128).requires_grad_(False)
    inputs = torch.randn(1, 8, 256), torch.randn(1, 4, 256), torch.randn(1, 256)
    before = torch.cat(block(*inputs), dim=1)
    quantize_linears(block, kind)
    assert 0 < _relative(torch.cat(block(*inputs), dim=1), before) <= _MOST_ERROR[kind]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_as_near_as_torchaos(kind: Quantization, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    linear = _linear(96, 640, dtype)
    weight = linear.weight.detach().clone()
    like = {
        "int8": lambda: Int8Tensor.from_hp(weight, PerRow()).dequantize(),
        "fp8": lambda: Float8Tensor.from_hp(weight, granularity=PerRow()).dequantize(),
        "nf4": lambda: to_nf4(weight.float(), 64, 240).get_original_weight(),
    }[kind]()
    mine = _quantized(linear, kind)
    assert _relative(mine.weight, weight) <= 1.03 * _relative(like, weight)
    if kind == "nf4" and dtype == torch.float32:
        torch.testing.assert_close(mine.weight, like, rtol=1e-6, atol=1e-8)
    assert mine.weight.dtype == dtype


@pytest.mark.parametrize("kind", _KINDS)
def test_rows_and_blocks_of_zeros_stay_zero(kind: Quantization) -> None:
    linear = _linear(8, 128, torch.float32)
    linear.weight[3] = 0
    assert (_quantized(linear, kind).weight[3] == 0).all()


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("under_autocast", [False, True])
def test_gradients_pass_as_through_the_dequantised_weight(
    kind: Quantization, under_autocast: bool
) -> None:
    """Kept or recomputed, and no weight is among what autograd saves."""
    torch.manual_seed(5)
    layer, saved = _quantized(_linear(48, 64, torch.float32), kind), list[Tensor]()
    plain = nn.Linear(64, 48).requires_grad_(False)
    plain.weight.copy_(layer.weight_as(torch.bfloat16 if under_autocast else torch.float32))
    plain.bias.copy_(layer.bias)
    inputs, gradients = torch.randn(2, 5, 64), []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def recomputed(tokens: Tensor) -> Any:
        return checkpoint(layer, tokens, use_reentrant=False)

    for call in (plain, layer, recomputed):
        saved.clear()
        tokens = inputs.clone().requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=under_autocast),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            output = call(tokens)
        assert call is not layer or not saved
        output.square().sum().backward()
        gradients.append(tokens.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.51), ("fp8", 0.51), ("nf4", 0.27)])
def test_a_quantised_layer_takes_a_byte_a_weight_or_half(kind: Quantization, most: float) -> None:
    """In buffers that are counted, and that no state dict has; its dtype is still known."""
    linear = _linear(1024, 1024)
    before = linear.weight.nbytes
    layer = _quantized(linear, kind)
    assert sum(buffer.nbytes for buffer in layer.buffers()) <= most * before
    assert list(layer.state_dict()) == ["bias"]
    assert main_dtype(layer) == torch.bfloat16


def test_layers_that_train_and_other_classes_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"trains": nn.Linear(64, 64), "own": Own(64, 64), "plain": nn.Linear(64, 64)}
    )
    model["own"].requires_grad_(False)
    model["plain"].requires_grad_(False)
    quantize_linears(model, "int8")
    assert [type(each) for each in model.values()] == [nn.Linear, Own, QuantizedLinear]
    assert issubclass(QuantizedLinear, FrozenLinear)


def test_a_layer_whose_weights_do_not_divide_into_blocks_is_refused() -> None:
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "second": nn.Linear(10, 24)})
    model.requires_grad_(False)
    with pytest.raises(RecipeError, match=r'model.quantize = "nf4": second has 24 x 10 weights'):
        quantize_linears(model, "nf4")
    assert type(model["first"]) is nn.Linear
    quantize_linears(model, "fp8")


@pytest.mark.parametrize("kind", _KINDS)
def test_lora_trains_on_quantised_layers(kind: Quantization) -> None:
    model = nn.Sequential(_linear(64, 64, torch.float32), _linear(64, 64, torch.float32))
    quantize_linears(model, kind)
    add_lora(model, ["0", "1"], TrainableSection(kind="lora", rank=4), torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model(torch.randn(3, 64)).square().sum().backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 4
    assert all(each.grad is not None and each.grad.any() for each in trained.values())
    assert lora_state(model).keys() == {f"{n}.lora_{x}.weight" for n in "01" for x in "AB"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself of much
def test_a_compiled_block_keeps_no_dequantised_weight() -> None:
    """It would otherwise: what forward and backward pass compute alike is computed once."""
    torch.manual_seed(6)
    block: Any = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    quantize_linears(block.requires_grad_(False), "nf4")
    inputs, found, saved = torch.randn(4, 16, 256), [], list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    for call in (block, torch.compile(block, dynamic=False)):
        tokens = inputs.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = call(tokens)
        output.square().sum().backward()
        found += [output.detach(), tokens.grad]
    assert sum(each.nbytes for each in saved) < 2 * (512 * 256 + 4 * 16 * 512 * 4)
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-4, atol=1e-5)


def _stored(model: nn.Module, folder: Path) -> dict[str, StoredTensor]:
    folder.mkdir(exist_ok=True)
    files = {}
    for name, weight in model.state_dict().items():
        files[name] = StoredTensor(folder / f"{name}.safetensors", (Rows(name),))
        save_file({name: weight}, files[name].file)
    return files


@pytest.mark.parametrize("kind", _KINDS)
def test_weights_that_come_from_files_are_those_quantised_in_memory(
    kind: Quantization, tmp_path: Path
) -> None:
    def build() -> Any:
        return nn.Sequential(_linear(64, 96), nn.LayerNorm(64).requires_grad_(False))

    whole = build()
    files = _stored(whole, tmp_path)
    with parameters_on_meta():
        later = build()
    deferred = deferred_parameters(later)
    later.requires_grad_(False)
    for model in (whole, later):
        quantize_linears(model, kind)
    unfilled = DeferredWeights(deferred, files)
    unfilled.give_memory(later, _CPU)
    unfilled.fill()
    assert later[0].weight.any()
    for model in (whole, later):
        model.eval()
    torch.testing.assert_close(later[0].weight, whole[0].weight, rtol=0, atol=0)
    torch.testing.assert_close(later[1].weight, whole[1].weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_is_never_whole_while_it_is_read(kind: Quantization, tmp_path: Path) -> None:
    """At most what it takes when quantised, and some weights at a time."""
    num_layers, width = 96, 256

    def build() -> nn.Module:
        return nn.Sequential(*(_linear(width, width) for _ in range(num_layers)))

    files = _stored(build(), tmp_path)
    with parameters_on_meta():
        model = build()
    unfilled = DeferredWeights(deferred_parameters(model), files)
    quantize_linears(model, kind)
    whole_bytes = num_layers * width * width * 2
    with measured(_CPU) as memory:
        unfilled.give_memory(model, _CPU)
        unfilled.fill()
    quantised_bytes = sum(buffer.nbytes for buffer in model.buffers())
    at_a_time = 4 * width * width * 2 + 50 * width * width  # read by threads, and being quantised
    assert memory.end_bytes < 0.55 * whole_bytes
    assert memory.peak_bytes <= quantised_bytes + at_a_time
    assert at_a_time < whole_bytes / 2


@pytest.mark.parametrize(
    ("model_class", "where"),
    [
        (FluxTransformer2DModel, "black-forest-labs/FLUX.1-dev"),
        (WanTransformer3DModel, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"),
    ],
)
def test_every_layer_of_the_released_models_can_be_quantised(model_class: Any, where: str) -> None:
    model = on_meta(model_class, where, "transformer").requires_grad_(False)
    quantize_linears(model, "nf4")
    assert not any(type(layer) is nn.Linear for layer in model.modules())
