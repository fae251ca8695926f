"""A watched step: what gradient reaches, upstream of what a tensor is, and every trap, in time.

Each trap is a model that a plain step of torch is run of first: what it leaves untrained, the watch
must leave unreached, on real tensors and on fake ones.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from longtake.planner.gradient_flow import (
    SECOND_TIME,
    ForwardPosition,
    GradientWatch,
    Provenance,
    watching,
)
from longtake.planner.trace import make_fake
from longtake.planner.traps import Trap, costly_policies, flow_traps, idle_recompute

_A, _B = 1, 2


@pytest.fixture
def weights() -> tuple[nn.Parameter, nn.Parameter]:
    """Two trainable matrices: bits 0 and 1."""
    return nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))


def _upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> Provenance:
    return Provenance({"a": weights[0], "b": weights[1]}, [], ForwardPosition(), half_base=False)


def _written_into(product: Tensor) -> Tensor:
    buffer = torch.zeros(4, 3)
    buffer[1:] = product.detach()
    return buffer


@torch.library.custom_op("longtake_tests::twice", mutates_args=())
def _twice(value: Tensor) -> Tensor:
    return 2 * value


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return 2 * value


def _doubled(value: Tensor) -> Tensor:
    doubled: Tensor = _Double.apply(value)  # type: ignore[no-untyped-call]
    return doubled


@pytest.mark.parametrize(
    "function",
    [
        lambda product: product.detach(),
        lambda product: product.data,
        lambda product: product.argmax(-1),
        lambda product: torch.stack([torch.zeros(3, 3), product]),
        lambda product: product.chunk(3)[1],
        lambda product: F.scaled_dot_product_attention(torch.ones(3, 3), torch.ones(3, 3), product),
        _written_into,
        _twice,
        _doubled,
    ],
)
def test_what_is_upstream(
    weights: tuple[nn.Parameter, nn.Parameter], function: Callable[[Tensor], Tensor]
) -> None:
    with _upstream(weights) as provenance, torch.no_grad():
        product = torch.ones(3, 3) @ weights[1]
        assert provenance.of(function(product)) == _B
        assert provenance.of(function(product + weights[0])) == _A | _B
        assert provenance.of(torch.ones(3, 3) @ torch.ones(3, 3)) == 0


def test_what_is_not_upstream(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    with _upstream(weights) as provenance:
        product = torch.ones(3, 3) @ weights[0]
        assert provenance.of(torch.zeros_like(product)) == 0
        assert provenance.of(product.new_ones(3)) == 0
        assert provenance.of(torch.zeros(product.shape)) == 0


def test_where_a_gradient_is_lost(weights: tuple[nn.Parameter, nn.Parameter]) -> None:
    """A mask never carries gradient, so that it is no place where gradient is lost."""
    with _upstream(weights) as provenance:
        product = (torch.ones(3, 3) @ weights[0]).detach() @ weights[1]
        mask = product > 0
        with torch.no_grad():
            product.exp().exp()
    assert mask.dtype == torch.bool
    assert [(cut.how, cut.parameters) for cut in provenance.cuts] == [
        ("detach", _A),
        ("no_grad", _A | _B),
    ]


Run = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    """Adds something to tokens [B, D], and what a side branch has for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, tokens: Tensor, side: Any = None) -> Tensor:
        changed: Tensor = tokens + self.linear(tokens).tanh().sigmoid().tanh()
        if side is None:
            return changed
        pose: Tensor = side["pose"] if isinstance(side, Mapping) else side.pose
        return changed + pose


class Model(nn.Module):
    """A frozen embedding, four trained blocks that run as a test wants, and a side branch."""

    def __init__(self, run: Run, *, frozen_blocks: int = 0, side: bool = False, width: int = 4):
        super().__init__()
        self.run = run
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.side = nn.Linear(width, width)
        self.requires_grad_(False)
        self.blocks[frozen_blocks:].requires_grad_(True)
        self.side.requires_grad_(side)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.run(self, self.embed(tokens))


