"""Modules of the user's own are called where their Protocol says, and keep nothing alive."""

import copy
import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.config import ModuleSection
from longtake.errors import ModelError, RecipeError
from longtake.models.added_module import (
    Attend,
    BlockCall,
    added_modules,
    attach,
    block_names,
    build_module,
    condition,
    detach,
)
from longtake.models.base import AttentionInputs, BlockInputs, family
from longtake.models.tubelet import TubeletTransformer

_WIDTH = 12
_BLOCKS = ["blocks.0", "blocks.2"]
_FAMILY = family("tubelet")


class Probe(nn.Module):
    """Notes what it is asked, and returns what it is told to."""

    def __init__(self, returns: str = "changed") -> None:
        super().__init__()
        self.returns = returns
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.asked: list[str] = []
        self.dtypes: set[torch.dtype] = set()
        self.prepared: list[weakref.ref[Tensor]] = []

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A tensor of its own, of which a test can see how long it lives."""
        self.asked.append(f"prepare {' '.join(conditioning)}")
        made = self.weight * conditioning["pose_latents"].mean()
        self.dtypes.add(conditioning["pose_latents"].dtype)
        self.prepared.append(weakref.ref(made))
        return {"made": made}

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> Any:
        """The tokens and what was prepared, or what is wrong."""
        self.asked.append(block)
        assert inputs.temb is not None
        self.dtypes |= {inputs.tokens.dtype, inputs.temb.dtype}
        after = call(inputs)
        tokens = after.tokens
        self.dtypes.add(tokens.dtype)
        wrong = {"nothing": None, "tokens": tokens, "fewer": replace(after, tokens=tokens[:, 1:])}
        right = replace(after, tokens=tokens + inputs.prepared["made"])
        return wrong.get(self.returns, right)


def _model(
    returns: str = "changed", dtype: torch.dtype = torch.float32, own: torch.dtype | None = None
) -> tuple[nn.Module, Probe]:
    """A frozen tubelet of three blocks with a probe around the first and the last."""
    model = _bare().to(dtype)
    probe = Probe(returns).to(own or dtype)
    attach(model, {"probe": probe}, _FAMILY, {"probe": _BLOCKS}, own or dtype)
    return model, probe


def _bare() -> nn.Module:
    torch.manual_seed(0)
    model = TubeletTransformer(
        num_frames=1,
        height=4,
        width=4,
        vocabulary_size=4,
        patch_size=(1, 2, 2),
        hidden_size=_WIDTH,
        num_blocks=3,
        num_heads=2,
    )
    nn.init.normal_(model.tube_out.weight)
    return model.requires_grad_(False)


def _conditioning() -> dict[str, Tensor]:
    return {"token_ids": torch.tensor([[1, 2]]), "pose_latents": torch.ones(1, 3, 1, 4, 4)}


_NOISY, _SIGMAS = torch.linspace(-1, 1, 48).view(1, 3, 1, 4, 4), torch.tensor([0.5])


def _ask(model: nn.Module, *, prepared: bool = True) -> Tensor:
    if prepared:
        condition(model, _NOISY, _SIGMAS, _conditioning())
    return _FAMILY.predict_velocity(model, _NOISY, _SIGMAS, _conditioning())


def test_it_prepares_once_and_is_asked_around_each_of_its_blocks() -> None:
    model, probe = _model()
    torch.autograd.backward(_ask(model).square().mean())
    assert probe.asked == ["prepare token_ids pose_latents noisy_latents sigmas", *_BLOCKS]
    assert added_modules(model) == {"probe": probe}
    assert dict(model.named_parameters())["added_modules.probe.weight"] is probe.weight
    assert probe.weight.grad is not None
    assert probe.weight.grad.any()


class Numbered(nn.Module):
    """Says when it is asked, and multiplies what a block gets and returns."""

    def __init__(self, said: list[str], name: str) -> None:
        super().__init__()
        self.said, self.name = said, name

    def around(self, block: str, call: BlockCall, inputs: BlockInputs) -> BlockInputs:
        self.said.append(f"{self.name} before {block} {sorted(inputs.prepared)}")
        after = call(replace(inputs, tokens=inputs.tokens * 2))
        self.said.append(f"{self.name} after {block}")
        return replace(after, tokens=after.tokens / 2)

    def prepare(self, conditioning: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {self.name: conditioning["sigmas"]}


def test_of_several_modules_the_first_is_the_outermost() -> None:
    """Each with its own blocks and what it prepared itself."""
    model, said = _bare(), list[str]()
    modules = {name: Numbered(said, name) for name in ("outer", "inner")}
    attach(model, modules, _FAMILY, {"outer": _BLOCKS, "inner": _BLOCKS[:1]}, torch.float32)
    _ask(model)
    assert said == [
        "outer before blocks.0 ['outer']",
        "inner before blocks.0 ['inner']",
        "inner after blocks.0",
        "outer after blocks.0",
        "outer before blocks.2 ['outer']",
        "outer after blocks.2",
    ]
    assert added_modules(model) == modules


class Attending(nn.Module):
    def around_attention(self, block: str, attend: Attend, inputs: AttentionInputs) -> Tensor:
        return attend(inputs)


def test_attention_of_another_kind_is_refused() -> None:
    """The tubelet's is written out, so nothing could be called around it."""
    model = _bare()
    attach(model, {"ip": Attending()}, _FAMILY, {"ip": _BLOCKS}, torch.float32)
    with pytest.raises(ModelError, match=r"module ip has around_attention, but block blocks\.0"):
        _ask(model)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_it_is_given_is_in_its_own_dtype(dtype: torch.dtype, own: torch.dtype) -> None:
    model, probe = _model(dtype=dtype, own=own)
    seen: list[torch.dtype] = []
    last = model.get_submodule("blocks.2")
    last.register_forward_hook(lambda block, args, output: seen.append(output.dtype))
    _ask(model)
    assert probe.dtypes == {own}
    assert seen == [dtype]


