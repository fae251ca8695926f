"""What every family promises, and that the base class carries others than those there are."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.models.tiny import FLUX, TEXT, TWO_TEXTS, WAN, write_configs
from torch import Tensor, nn

from longtake.config import ModelSection, TextSection
from longtake.errors import ModelError, RecipeError
from longtake.flow.shift import MuLine, ShiftRule
from longtake.models.added_module import BlockCall, attach, condition
from longtake.models.base import BlockInputs, Defaults, Family, LatentShape, family
from longtake.models.diffusers_family import share_attention
from longtake.models.numerics import keep_weights_in
from longtake.models.text import outline_text

_ENCODERS = {"tubelet": TextSection(max_tokens=4), "wan": TEXT, "flux": TWO_TEXTS}
_MODELS: dict[str, dict[str, Any]] = {
    "tubelet": {"hidden_size": 24, "num_blocks": 2, "num_heads": 2, "patch_size": [1, 2, 2]},
    "wan": WAN,
    "flux": FLUX,
}
_SHAPE = LatentShape(channels=3, num_frames=1, height=4, width=6)
_CONDITIONING = {
    "token_ids": torch.tensor([[3, 4, 0, 0]]),
    "prompt_embeds": torch.linspace(-1, 1, 48).square().view(1, 4, 12),
    "pooled_prompt_embeds": torch.linspace(-1, 1, 10).view(1, 10),
    "reference_latents": torch.linspace(1, -1, 72).view(1, 3, 1, 4, 6),
}
_NAMES = ["tubelet", "wan", "flux", "flux_kontext"]


class _Built(NamedTuple):
    family: Family
    model: nn.Module

    def velocity(self) -> Tensor:
        noisy = torch.linspace(-1, 1, 72).view(1, *_SHAPE)
        sigmas = torch.tensor([0.5])
        condition(self.model, noisy, sigmas, _CONDITIONING)
        return self.family.predict_velocity(self.model, noisy, sigmas, dict(_CONDITIONING))


def _build(name: str) -> _Built:
    torch.manual_seed(0)
    chosen, kind = family(name), name.removesuffix("_kontext")
    section = ModelSection(family=name, config=_MODELS[kind])
    model = chosen.build(section, [_SHAPE], outline_text(_ENCODERS[kind], chosen))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return _Built(chosen, model)


@pytest.mark.parametrize("name", _NAMES)
def test_every_block_is_called_by_the_function_that_is_given(name: str) -> None:
    """Once each and in order, while gradients are enabled; and nothing else changes."""
    built = _build(name)
    expected = built.velocity().detach()
    called: list[nn.Module] = []

    def call(block: Callable[..., Any], *inputs: Any) -> Any:
        assert isinstance(block, nn.Module)
        called.append(block)
        return block(*inputs)

    built.family.block.call_by(built.model, lambda *_: pytest.fail("it was replaced"))
    built.family.block.call_by(built.model, call)
    assert torch.equal(built.velocity(), expected)
    assert called == list(built.family.blocks(built.model))
    with torch.no_grad():
        assert torch.equal(built.velocity(), expected)
    assert len(called) == len(built.family.blocks(built.model))


class Doubles(nn.Module):
    """Doubles the tokens after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[BlockInputs] = []

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        self.seen.append(inputs)
        after = call(inputs)
        return replace(after, tokens=after.tokens * 2)


@pytest.mark.parametrize("name", _NAMES)
def test_what_blocks_see_is_named_and_can_be_changed(name: str) -> None:
    """[B, T, D] of the family's width; what is returned is what the next block sees."""
    built, module = _build(name), Doubles()
    expected = built.velocity().detach()
    names = {id(each): key for key, each in built.model.named_modules()}
    blocks = [names[id(each)] for each in built.family.blocks(built.model)]
    attach(built.model, {"own": module}, built.family, {"own": blocks[-1:]}, torch.float32)
    with torch.no_grad():
        assert not torch.allclose(built.velocity(), expected)  # called by keywords, too
    changed = built.velocity()
    assert not torch.allclose(changed, expected)
    [_, seen] = module.seen
    width, num_tokens = (
        built.family.block.width(built.model),
        built.family.block.num_tokens(built.model, _SHAPE),
    )
    more = {"tubelet": 4, "flux_kontext": num_tokens}.get(name, 0)
    assert seen.tokens.shape == (1, num_tokens + more, width)
    assert (seen.name, seen.index) == (blocks[-1], len(blocks) - 1)
    assert seen.temb is not None
    assert seen.temb.shape[::2] == (1, width) if seen.temb.ndim == 3 else (1, width)
    assert (seen.text is None) == (seen.rope is None) == (name == "tubelet")
    if seen.text is not None:
        assert seen.text.shape[::2] == (1, width)


