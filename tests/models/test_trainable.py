"""What trains is what the recipe says: all weights, low-rank updates, or a module of one's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import make_transformer
from torch import Tensor, nn

from longtake.config import AdapterRule, ModuleSection, TrainableSection
from longtake.errors import RecipeError
from longtake.models.added_module import ADDED, added_modules, condition
from longtake.models.base import family
from longtake.models.trainable import (
    adapter_config,
    adapter_layers,
    add_lora,
    find_targets,
    load_trained,
    lora_state,
    make_trainable,
    merge,
    plain_copy,
    trained_state,
)
from longtake.planner.activation_checkpointing import ACTIVATIONS, caller
from longtake.planner.record import Activations, BlockOption

_CHANNELS, _WIDTH = 4, 24
_FAMILIES = ["flux", "flux_kontext", "wan", "tubelet"]
_POSE = "examples.modules.pose_adapter:PoseAdapter"
_STYLE = "examples.modules.style_residual:StyleResidual"
_LORA = TrainableSection(kind="lora", rank=4)
_FROZEN = """
from torch import nn
class Frozen(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.requires_grad_(False)
    def around(self, block, call, inputs):
        return call(inputs)
"""
_MODULES = {
    "pose": ModuleSection(module=_POSE, options={"hidden_size": 8}),
    "style": ModuleSection(module=_STYLE, options={"rank": 4}),
}
_WHOLE = ModuleSection(module="tests.models.whole_context:WholeContext")
_ONLY = {name: {name: module} for name, module in _MODULES.items()}
_KINDS = {
    "lora": _LORA,
    "dora": TrainableSection(kind="dora", rank=4),
    "lokr": TrainableSection(kind="lokr", rank=4),
    "pose": TrainableSection(modules=_ONLY["pose"]),
    "style": TrainableSection(modules=_ONLY["style"]),
    "pose and style": TrainableSection(modules=_MODULES),
    "whole context": TrainableSection(modules={"whole": _WHOLE}),
    "all at once": TrainableSection(kind="lora", modules=_MODULES | {"whole": _WHOLE}),
    "lora and style": TrainableSection(kind="lora", rank=4, modules=_ONLY["style"]),
    "full and pose": TrainableSection(kind="full", modules=_ONLY["pose"]),
}


# The tubelet's blocks have no text, no rotation, and attention of their own.
_PAIRS = [
    (kind, name)
    for kind, section in _KINDS.items()
    for name in _FAMILIES
    if name != "tubelet" or "whole" not in section.modules
]
_START = ("lora", "pose", "style", "whole context")


pytestmark = pytest.mark.usefixtures("at_root")


def _model(name: str) -> nn.Module:
    guided = {"guidance_embeds": True} if name.startswith("flux") else {}
    return make_transformer(name, **guided)


def _made(
    name: str, section: TrainableSection, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> nn.Module:
    """A tiny model of a family, made trainable; the same weights each time."""
    if name == "tubelet" and "pose" in section.modules:  # its caption block has too few tokens
        later = _MODULES["pose"].model_copy(update={"blocks": ("blocks.*",)})
        section = section.model_copy(update={"modules": section.modules | {"pose": later}})
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = _model(name)
        nn.Module.to(model, dtype)  # diffusers' own warns about layers that it has none of
        make_trainable(model, family(name), section, _CHANNELS)
    return model


def _asked(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    frames = 1 if name.startswith("flux") else 2
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    conditioning = {
        "prompt_embeds": normal(5, 16),
        "pooled_prompt_embeds": normal(8),
        "guidance": torch.full((2,), 3.5),
        "token_ids": torch.tensor([[1, 2, 0], [3, 4, 5]]),
        "reference_latents": normal(_CHANNELS, 1, 4, 6),
        # The tubelet's first six tokens are the caption's, which nobody looks at in the end.
        "pose_latents": normal(_CHANNELS, 1, 4, 12 if name == "tubelet" else 6),
    }
    return normal(_CHANNELS, frames, 4, 6), torch.tensor([0.25, 0.9]), conditioning


def _velocity(model: nn.Module, name: str) -> Tensor:
    noisy, sigmas, conditioning = _asked(name)
    condition(model, noisy, sigmas, conditioning)
    return family(name).predict_velocity(model, noisy, sigmas, conditioning)


def _gradients(model: nn.Module, name: str) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.autograd.backward(_velocity(model, name).float().square().mean())
    return {each: parameter.grad for each, parameter in _trained(model).items()}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _shaken(model: nn.Module) -> nn.Module:
    """With random trained weights: what starts at zero passes no gradient on."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in _trained(model).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return model


def test_full_training_trains_everything_and_changes_nothing() -> None:
    model = _made("wan", TrainableSection())
    assert list(trained_state(model)) == list(_model("wan").state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_lora_trains_two_matrices_for_each_target_and_nothing_else() -> None:
    trained = _trained(_made("flux", _LORA))
    single = {
        f"single_transformer_blocks.{number}.attn.to_{part}.lora_{side}.default.weight"
        for number in range(2)
        for part in "qkv"
        for side in "AB"
    }
    double = {
        f"transformer_blocks.{number}.attn.to_{part}.lora_{side}.default.weight"
        for number in range(2)
        for part in ("q", "k", "v", "out.0")
        for side in "AB"
    }
    assert trained.keys() == single | double
    assert sum(each.numel() for each in trained.values()) == len(single | double) * 4 * _WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), [pair for pair in _PAIRS if pair[0] in _START])
