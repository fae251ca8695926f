"""Streamed blocks compute bitwise what blocks do whose weights stay on the device."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from tests.build import LateCopies
from tests.models.tiny import make_transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake.config import ModuleSection, Quantization, TrainableSection
from longtake.models.added_module import condition
from longtake.models.base import Family, family
from longtake.models.experts import OtherExpert
from longtake.models.quantized import FrozenLinear, quantize_linears
from longtake.models.streamed import StreamedBlocks, streamed_bytes
from longtake.models.trainable import make_trainable, trained_state

_CPU = torch.device("cpu")
_LORA = TrainableSection(kind="lora", rank=4)
_STYLE = ModuleSection(module="examples.modules.style_residual:StyleResidual", options={"rank": 4})
_MODULE = TrainableSection(modules={"style": _STYLE})
_BLOCKS = {"wan": {"num_layers": 4}, "flux": {"num_single_layers": 3}}
_RUN: Mapping[str, Callable[..., Any]] = {
    "keep": lambda block, *args: block(*args),
    "recompute": lambda block, *args: checkpoint(block, *args, use_reentrant=False),
}


pytestmark = pytest.mark.usefixtures("at_root")


@pytest.fixture(autouse=True)
def _copies_as_late_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.models.streamed.CopyStream", LateCopies)


def _model(name: str, section: TrainableSection, quantize: Quantization | None = None) -> nn.Module:
    torch.manual_seed(3)
    model = make_transformer(name, **_BLOCKS[name])
    if quantize is not None:
        model.requires_grad_(False)
        for block in family(name).blocks(model):
            quantize_linears(block, quantize)
    make_trainable(model, family(name), section, 4)
    for parameter in model.parameters():  # LoRA's B is zero at first, and gradients would be, too
        if parameter.requires_grad:
            parameter.data.normal_(std=0.02)
    return model.train()


def _conditioning(name: str) -> dict[str, Tensor]:
    torch.manual_seed(4)
    given = {"prompt_embeds": torch.randn(2, 5, 16)}
    return given if name == "wan" else given | {"pooled_prompt_embeds": torch.randn(2, 8)}


def _steps(name: str, model: nn.Module, *, num_steps: int = 2) -> list[Tensor]:
    """Losses and gradients of some steps, and an output without gradients between them."""
    found, chosen, conditioning = list[Tensor](), family(name), _conditioning(name)
    for seed in range(num_steps):
        torch.manual_seed(seed)
        latents, sigmas = torch.randn(2, 4, 1, 8, 8), torch.rand(2)
        condition(model, latents, sigmas, conditioning)
        with torch.no_grad():
            found.append(chosen.predict_velocity(model, latents, sigmas, conditioning))
        condition(model, latents, sigmas, conditioning)
        loss: Any = chosen.predict_velocity(model, latents, sigmas, conditioning).square().mean()
        loss.backward()
        found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@cache
def _plain_steps(name: str, kind: str | None) -> list[Tensor]:
    return _steps(name, _model(name, _MODULE if kind is None else _LORA))


def _stream(chosen: Family, model: nn.Module, which: slice = slice(None)) -> StreamedBlocks:
    return StreamedBlocks(chosen.blocks(model)[which], _CPU)


@pytest.mark.parametrize("run", _RUN)
@pytest.mark.parametrize("name", ["wan", "flux"])
@pytest.mark.parametrize(
    ("section", "which"),
    [(_LORA, slice(None)), (_MODULE, slice(None)), (_LORA, slice(1, None, 2)), (_LORA, slice(1))],
    ids=["lora", "module", "some blocks", "one block"],
)
def test_streamed_losses_and_gradients_are_bitwise_the_same(
    run: str, name: str, section: TrainableSection, which: slice
) -> None:
    """The two buffers are overwritten by other blocks between forward and backward pass."""
    plain, model = _plain_steps(name, section.kind), _model(name, section)
    family(name).block.call_by(model, _RUN[run])
    _stream(family(name), model, which)
    streamed = _steps(name, model)
    assert len(plain) > 4
    assert any(gradient.any() for gradient in plain)
    torch.testing.assert_close(streamed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("run", _RUN)
@pytest.mark.parametrize(
    ("quantize", "autocast"), [("nf4", False), (None, True)], ids=["quantised", "autocast"]
)
def test_quantised_blocks_and_autocast_compute_the_same_from_streamed_weights(
    run: str, quantize: Quantization | None, autocast: bool
) -> None:
    plain, model = (_model("wan", _LORA, quantize) for _ in range(2))
    _stream(family("wan"), model)
    found = []
    for each in (plain, model):
        family("wan").block.call_by(each, _RUN[run])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(_steps("wan", each))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_blocks_hold_no_frozen_weight_while_they_wait() -> None:
    """Two buffers of the largest block are on the device, and biases, norms and LoRA."""
    model = _model("wan", _LORA)
    before = trained_state(model).keys()
    blocks = family("wan").blocks(model)
    sizes = [streamed_bytes(block) for block in blocks]
    linears = [layer for layer in blocks[0].modules() if type(layer) is nn.Linear]
    frozen = [each for each in linears if not each.weight.requires_grad]
    assert sizes[0] >= sum(each.weight.nbytes for each in frozen)
    streamed = _stream(family("wan"), model)
    layers = [layer for layer in model.modules() if isinstance(layer, FrozenLinear)]
    assert len(layers) == len(frozen) * len(blocks)
    assert all(layer.weight is None for layer in layers)
    assert sum(buffer.memory.nbytes for buffer in streamed._buffers) == 2 * max(sizes)
    assert trained_state(model).keys() == before
    _steps("wan", model, num_steps=1)
    assert sum(layer.weight is not None for layer in layers) == len(frozen)
    assert trained_state(model).keys() == before


def test_a_model_that_is_moved_away_and_back_streams_into_the_same_buffers() -> None:
    """As for samples in training: a block's weights are in the model when it is moved."""
    model = _model("wan", _LORA)
    streamed = _stream(family("wan"), model)
    _steps("wan", model, num_steps=1)
    apply: Any = model._apply
    apply(torch.clone)
    model.zero_grad()
    expected = _model("wan", _LORA)
    torch.testing.assert_close(_steps("wan", model), _steps("wan", expected), rtol=0, atol=0)
    buffers = {each.memory.untyped_storage().data_ptr() for each in streamed._buffers}
    layers = (layer for layer in model.modules() if isinstance(layer, FrozenLinear))
    there: list[Any] = [layer.weight for layer in layers]
    weights = [weight for weight in there if weight is not None]
    assert weights
    assert {weight.untyped_storage().data_ptr() for weight in weights} <= buffers