@pytest.mark.parametrize("name", _NAMES)
def test_weights_in_bf16_take_inputs_in_fp32(name: str) -> None:
    """Latents, embeddings and references are cast at the family's edge; every weight trains."""
    built = _build(name)
    expected = built.velocity().detach()
    keep_weights_in(built.model, torch.bfloat16)
    velocity = built.velocity()
    assert (velocity.float() - expected).norm() < 0.1 * expected.norm()
    torch.autograd.backward(velocity.float().square().mean())
    for parameter_name, weight in built.model.named_parameters():
        assert weight.grad is not None, parameter_name
        assert weight.grad.dtype == weight.dtype
        assert weight.grad.any(), parameter_name


@pytest.mark.parametrize("name", _NAMES)
def test_lora_targets_name_linear_layers_of_every_block(name: str) -> None:
    built = _build(name)
    for block in built.family.blocks(built.model):
        linear = [key for key, each in block.named_modules() if isinstance(each, nn.Linear)]
        found = [key for key in linear if key.endswith(tuple(built.family.block.lora_targets))]
        assert found
    every = {key for key, _ in built.model.named_modules()}
    for target in built.family.block.lora_targets:
        assert any(key.endswith(target) for key in every)


@pytest.mark.parametrize(
    ("name", "hint"), [("wann", r"did you mean wan\?"), ("qqq", r"no name is near\.")]
)
def test_an_unknown_family_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=f"{hint} Known: flux, .*, wan"):
        family(name)


def test_importing_the_models_imports_no_heavy_library() -> None:
    """Loading diffusers or transformers takes seconds; a run on pixels and words needs neither."""
    modules = ["base", "wan", "flux", "tubelet", "components"]
    imports = ", ".join(f"longtake.models.{module}" for module in modules)
    code = f"import sys, {imports}; print({{'diffusers', 'transformers'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


_OWN = """
from longtake.models.base import Family
from longtake.models.diffusers_family import DiffusersFamily
from longtake.models.wan import Wan


class Mine(Wan):
    label = "Mine"


class Unfinished(DiffusersFamily):
    label = "Unfinished"


class NoFamily: ...
"""


def test_a_family_can_be_a_class_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_family.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_family", raising=False)
    assert getattr(family("my_family:Mine"), "label") == "Mine"  # noqa: B009 - a family's own
    with pytest.raises(RecipeError, match=r"'my_family:NoFamily' is not a Family\. Make it"):
        family("my_family:NoFamily")
    lacks = r"lacks codec_class, frozen, parts, .*fitted_config\(\).* See Family in"
    with pytest.raises(RecipeError, match=lacks):
        family("my_family:Unfinished")


class _Attention(nn.Module):
    processor: Any

    def set_processor(self, processor: Any) -> None:
        """As diffusers' have it."""
        self.processor = processor


def test_attention_that_cannot_be_shared_is_refused() -> None:
    """Some of diffusers' attention backends do not go through torch's own function."""
    attention = _Attention()
    attention.processor = lambda attn, tokens: tokens
    share_attention(attention, cast("Any", SimpleNamespace(size=2)))
    with pytest.raises(ModelError, match=r'backend "native", or parallel\.context = 1'):
        attention.processor(attention, torch.ones(1, 2, 3))


_DEV = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
_SCHNELL = {"use_dynamic_shifting": False, "shift": 1.0, "base_shift": 0.5, "max_shift": 1.15}
_UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 7.0,
    "use_dynamic_shifting": False,
}


@pytest.mark.parametrize(
    ("name", "scheduler", "guidance_embeds", "expected"),
    [
        ("wan", _UNIPC, None, Defaults(ShiftRule(7.0), 5.0, 50, 0.1, 512)),
        ("flux", _DEV, True, Defaults(ShiftRule(MuLine()), 3.5, 28, 0.0, 512)),
        ("flux_kontext", _DEV, True, Defaults(ShiftRule(MuLine()), 2.5, 28, 0.0, 512)),
        ("flux", _SCHNELL, False, Defaults(ShiftRule(1.0), 1.0, 4, 0.0, 256)),
        ("flux", _DEV, False, Defaults(ShiftRule(MuLine()), 5.0, 28, 0.1, 512)),
    ],
)
def test_defaults_are_those_of_the_release(
    name: str,
    scheduler: dict[str, Any],
    guidance_embeds: bool | None,
    expected: Defaults,
    tmp_path: Path,
) -> None:
    """FLUX.1-schnell is told from a model that is not distilled by its scheduler."""
    config = {} if guidance_embeds is None else {"guidance_embeds": guidance_embeds}
    release = {"scheduler/scheduler_config.json": scheduler, "transformer/config.json": config}
    section = ModelSection(family=name, pretrained=write_configs(tmp_path, release))
    assert family(name).defaults(section) == expected


@pytest.mark.parametrize(
    ("repository", "shift"),
    [("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 3.0), ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 5.0)],
)
def test_shipped_releases_need_no_download(repository: str, shift: float) -> None:
    found = family("wan").defaults(ModelSection(family="wan", pretrained=repository)).shift
    assert found == ShiftRule(shift)