@dataclass
class Side:
    """A side branch's answer as models' output classes have it."""

    pose: Tensor


@pytest.fixture(params=["real", "fake"])
def traps_of(request: pytest.FixtureRequest) -> Callable[[Model], tuple[GradientWatch, list[Trap]]]:
    """Watches a step of a model on real tensors, or on tensors without values."""

    def watched(model: Model) -> tuple[GradientWatch, list[Trap]]:
        with FakeTensorMode() if request.param == "fake" else nullcontext():
            if request.param == "fake":
                make_fake(model)
            tokens = torch.randn(2, model.embed.in_features)
            with watching(model, _blocks_of(model), [tokens]) as watch:
                watch.backward(model(tokens).square().mean())
        return watch, flow_traps(watch)

    return watched


def _blocks_of(model: Model) -> dict[str, nn.Module]:
    return {f"blocks.{index}": block for index, block in enumerate(model.blocks)}


def _untrained(model: Model) -> list[str]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        loss = model(torch.randn(2, model.embed.in_features)).square().mean()
    if loss.requires_grad:
        loss.backward()
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


def _each(reentrant: bool, first: int = 0, side: Any = None) -> Run:
    """Blocks in regions of their own, from the given one on."""

    def run(model: Model, tokens: Tensor) -> Tensor:
        given = () if side is None else (side(model, tokens),)
        for block in model.blocks[:first]:
            tokens = block(tokens, *given)
        for block in model.blocks[first:]:
            tokens = checkpoint(block, tokens, *given, use_reentrant=reentrant)
        return tokens

    return run


def _all_at_once(reentrant: bool) -> Run:
    def run(model: Model, tokens: Tensor) -> Tensor:
        return checkpoint(nn.Sequential(*model.blocks), tokens, use_reentrant=reentrant)

    return run


class CheckpointFunction(torch.autograd.Function):
    """Recomputes as DeepSpeed's class of this name does: handed a function and a list first."""

    __module__ = "deepspeed.runtime.activation_checkpointing.checkpointing"

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], outputs: list[Any], *args: Any) -> Any:
        ctx.function = function
        ctx.save_for_backward(*args)
        with torch.no_grad():
            outputs.append(function(*args))
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        args = [each.detach().requires_grad_(each.requires_grad) for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*args)
        torch.autograd.backward((output,), gradients)
        return None, None, *(each.grad for each in args)