def test_training_starts_from_the_very_model(kind: str, name: str, dtype: torch.dtype) -> None:
    before = _made(name, TrainableSection(), dtype)
    after = _made(name, _KINDS[kind], dtype)
    assert torch.equal(_velocity(before, name), _velocity(after, name))


@pytest.mark.parametrize(("kind", "name"), _PAIRS)
def test_gradients_reach_every_trained_parameter(kind: str, name: str) -> None:
    model = _shaken(_made(name, _KINDS[kind]))
    gradients = _gradients(model, name)
    dead = [each for each, grad in gradients.items() if grad is None or not grad.any()]
    no_output = name == "wan" and "whole" in _KINDS[kind].modules  # its blocks return no text
    assert dead == ([f"{ADDED}.whole.shares.text after"] if no_output else [])
    frozen = [each for each in model.parameters() if not each.requires_grad]
    assert all(each.grad is None for each in frozen)


_RECOMPUTED = [
    *((kind, name, "recompute") for kind, name in _PAIRS),
    *(("whole context", "flux_kontext", option) for option in ACTIVATIONS[1:]),
]


@pytest.mark.parametrize(("kind", "name", "option"), dict.fromkeys(_RECOMPUTED))
def test_recompute_changes_no_bit_of_a_gradient(kind: str, name: str, option: Activations) -> None:
    """Added modules are run again with their blocks, on what was prepared once."""
    model = _shaken(_made(name, _KINDS[kind], torch.bfloat16))
    kept = _gradients(model, name)
    assert all(grad is not None and grad.any() for grad in kept.values()) or name == "wan"
    kept = {each: None if grad is None else grad.clone() for each, grad in kept.items()}
    blocks = family(name).blocks(model)
    run, calls = caller({block: BlockOption(option) for block in blocks}), list[nn.Module]()

    def counted(block: nn.Module, *inputs: Any) -> Any:
        calls.append(block)
        return run(block, *inputs)

    family(name).block.call_by(model, counted)
    again = _gradients(model, name)
    assert len(calls) == len(blocks)
    torch.testing.assert_close(again, kept, rtol=0, atol=0)


