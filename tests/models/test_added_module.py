"""A module of the user's own is found, called where its Protocol says, and keeps nothing alive."""

import copy
import gc
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.config import TrainableSection
from longtake.errors import ModelError, RecipeError
from longtake.models.added_module import (
    added_module,
    attach,
    block_names,
    build_module,
    condition,
    detach,
)
from longtake.models.base import family
from longtake.models.tubelet import TubeletTransformer

_WIDTH = 12
_BLOCKS = ["blocks.0", "blocks.2"]
_FAMILY = family("tubelet")


class Probe(nn.Module):
    """Notes what it is asked, and returns what it is told to."""

    def __init__(self, returns: str = "tokens") -> None:
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

    def forward(self, block: str, tokens: Tensor, prepared: Mapping[str, Tensor]) -> Any:
        """The tokens and what was prepared, or what is wrong."""
        self.asked.append(block)
        self.dtypes.add(tokens.dtype)
        wrong = {"nothing": None, "fewer": tokens[:, 1:]}
        return wrong.get(self.returns, tokens + prepared["made"])


def _model(
    returns: str = "tokens", dtype: torch.dtype = torch.float32, own: torch.dtype | None = None
) -> tuple[nn.Module, Probe]:
    """A frozen tubelet of three blocks with a probe after the first and the last."""
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
    model.to(dtype).requires_grad_(False)
    probe = Probe(returns).to(own or dtype)
    attach(model, probe, _FAMILY, _BLOCKS, own or dtype)
    return model, probe


def _conditioning() -> dict[str, Tensor]:
    return {"token_ids": torch.tensor([[1, 2]]), "pose_latents": torch.ones(1, 3, 1, 4, 4)}


def _ask(model: nn.Module, *, prepared: bool = True) -> Tensor:
    if prepared:
        condition(model, _conditioning())
    noisy = torch.linspace(-1, 1, 48).view(1, 3, 1, 4, 4)
    return _FAMILY.predict_velocity(model, noisy, torch.tensor([0.5]), _conditioning())


def test_it_prepares_once_and_is_asked_after_each_of_its_blocks() -> None:
    model, probe = _model()
    torch.autograd.backward(_ask(model).square().mean())
    assert probe.asked == ["prepare token_ids pose_latents", *_BLOCKS]
    assert added_module(model) is probe
    assert dict(model.named_parameters())["added_module.weight"] is probe.weight
    assert probe.weight.grad is not None
    assert probe.weight.grad.any()


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
    condition(model, given)
    del given
    _ask(model, prepared=False)
    gc.collect()
    assert watched() is None


def test_a_forward_pass_without_its_own_conditioning_is_refused() -> None:
    """Also the second one: the first one's would be silently wrong."""
    model, _ = _model()
    _ask(model)
    with pytest.raises(ModelError, match=r"Probe was not given .*condition\(model, conditioning\)"):
        _ask(model, prepared=False)


@pytest.mark.parametrize(("returns", "got"), [("nothing", "NoneType"), ("fewer", r"\[1, 9, 12\]")])
def test_a_module_that_returns_no_tokens_is_named(returns: str, got: str) -> None:
    model, _ = _model(returns)
    message = rf"Probe returned {got} after block blocks\.0; .*\[1, 10, 12\]"
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
    assert added_module(model) is None
    assert set(vars(model)) == before


def test_a_copy_of_the_model_has_a_module_of_its_own() -> None:
    """Its hooks lead to the copy's weights; also where a pass has left tensors with a graph."""
    model, probe = _model()
    before = _ask(model)
    copied = copy.deepcopy(model)
    assert torch.equal(_ask(copied), before)
    with torch.no_grad():
        dict(copied.named_parameters())["added_module.weight"].add_(1)
    assert not torch.equal(_ask(copied), before)
    assert torch.equal(_ask(model), before)
    assert added_module(copied) is not probe


def test_blocks_are_found_by_their_names_in_the_model() -> None:
    """In the model's order, each once; a pattern that matches none is named with the nearest."""
    model, _ = _model()
    assert block_names(model, _FAMILY, ["*"]) == ["caption_block", *(f"blocks.{n}" for n in "012")]
    assert block_names(model, _FAMILY, ["*.2", "blocks.0", "blocks.[12]"]) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]
    message = r"trainable\.blocks: 'block\.1' matches no block .* did you mean blocks\.1"
    with pytest.raises(RecipeError, match=message):
        block_names(model, _FAMILY, ["*", "block.1"])


_ROOT = Path(__file__).resolve().parents[2]
_POSE = "examples.modules.pose_adapter:PoseAdapter"
_FILES = {
    "broken": "1 / 0",
    "in_need": "import no_such",
    "narrow": "import torch\nclass Narrow(torch.nn.Module):\n"
    "    def __init__(self, width): pass\n"
    "    def prepare(self, conditioning): return {}\n",
}


def _build(module: str, **options: Any) -> nn.Module:
    return build_module(TrainableSection(module=module, options=options), 24, ["blocks.0"], 4)


def test_it_is_found_from_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that is installed, and with its options; sys.path is left as it was."""
    monkeypatch.chdir(_ROOT)
    path = list(sys.path)
    module = _build(_POSE, hidden_size=8)
    assert type(module).__name__ == "PoseAdapter"
    assert module.state_dict()["read.0.weight"].shape == (8, 16)
    assert sys.path == path


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ("exampels.modules.pose:A", {}, r": /.* has no module exampels; did you mean examples\?"),
        ("examples.modles.pose:A", {}, r"examples has no module modles; did you mean modules\?"),
        (
            "examples.modules.pose_adaptor:PoseAdapter",
            {},
            r"examples\.modules has no module pose_adaptor; did you mean pose_adapter\?",
        ),
        (
            "examples.modules.pose_adapter:PoseAdaptor",
            {},
            r"pose_adapter\.py has no class PoseAdaptor; did you mean PoseAdapter\?",
        ),
        ("torch.nn.Linear:Linear", {}, r"torch\.nn has no module Linear; there are: .*utils"),
        (_POSE, {"hidden": 8}, r"options\.hidden is not an option of PoseAdapter; .*hidden_size"),
        (_POSE, {"width": 8}, r"options\.width is not an option of PoseAdapter"),
        (_POSE, {"hidden_size": "8"}, r"trainable\.options does not fit PoseAdapter\. TypeError"),
        ("collections.abc:Sized", {}, r"'collections\.abc:Sized' is not a torch\.nn\.Module"),
        ("torch.nn:Linear", {}, r"no method prepare\(self, conditioning\)\. See AddedModule"),
    ],
)
def test_what_is_wrong_with_it_is_said(
    monkeypatch: pytest.MonkeyPatch, module: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(_ROOT)
    with pytest.raises(RecipeError, match=message):
        _build(module, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"importing it failed with ZeroDivisionError: division by zero"),
        ("in_need", r"importing it failed with ModuleNotFoundError: No module named 'no_such'"),
        ("narrow", r"its __init__ does not take blocks, latent_channels\. See AddedModule"),
    ],
)
def test_a_file_of_the_users_that_fails_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / f"{name}.py").write_text(_FILES[name])
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with pytest.raises(RecipeError, match=message):
        _build(f"{name}:{name.title()}")
    assert sys.path == path
    sys.modules.pop(name, None)