def _by_deepspeed(first: int) -> Run:
    function: Any = CheckpointFunction

    def run(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks[:first]:
            tokens = block(tokens)
        for block in model.blocks[first:]:
            tokens = function.apply(block, [], tokens)
        return tokens

    return run


def _plain(model: Model, tokens: Tensor) -> Tensor:
    for block in model.blocks:
        tokens = block(tokens)
    return tokens


def _after(model: Model, tokens: Tensor, changed: Callable[[Tensor], Tensor]) -> Tensor:
    """The second block's output is changed."""
    first, second, *rest = model.blocks
    tokens = changed(second(first(tokens)))
    for block in rest:
        tokens = block(tokens)
    return tokens


def _pose_in_dict(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    return {"pose": model.side(tokens).square()}


def _pose_in_dataclass(model: Model, tokens: Tensor) -> Side:
    return Side(model.side(tokens).square())


def _only_the_last(model: Model, tokens: Tensor) -> Tensor:
    for block in model.blocks[:3]:
        tokens = block(tokens)
    pose = _pose_in_dict(model, tokens.detach())
    return checkpoint(model.blocks[3], tokens, pose, use_reentrant=True)


def _captured(model: Model, tokens: Tensor) -> Tensor:
    pose = model.side(tokens).square()
    tokens = model.blocks[0](tokens)
    for block in model.blocks[1:]:
        tokens = checkpoint(
            lambda tokens, block=block: block(tokens) + pose, tokens, use_reentrant=True
        )
    return tokens


def _demanding(model: Model, tokens: Tensor) -> Tensor:
    for block in model.blocks:
        tokens = checkpoint(block, tokens, use_reentrant=True)
        tokens.requires_grad_()
    return tokens


def _leaf(tokens: Tensor) -> Tensor:
    leaf = tokens.detach()
    leaf.requires_grad = True
    return leaf


def _changed(change: Callable[[Tensor], Tensor]) -> Callable[[], Model]:
    return lambda: Model(lambda model, tokens: _after(model, tokens, change))


def _nested(model: Model, tokens: Tensor) -> Tensor:
    def inner(tokens: Tensor) -> Tensor:
        return _each(reentrant=False)(model, tokens)

    return checkpoint(inner, tokens, use_reentrant=False)


class Added(nn.Module):
    """Recomputes itself, in the way that needs an argument that carries gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.layer, tokens, use_reentrant=True)


def _with_added() -> Model:
    made = Model(_plain, frozen_blocks=4)
    made.added = Added()
    for number in (1, 3):
        made.blocks[number].register_forward_hook(lambda block, args, tokens: made.added(tokens))
    return made


class NoGradient(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def _with_no_gradient() -> Model:
    made = Model(_plain)
    made.blocks[2] = NoGradient(made.blocks[2])
    return made


def _cut_before_a_region(model: Model, tokens: Tensor) -> Tensor:
    tokens = model.blocks[0](tokens).detach()
    return checkpoint(model.blocks[1], tokens, use_reentrant=True)


def _dropping(model: Model, tokens: Tensor) -> Tensor:
    def region(tokens: Tensor) -> Tensor:
        model.side(tokens)
        return model.blocks[1](tokens)

    tokens = checkpoint(region, model.blocks[0](tokens), use_reentrant=True)
    return model.blocks[3](model.blocks[2](tokens))


def _gradients_off(model: Model, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        tokens = checkpoint(model.blocks[0], tokens, use_reentrant=True)
    for block in model.blocks[1:]:
        tokens = block(tokens)
    return tokens


def _unused(model: Model, tokens: Tensor) -> Tensor:
    model.blocks[3](tokens)
    return model.blocks[1](model.blocks[0](tokens))


class Stray(Block):
    """A block whose weights are used elsewhere."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, tokens: Tensor, side: Any = None) -> Tensor:
        return tokens


def _without_bias() -> Model:
    def run(model: Model, tokens: Tensor) -> Tensor:
        last: Any = model.blocks[3]
        changed: Tensor = _plain(model, tokens) @ last.linear.weight
        return changed

    model = Model(run)
    model.blocks = model.blocks[:3].append(Stray())
    return model


def _mixed() -> Model:
    """fp32 layers on a base in bf16: each copies its input."""

    def run(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks:
            tokens = tokens + block.linear(tokens.float()).to(tokens.dtype)  # type: ignore[operator]
        return tokens

    model = Model(run)
    model.embed.to(torch.bfloat16)
    model.forward = lambda tokens: run(model, model.embed(tokens.bfloat16()))  # type: ignore[method-assign]
    return model


def _one_copy(dtype: torch.dtype) -> Model:
    def run(model: Model, tokens: Tensor) -> Tensor:
        copy: Tensor = tokens.bfloat16().float()
        layers: list[Any] = [block.linear for block in model.blocks]
        return torch.stack([layer(copy) for layer in layers]).sum(0)

    made = Model(run)
    made.side.to(dtype)
    return made


def _adapted() -> Model:
    """fp32 adapters of PEFT on a base in bf16: the first layer of each copies its input."""
    model = Model(_plain)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["linear"]), model.bfloat16())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.forward = lambda tokens: _plain(model, model.embed(tokens.bfloat16()))  # type: ignore[method-assign]
    return model


# By case: the model; how many parameters a plain step leaves untrained, None where torch stops
# there; and of each trap its block, "stops" or "note", and parts of its text and its fix.
_FIRST_TWO = "4 trainable parameters (blocks.0.linear.weight, "
_IN_CONTAINER = (
    "blocks.0 stops | inside a dict, list or dataclass, where such a region does not look"
    " | 10 trainable parameters | or hand that tensor over as an argument of its own."
)
_FROZEN_FIRST = (
    "blocks.1 stops | blocks.0 is frozen, so that no tensor handed on to blocks.1"
    " | 6 trainable parameters"
)
_CUT = f"lets no gradient | {_FIRST_TWO}"
_CASES: dict[str, tuple[Any, ...]] = {
    "a reentrant region that is handed no gradient": (
        lambda: Model(_each(reentrant=True)),
        8,
        "blocks.0 stops | reentrant recompute region, and no tensor that it is handed"
        " | nor does anything in blocks.1, blocks.2 and blocks.3"
        " | 8 trainable parameters (blocks.0.linear.weight,  | use_reentrant=False",
    ),
    "gradient in a dict": (
        lambda: Model(_each(reentrant=True, side=_pose_in_dict), side=True),
        10,
        _IN_CONTAINER,
    ),
    "gradient in a dataclass": (
        lambda: Model(_each(reentrant=True, side=_pose_in_dataclass), side=True),
        10,
        _IN_CONTAINER,
    ),
    "a container that is gone back through twice": (
        lambda: Model(_each(reentrant=True, first=1, side=_pose_in_dict), side=True),
        None,
        "blocks.1 stops | recompute of blocks.1, blocks.2 and blocks.3 uses a tensor",
    ),
    "a container that is gone back through once": (lambda: Model(_only_the_last, side=True), 0),
    "a captured tensor that is gone back through twice": (
        lambda: Model(_captured, side=True),
        None,
        "blocks.1 stops | or comes from outside",
    ),
    "requires_grad on what a region gives": (
        lambda: Model(_demanding),
        2,
        "blocks.0 stops",
        "model stops | neither a parameter nor an input of the model"
        " | (blocks.0.linear.weight and blocks.0.linear.bias) | the reentrant region of blocks.0",
    ),
    "requires_grad on a detached tensor": (
        _changed(lambda tokens: tokens.detach().requires_grad_()),
        4,
        f"model stops | {_FIRST_TWO} | the detach() (or .data) in model.",
    ),
    "requires_grad on a detached tensor, by attribute": (
        _changed(_leaf),
        4,
        f"model stops | {_FIRST_TWO} | the detach() (or .data) in model.",
    ),
    "requires_grad before anything trained": (
        lambda: Model(lambda model, given: _each(reentrant=True)(model, given.requires_grad_())),
        0,
        "model note | Nothing before it is trained",
    ),
    "one reentrant region for all blocks": (
        lambda: Model(_all_at_once(reentrant=True)),
        8,
        "model stops | holds all blocks that train (blocks.0, blocks.1, blocks.2 and 1 more)",
    ),
    "one region for all blocks": (
        lambda: Model(_all_at_once(reentrant=False)),
        0,
        'model note | the peak is as high as without recompute | recompute.policy = "all"',
    ),
    "DeepSpeed's regions, handed no gradient": (
        lambda: Model(_by_deepspeed(0)),
        8,
        "blocks.0 stops | runs in a reentrant recompute region of "
        "deepspeed.runtime.activation_checkpointing.checkpointing.CheckpointFunction, and no tensor"
        " | use_reentrant=False",
    ),
    "DeepSpeed's regions after the first block": (lambda: Model(_by_deepspeed(1)), 0),
    "regions within a region": (lambda: Model(_nested), 0),
    "a frozen first block": (
        lambda: Model(_each(reentrant=True), frozen_blocks=1),
        6,
        _FROZEN_FIRST,
    ),
    "a frozen first block outside of regions": (
        lambda: Model(_each(reentrant=True, first=1), frozen_blocks=1),
        6,
        _FROZEN_FIRST,
    ),
    "a region of an added module": (
        _with_added,
        2,
        "added around blocks.1 stops | : added around blocks.1 runs in a reentrant recompute region"
        " | nor does anything in added around blocks.3. Untrained: 2 train",
    ),
    "fp32 weights on a 16-bit base": (
        _mixed,
        0,
        "blocks.0 note | 4 of their layers copy their input to fp32 | 128 bytes in all"
        ' | trainable.dtype = "model"',
    ),
    "one fp32 copy for several layers": (
        lambda: _one_copy(torch.bfloat16),
        0,
        "blocks.0 note | 1 of their layers | 32 bytes in all",
    ),
    "fp32 adapters on a 16-bit base": (
        _adapted,
        0,
        "blocks.0 note | 4 of their layers copy their input to fp32 | 128 bytes in all",
    ),
    "no 16-bit base": (lambda: _one_copy(torch.float32), 0),
    "cut off by detach": (
        _changed(lambda tokens: tokens.detach()),
        4,
        f"model stops | The detach() (or .data) in model {_CUT}",
    ),
    "cut off by data": (
        _changed(lambda tokens: tokens.data),
        4,
        f"model stops | The detach() (or .data) in model {_CUT}",
    ),
    "cut off by argmax": (
        _changed(lambda tokens: F.one_hot(tokens.argmax(-1), 4).float()),
        4,
        f"model stops | The argmax(), which has no derivative, in model {_CUT}",
    ),
    "cut off before a reentrant region": (
        lambda: Model(_cut_before_a_region),
        8,
        "blocks.1 stops | : blocks.1 runs in a reentrant recompute region, and",
        "model stops | 2 trainable parameters (blocks.0.linear.weight and blocks.0.linear.bias)",
        "blocks.2 stops | No parameter of blocks.2 and blocks.3",
    ),
    "what a reentrant region drops": (
        lambda: Model(_dropping, side=True),
        2,
        "side stops | No parameter of side gets a gradient: what they compute does not",
    ),
    "a region where gradients are off anyway": (
        lambda: Model(_gradients_off),
        2,
        "model stops | The torch.no_grad() in model lets no gradient through.",
    ),
    "modules that run without gradient": (
        _with_no_gradient,
        6,
        "blocks.2 stops | The torch.no_grad() in blocks.2 lets no gradient through."
        " | blocks.0.linear.weight",
    ),
    "what the forward pass does not use": (
        lambda: Model(_unused, side=True),
        6,
        "blocks.2 stops | No parameter of blocks.2 and side gets a gradient: the forward pass does",
        "blocks.3 stops | No parameter of blocks.3 gets a gradient: what they compute does",
    ),
    "a few leftovers in a block that trains": (
        _without_bias,
        1,
        "blocks.3 note | : Some parameters of blocks.3 get no gradient",
    ),
    "nothing recomputed": (lambda: Model(_plain), 0),
    "nothing recomputed, three frozen": (lambda: Model(_plain, frozen_blocks=3), 0),
    "recomputed": (lambda: Model(_each(reentrant=False)), 0),
    "recomputed, three frozen": (
        lambda: Model(_each(reentrant=False), frozen_blocks=3),
        0,
        "blocks.0 note | call around blocks.0, blocks.1 and blocks.2 saves nothing | Leave the",
    ),
    "all but the first reentrant": (lambda: Model(_each(reentrant=True, first=1)), 0),
}


@pytest.mark.parametrize("case", _CASES)
def test_what_keeps_gradient_from_parameters_is_said(traps_of: Any, case: str) -> None:
    make, num_untrained, *expected = _CASES[case]
    if num_untrained is None:
        with pytest.raises(RuntimeError, match=SECOND_TIME):
            _untrained(make())
        _, traps = traps_of(make())
    else:
        untrained = _untrained(make())
        watch, traps = traps_of(make())
        assert watch.unreached() == untrained
        assert len(untrained) == num_untrained
        assert watch.reached() == [name for name in watch.parameters if name not in untrained]
    assert len(traps) == len(expected)
    for trap, texts in zip(traps, expected, strict=True):
        where, *parts = texts.split(" | ")
        assert where == f"{trap.block} {'stops' if trap.stops else 'note'}"
        assert all(part in str(trap) for part in parts), str(trap)


def _gradients(model: Model) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.randn(2, 4)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_the_same_to_the_bit() -> None:
    outcomes = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Model(_each(reentrant=False))
        with watching(model, _blocks_of(model)) if is_watched else nullcontext():
            outcomes.append(_gradients(model))
    assert len(outcomes[0]) == 8
    assert all(map(torch.equal, *outcomes))


def test_nothing_of_the_watch_is_left() -> None:
    model = Model(_each(reentrant=False))
    before = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    apply = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ZeroDivisionError), watching(model, _blocks_of(model)):
        raise ZeroDivisionError
    with watching(model, _blocks_of(model)):
        _gradients(model)
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is before
    assert torch.autograd.Function.__dict__["apply"] is apply
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_gradient_of_an_earlier_step_does_not_count() -> None:
    model = Model(_plain)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    last = model.blocks[3].linear
    with watching(model, _blocks_of(model)) as watch:
        watch.backward(last.weight.sum())  # type: ignore[operator, union-attr]
    assert watch.reached() == ["blocks.3.linear.weight"]