def test_what_was_prepared_lives_no_longer_than_it_is_needed() -> None:
    """Until the next forward pass where a block might be recomputed; else until this one's end."""
    model, probe = _model()
    with torch.no_grad():
        _ask(model)
    gc.collect()
    assert probe.prepared[0]() is None
    torch.autograd.backward(_ask(model).sum())
    gc.collect()
    assert probe.prepared[1]() is not None
    _ask(model)
    gc.collect()
    assert probe.prepared[1]() is None


def test_the_conditioning_is_let_go_when_the_pass_begins() -> None:
    model, _ = _model()
    given = _conditioning()
    watched = weakref.ref(given["pose_latents"])
    condition(model, _NOISY, _SIGMAS, given)
    del given
    _ask(model, prepared=False)
    gc.collect()
    assert watched() is None


def test_a_forward_pass_without_its_own_conditioning_is_refused() -> None:
    """Also the second one: the first one's would be silently wrong."""
    model, _ = _model()
    _ask(model)
    with pytest.raises(ModelError, match=r"\(probe\) were not given .*condition\(model, noisy"):
        _ask(model, prepared=False)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("nothing", r"probe returned NoneType around block blocks\.0; its `around` must return"),
        ("tokens", r"probe returned Tensor around block blocks\.0"),
        ("fewer", r"probe returned tokens of \[1, 9, 12\] around .* came in, \[1, 10, 12\]"),
    ],
)
def test_a_module_that_returns_no_tokens_or_others_is_named(returns: str, message: str) -> None:
    model, _ = _model(returns)
    with pytest.raises(ModelError, match=message):
        _ask(model)


def test_taken_off_it_leaves_the_model_as_it_was() -> None:
    """No hook, no submodule; a model without one may be conditioned and is not changed by it."""
    model, probe = _model()
    with torch.no_grad():
        changed = _ask(model)
        detach(model)
        before = set(vars(model))
        plain = _ask(model)
    assert not torch.equal(plain, changed)
    assert len(probe.asked) == 3
    assert added_modules(model) == {}
    assert set(vars(model)) == before
    assert not any("forward" in vars(block) for block in _FAMILY.blocks(model))


def test_a_copy_of_the_model_has_a_module_of_its_own() -> None:
    """Its hooks lead to the copy's weights; also where a pass has left tensors with a graph."""
    model, probe = _model()
    before = _ask(model)
    copied = copy.deepcopy(model)
    assert torch.equal(_ask(copied), before)
    with torch.no_grad():
        dict(copied.named_parameters())["added_modules.probe.weight"].add_(1)
    assert not torch.equal(_ask(copied), before)
    assert torch.equal(_ask(model), before)
    assert added_modules(copied)["probe"] is not probe


def test_blocks_are_found_by_their_names_in_the_model() -> None:
    """In the model's order, each once; a pattern that matches none is named with the nearest."""
    model, _ = _model()
    assert block_names(model, _FAMILY, ["*"], "some.blocks") == [
        "caption_block",
        *(f"blocks.{n}" for n in "012"),
    ]
    assert block_names(model, _FAMILY, ["*.2", "blocks.0", "blocks.[12]"], "some.blocks") == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    message = r"^some\.blocks: 'block\.1' matches no block .* did you mean blocks\.1"
    with pytest.raises(RecipeError, match=message):
        block_names(model, _FAMILY, ["*", "block.1"], "some.blocks")


_POSE = "examples.modules.pose_adapter:PoseAdapter"


def _build(module: str, name: str = "own", **options: Any) -> nn.Module:
    return build_module(name, ModuleSection(module=module, options=options), 24, ["blocks.0"], 4)


@pytest.mark.usefixtures("at_root")
def test_it_is_built_with_the_arguments_that_it_names() -> None:
    module = _build(_POSE, hidden_size=8)
    assert module.state_dict()["read.0.weight"].shape == (8, 16)
    style = _build("examples.modules.style_residual:StyleResidual", rank=3)  # no latent_channels
    assert style.state_dict()["down.0.weight"].shape == (3, 24)


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (_POSE, {"hidden": 8}, r"options\.hidden is not an option of PoseAdapter; .*hidden_size"),
        (_POSE, {"width": 8}, r"options\.width is not an option of PoseAdapter"),
        (_POSE, {"hidden_size": "8"}, r"modules\.own\.options does not fit PoseAdapter\. TypeErr"),
        (_POSE, {"name": "values"}, r"modules\.values: PyTorch's modules have an attribute values"),
        ("collections.abc:Sized", {}, r"'collections\.abc:Sized' is not a torch\.nn\.Module"),
        ("torch.nn:Linear", {}, r"no method around\(self, block, call, inputs\).* See AddedModule"),
    ],
)
def test_what_is_wrong_with_it_is_said(module: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _build(module, **options)