def test_new_weights_follow_from_the_seed_alone() -> None:
    """Not from how many numbers the base took, nor from where the generator is; it stays there."""
    sections = [_LORA, _KINDS["pose"]]

    def adapter(seed: int, drawn: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        torch.randn(drawn)
        model, state = _model("flux"), torch.get_rng_state()
        for section in sections:
            make_trainable(model, family("flux"), section, _CHANNELS)
        assert torch.equal(torch.get_rng_state(), state)
        return {n: p for n, p in model.named_parameters() if ".lora_" in n or ADDED in n}

    with torch.random.fork_rng():
        first, second, other = adapter(3, 0), adapter(3, 99), adapter(4, 0)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    name = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(
        first[f"{ADDED}.pose.read.0.weight"], other[f"{ADDED}.pose.read.0.weight"]
    )


@pytest.mark.parametrize("dtype", ["model", "fp32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "pose", "lora and style"])
def test_on_the_meta_device_all_is_alike(kind: str, dtype: Any) -> None:
    """Names, shapes and dtypes are those of a real model, and what is new is in the recipe's."""
    section = _KINDS[kind].model_copy(update={"dtype": dtype})
    real = _made("flux", section, torch.bfloat16)
    outline = _made("flux", section, torch.bfloat16, device="meta")

    def facts(model: nn.Module) -> list[Any]:
        return [
            (name, each.shape, each.dtype, each.requires_grad)
            for name, each in model.named_parameters()
        ]

    assert facts(outline) == facts(real)
    assert {each.device.type for each in outline.parameters()} == {"meta"}
    expected = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert {each.dtype for each in _trained(outline).values()} == {expected}


@pytest.mark.parametrize("kind", ["lora", "pose", "style", "whole context"])
def test_fp32_adapters_train_on_a_bf16_model(kind: str) -> None:
    """What is converted is converted back: the model goes on in its own dtype."""
    section = _KINDS[kind].model_copy(update={"dtype": "fp32"})
    model = _shaken(_made("flux", section, torch.bfloat16))
    seen: set[torch.dtype] = set()
    model.get_submodule("transformer_blocks.1").register_forward_pre_hook(
        lambda block, args, kwargs: seen.update(
            each.dtype for each in [*args, *kwargs.values()] if isinstance(each, Tensor)
        ),
        with_kwargs=True,
    )
    assert all(grad is not None and grad.any() for grad in _gradients(model, "flux").values())
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_trains_nothing_is_refused(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model beside it is frozen, too; beside LoRA it may be."""
    (tmp_path / "frozen_module.py").write_text(_FROZEN)
    monkeypatch.chdir(tmp_path)
    name = "frozen_module:Frozen"
    modules = {"frozen": ModuleSection(module=name)}
    with pytest.raises(
        RecipeError, match=rf"trainable\.modules \({name}\) train nothing: .* = \"lora\""
    ):
        _made("wan", TrainableSection(modules=modules), device=device)
    made = _made("wan", TrainableSection(kind="lora", modules=modules), device=device)
    assert all("lora_" in name for name in trained_state(made) if not name.startswith(ADDED))


def test_a_checkpoint_holds_what_is_trained_and_all_of_the_added_module() -> None:
    """What it has frozen of itself too; loading puts them into another model of the same kind."""
    model, other = _made("flux", _KINDS["lora and style"]), _made("flux", _KINDS["lora and style"])
    trained = _trained(model).keys()
    added_modules(model)["style"].requires_grad_(False)
    assert trained_state(model).keys() == trained
    load_trained(other, trained_state(_shaken(model)))
    torch.testing.assert_close(trained_state(other), trained_state(model), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_copy_is_the_same_model_without_lora(dtype: torch.dtype) -> None:
    """Under the first names, sharing what is not merged; the model stays as it was."""
    section = _LORA.model_copy(update={"alpha": 8.0})
    model = _shaken(_made("flux", section, dtype))
    with torch.no_grad():
        before = _velocity(model, "flux")
        plain = plain_copy(model)
        assert list(plain.state_dict()) == list(_model("flux").state_dict())
        bound = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(_velocity(plain, "flux"), before, atol=bound, rtol=bound)
        assert not torch.equal(before, _velocity(_made("flux", TrainableSection(), dtype), "flux"))
        assert torch.equal(_velocity(model, "flux"), before)
    own = {each.data_ptr() for each in model.parameters()}
    new = [name for name, each in plain.named_parameters() if each.data_ptr() not in own]
    assert len(new) == 4 * 3 + 2
    assert all(".attn.to_" in name for name in new)


def test_a_plain_copy_has_no_added_module() -> None:
    """Nor does it miss the conditioning of one; also after a training step of the model."""
    model = _shaken(_made("flux", _KINDS["pose"]))
    _gradients(model, "flux")
    plain = plain_copy(model)
    assert added_modules(plain) == {}
    noisy, sigmas, conditioning = _asked("flux")
    velocity = family("flux").predict_velocity(plain, noisy, sigmas, conditioning)
    assert torch.equal(velocity, _velocity(_made("flux", TrainableSection()), "flux"))
    assert not torch.equal(velocity, _velocity(model, "flux"))


class _Attention(nn.Module):
    """Three layers that read the same tokens."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.norm_q = nn.LayerNorm(width)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Identity()])

    def forward(self, tokens: Tensor) -> Tensor:
        read: Tensor = self.to_q(tokens) + self.to_k(tokens) + self.to_v(tokens)
        return read


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = _Attention()
        self.proj_out = nn.Linear(8, 8)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.single_blocks = nn.ModuleList([_Block()])
        self.proj_out = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["to_q"], ["blocks.0.attn.to_q", "blocks.1.attn.to_q", "single_blocks.0.attn.to_q"]),
        (["blocks.1.attn.to_k"], ["blocks.1.attn.to_k"]),
        (["1.attn.to_out.0"], ["blocks.1.attn.to_out.0"]),
        (["blocks.*.to_v"], ["blocks.0.attn.to_v", "blocks.1.attn.to_v"]),
        (["single_*.to_k", "*.0.attn.to_k"], ["blocks.0.attn.to_k", "single_blocks.0.attn.to_k"]),
        (["proj_*"], ["proj_out"]),
        (["*.proj_out"], ["blocks.0.proj_out", "blocks.1.proj_out", "single_blocks.0.proj_out"]),
    ],
)
def test_targets_are_last_parts_of_names_or_patterns_of_whole_names(
    targets: list[str], names: list[str]
) -> None:
    """Only linear layers count; what two targets mean gets one update, and nothing else does."""
    network = _Network()
    assert find_targets(network, targets) == names
    add_lora(network, targets, _LORA, torch.float32)
    trained = [name for name, each in network.named_parameters() if each.requires_grad]
    assert trained == [f"{name}.lora_{side}.default.weight" for name in names for side in "AB"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("to_qq", r"'to_qq' matches no linear layer of the model; did you mean to_q\?"),
        ("attn.to_o", r"'attn\.to_o' matches .* did you mean attn\.to_"),
        ("blocks.*.to_x", r"did you mean \S*blocks\.\*\.attn\.to_"),
        ("attn", r"'attn' .* has such layers inside: write '\*attn\.\*' for all"),
        ("norm_q", r"'norm_q' matches no linear layer of the model; did you mean to_q\?"),
        ("zzz", r"'zzz' .* there are: proj_out, to_k, to_q, to_v\."),
        ("q", r"'q' .* here it is called 'to_q'\."),
        ("blocks.*.qkv", r"here it is called 'to_q' or 'to_k' or 'to_v'\."),
        ("attn.out", r"here it is called 'to_out\.0'\."),
    ],
)
def test_a_target_that_matches_nothing_is_named(target: str, message: str) -> None:
    """With the nearest that exist; one good target does not excuse a bad one."""
    with pytest.raises(RecipeError, match=rf"^trainable\.targets: .*{message}"):
        add_lora(_Network(), ["to_k", target], _LORA, torch.float32)