def test_buffers_are_given_back_until_a_block_is_called() -> None:
    """As of an expert that samples between two steps; later steps are bitwise as without."""
    model, expected = _model("wan", _LORA), _model("wan", _LORA)
    streamed = _stream(family("wan"), model)
    other = OtherExpert(model, "fp32", streamed)
    for _ in range(2):
        found, wanted = _steps("wan", model), _steps("wan", expected)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert len(streamed._buffers) == 2
        other.bring(_CPU)
        assert streamed._buffers == []
        layers = [each for each in model.modules() if isinstance(each, FrozenLinear)]
        assert all(layer.weight is None for layer in layers)
        for each in (model, expected):
            each.zero_grad()


def test_weights_on_the_meta_device_are_read_into_memory() -> None:
    whole, empty = _model("wan", _LORA), _model("wan", _LORA)
    stored = {name: each.clone() for name, each in whole.state_dict().items()}
    blocks = family("wan").blocks(empty)
    for block in blocks:
        for layer in block.modules():
            if type(layer) is nn.Linear and not layer.weight.requires_grad:
                layer.weight = nn.Parameter(layer.weight.detach().to("meta"), requires_grad=False)
    streamed = _stream(family("wan"), empty)
    with streamed.on_host():
        for name, parameter in empty.named_parameters():
            parameter.data.copy_(stored[name])
    torch.testing.assert_close(_steps("wan", empty), _steps("wan", whole), rtol=0, atol=0)
