"""What every family promises of its blocks: they can be called by another, and their tokens had."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from longtake.config import CodecSection, ModelSection, PooledSection, TextSection
from longtake.models.base import Conditioning, Family, LatentShape, family
from longtake.models.codec import outline_codec
from longtake.models.numerics import keep_weights_in
from longtake.models.text import outline_text

_T5 = {"d_model": 12, "d_kv": 6, "d_ff": 12, "num_layers": 1, "num_heads": 2}
_CLIP = {
    "hidden_size": 10,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_ENCODERS = {
    "tubelet": TextSection(max_tokens=4, max_words=6),
    "wan": TextSection(kind="transformers", config=_T5, max_tokens=4),
    "flux": TextSection(
        kind="transformers",
        class_name="T5EncoderModel",
        config=_T5,
        max_tokens=4,
        pooled=PooledSection(config=_CLIP),
    ),
}
_MODELS: dict[str, dict[str, Any]] = {
    "tubelet": {"hidden_size": 24, "num_blocks": 2, "num_heads": 2, "patch_size": [1, 2, 2]},
    "wan": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "ffn_dim": 16,
        "freq_dim": 8,
        "num_layers": 2,
    },
    "flux": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "axes_dims_rope": [4, 4, 4],
        "num_layers": 1,
        "num_single_layers": 1,
    },
}
_SHAPE = LatentShape(channels=3, num_frames=1, height=4, width=6)
_TOLD = {
    "token_ids": torch.tensor([[3, 4, 0, 0]]),
    "prompt_embeds": torch.full((1, 4, 12), 0.5),
    "pooled_prompt_embeds": torch.full((1, 10), 0.5),
    "reference_latents": torch.full((1, 3, 1, 4, 6), 0.5),
}
_NAMES = ["tubelet", "wan", "flux", "flux_kontext"]


class _Asked(NamedTuple):
    family: Family
    model: nn.Module
    name: str

    def velocity(self) -> Tensor:
        noisy = torch.linspace(-1, 1, 72).view(1, *_SHAPE)
        told: Conditioning = dict(_TOLD)
        return self.family.predict_velocity(self.model, noisy, torch.tensor([0.5]), told)


def _build(name: str, *, weights: bool = True) -> _Asked:
    torch.manual_seed(0)
    chosen, kind = family(name), name.removesuffix("_kontext")
    section = ModelSection(family=name, config=_MODELS[kind])
    text = outline_text(_ENCODERS[kind])
    model = chosen.build(section, [_SHAPE], text, weights=weights)
    for parameter in model.parameters():
        if weights and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return _Asked(chosen, model, name)


@pytest.mark.parametrize("name", _NAMES)
def test_every_block_is_called_by_whoever_is_put_in_charge(name: str) -> None:
    """Once each and in order, while gradients are enabled; and nothing else changes."""
    asked = _build(name)
    expected = asked.velocity().detach()
    called: list[nn.Module] = []

    def call(block: Callable[..., Any], *inputs: Any) -> Any:
        assert isinstance(block, nn.Module)
        called.append(block)
        return block(*inputs)

    asked.family.call_blocks_by(asked.model, call)
    assert torch.equal(asked.velocity(), expected)
    assert called == list(asked.family.blocks(asked.model))
    with torch.no_grad():
        assert torch.equal(asked.velocity(), expected)
    assert len(called) == len(asked.family.blocks(asked.model))


@pytest.mark.parametrize("name", _NAMES)
def test_a_second_one_in_charge_replaces_the_first(name: str) -> None:
    """So that a policy can be changed."""
    asked = _build(name)

    def refuse(block: Callable[..., Any], *inputs: Any) -> Any:
        raise AssertionError

    asked.family.call_blocks_by(asked.model, refuse)
    asked.family.call_blocks_by(asked.model, lambda block, *inputs: block(*inputs))
    asked.velocity()


@pytest.mark.parametrize("name", _NAMES)
def test_tokens_can_be_taken_out_of_a_blocks_output_and_put_back(name: str) -> None:
    """[B, T, D] of the family's width; what goes back in is what the next block sees."""
    asked = _build(name)
    seen: list[Tensor] = []
    expected = asked.velocity().detach()

    def double(module: nn.Module, inputs: object, output: Any) -> Any:
        tokens = asked.family.block_tokens(output)
        seen.append(tokens)
        return asked.family.with_tokens(output, tokens * 2)

    last = asked.family.blocks(asked.model)[-1]
    handle = last.register_forward_hook(double)
    changed = asked.velocity()
    handle.remove()
    assert seen[0].shape[::2] == (1, asked.family.width(asked.model))
    assert not torch.allclose(changed, expected)
    num_tokens = asked.family.num_tokens(asked.model, _SHAPE)
    assert seen[0].shape[1] == num_tokens + {"tubelet": 4, "flux_kontext": num_tokens}.get(name, 0)


@pytest.mark.parametrize("name", _NAMES)
def test_weights_in_bf16_take_whatever_comes_in_fp32(name: str) -> None:
    """Latents, embeddings and references are cast at the family's edge; every weight learns."""
    asked = _build(name)
    expected = asked.velocity().detach()
    keep_weights_in(asked.model, torch.bfloat16)
    velocity = asked.velocity()
    assert (velocity.float() - expected).norm() < 0.1 * expected.norm()
    torch.autograd.backward(velocity.float().square().mean())
    gradients = [weight.grad for weight in asked.model.parameters() if weight.grad is not None]
    assert len(gradients) == len(list(asked.model.parameters()))
    dtypes = [weight.dtype for weight in asked.model.parameters()]
    assert [gradient.dtype for gradient in gradients] == dtypes


@pytest.mark.parametrize("name", _NAMES)
def test_lora_targets_name_linear_layers_of_every_block(name: str) -> None:
    """A recipe for LoRA needs to name none."""
    asked = _build(name)
    for block in asked.family.blocks(asked.model):
        linear = [key for key, each in block.named_modules() if isinstance(each, nn.Linear)]
        found = [key for key in linear if key.endswith(tuple(asked.family.lora_targets))]
        assert found
    every = {key for key, _ in asked.model.named_modules()}
    for target in asked.family.lora_targets:
        assert any(key.endswith(target) for key in every)


@pytest.mark.parametrize("name", _NAMES)
def test_an_outline_is_the_same_model_without_its_values(name: str) -> None:
    """Same names, shapes and dtypes, all on the meta device."""
    real, outline = _build(name).model, _build(name, weights=False).model

    def shapes(model: nn.Module) -> dict[str, Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors}

    assert shapes(outline) == shapes(real)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}


def test_an_outlined_codec_and_text_answer_for_shapes() -> None:
    """What the families are built from is there before any weight is."""
    assert outline_text(_ENCODERS["flux"]).pooled_dim == 10
    assert outline_text(_ENCODERS["wan"]).embed_dim == 12
    assert outline_text(_ENCODERS["tubelet"]).vocabulary_size == 9
    assert outline_codec(CodecSection()).channels == 3