def test_layers_that_are_excluded_get_no_adapter() -> None:
    model = make_transformer("wan")
    section = TrainableSection(kind="lora", rank=2, targets=("blocks.*",), exclude=("to_k",))
    make_trainable(model, family("wan"), section, _CHANNELS)
    adapted = {name for name, _ in adapter_layers(model)}
    assert adapted
    assert not any(name.endswith("to_k") for name in adapted)
    for excluded, message in (("to_nothing", r"trainable\.exclude: 'to_nothing'"), ("*", "every")):
        changed = section.model_copy(update={"exclude": (excluded,)})
        with pytest.raises(RecipeError, match=message):
            make_trainable(make_transformer("wan"), family("wan"), changed, _CHANNELS)


class _Refiner(nn.Module):
    """Layers whose names end with those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.refiner = nn.ModuleDict({"blocks": nn.ModuleList([_Block()])})

    def forward(self, given: Tensor) -> Tensor:
        for block in (*self.blocks, *self.refiner["blocks"]):  # type: ignore[misc]
            given = block.attn.to_q(given) + block.attn.to_k(given)
        return given


_RULES = (
    AdapterRule(layers=("blocks.0.*",), rank=2),
    AdapterRule(layers=("to_q",), alpha=2.0),
    AdapterRule(layers=("1.attn.to_k",), exclude=True),
)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_rules_give_layers_ranks_and_strengths_and_peft_reads_them(kind: Any) -> None:
    """The first rule holds; a pattern of whole names is not one of their ends."""
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    section = TrainableSection(kind=kind, rank=3, targets=("to_q", "to_k"), rules=_RULES)
    base, model = _Refiner(), _Refiner()
    model.load_state_dict(base.state_dict())
    wan = family("wan")
    make_trainable(model, wan, section, _CHANNELS)
    found = {
        name: (layer.r["default"], layer.r["default"] * layer.scaling["default"])
        for name, layer in adapter_layers(model)
    }
    assert found == {
        "blocks.0.attn.to_q": (2, 2),
        "blocks.0.attn.to_k": (2, 2),
        "blocks.1.attn.to_q": (3, 2),
        "refiner.blocks.0.attn.to_q": (3, 2),
        "refiner.blocks.0.attn.to_k": (3, 3),
    }
    for parameter in model.parameters():
        nn.init.normal_(parameter) if parameter.requires_grad and parameter.ndim > 1 else None
    inject_adapter_in_model(adapter_config(model, None), base)
    set_peft_model_state_dict(base, lora_state(model))
    given = torch.randn(5, 8)
    torch.testing.assert_close(base(given), model(given))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((AdapterRule(layers=("to_x",), rank=2),), r"rules\[0\]\.layers: .*did you mean to_"),
        (
            (AdapterRule(layers=("proj_out",), rank=2),),
            r"rules\[0\]\.layers: proj_out match no layer",
        ),
        ((*_RULES, AdapterRule(layers=("to_q",), rank=2)), r"rules\[3\].*an earlier rule"),
        ((AdapterRule(layers=("*",), exclude=True),), "leave out every layer"),
    ],
)
def test_a_rule_for_no_layer_is_refused(rules: tuple[AdapterRule, ...], message: str) -> None:
    section = TrainableSection(kind="lora", targets=("to_q", "to_k"), rules=rules)
    with pytest.raises(RecipeError, match=message):
        make_trainable(_Refiner(), family("wan"), section, _CHANNELS)


@pytest.mark.parametrize(("factor", "shape"), [(None, (4, 4)), (2, (2, 2)), (3, (2, 2))])
def test_lokrs_smaller_factor_has_the_size_that_is_asked_for(
    factor: int | None, shape: tuple[int, int]
) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    section = TrainableSection(kind="lokr", rank=100, factor=factor)
    add_lora(model, ["0"], section, torch.float32)
    ((_, layer),) = adapter_layers(model)
    assert layer.lokr_w1["default"].shape == shape
    assert layer.lokr_w2["default"].shape == tuple(16 // side for side in shape)


@pytest.mark.parametrize(
    ("weights", "tokens", "autocast"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, True),
    ],
)
def test_the_input_is_kept_once_for_all_layers_that_read_it(
    weights: torch.dtype, tokens: torch.dtype, autocast: bool
) -> None:
    """No converted copy for each layer, also not where autocast computes in another dtype."""
    model = _Attention(32).to(weights)
    add_lora(model, ["to_q", "to_k", "to_v"], _LORA, weights)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = torch.randn(1, 512, 32, dtype=tokens)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(given)
    assert out.dtype == tokens
    assert [size for size in kept.values() if size >= given.nbytes] == [given.nbytes]


def test_what_is_saved_for_others_has_the_scale_in_it() -> None:
    """B A as it is saved, without an alpha, is exactly what merging adds to the weight."""
    model = _Attention()
    add_lora(model, ["to_q"], TrainableSection(kind="lora", rank=2, alpha=8.0), torch.float32)
    nn.init.normal_(model.to_q.lora_B["default"].weight)  # type: ignore[union-attr,index]
    before, state = model.to_q.weight.detach().clone(), lora_state(model)
    assert list(state) == ["to_q.lora_A.weight", "to_q.lora_B.weight"]
    merge(model)
    assert isinstance(model.to_q, nn.Linear)
    update = state["to_q.lora_B.weight"] @ state["to_q.lora_A.weight"]
    torch.testing.assert_close(model.to_q.weight, before + update)
    assert lora_state(model) == {}
    assert "to_q.weight" in model.state_dict()