def test_a_module_that_fails_and_is_called_again() -> None:
    def run(model: Model, tokens: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.blocks[0](torch.randn(3))
        return model.blocks[1](model.blocks[0](tokens).detach())

    model = Model(run)
    model.blocks = model.blocks[:2]
    with watching(model, _blocks_of(model)) as watch:
        watch.backward(model(torch.randn(3, 4)).sum())
    [trap] = flow_traps(watch)
    assert trap.block == "model"
    assert trap.trap.startswith("The detach() (or .data) in model")


def test_an_input_that_requires_gradient_is_no_demand() -> None:
    model, tokens = Model(_each(reentrant=True)), torch.randn(2, 4)
    model.embed = nn.Identity()  # type: ignore[assignment]
    with watching(model, _blocks_of(model), [tokens]) as watch:
        watch.backward(model(tokens.requires_grad_()).square().mean())
    assert flow_traps(watch) == []


def test_an_error_that_is_not_about_recompute_is_raised(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        tokens = model.blocks[0](tokens)
        tokens.sum().backward()  # type: ignore[no-untyped-call]
        return tokens

    with pytest.raises(RuntimeError, match="a second time"):
        traps_of(Model(run))


def test_recompute_that_saves_nothing_is_a_note() -> None:
    options = {"blocks.0": "recompute", "blocks.1": "recompute", "blocks.2": "keep"}
    [trap] = idle_recompute(options, {"blocks.0": 0, "blocks.1": 0, "blocks.2": 3 * 2**30})
    assert not trap.stops
    assert "Recomputing blocks.0 and blocks.1 saves 0 bytes" in trap.trap
    assert "blocks.2 saves 3.00 GiB. Frozen blocks count there too" in trap.fix
    assert idle_recompute({"a": "recompute"}, {"a": 8}) == []
    assert idle_recompute({"a": "keep"}, {"a": 0}) == []


def test_policies_that_cost_memory_share_a_note() -> None:
    peaks = {"none": 2**30, "all": 2**30 + 2**20, "alternate": 2**31, "save-attention": 3 * 2**29}
    [trap] = costly_policies(peaks)
    assert not trap.stops
    assert "take another" in trap.fix
    assert '1.00 GiB, are: "alternate" by 1.00 GiB, "save-attention" by 512.00 MiB.' in trap.trap
    assert costly_policies({"none": 2**30, "all": 2**30 + 2**20}) == []
    assert costly_policies({"all": 2**30}) == []
