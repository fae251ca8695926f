"""What each trap does to a model, and that it is said in time: on real tensors and on fake ones."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longtake.formatting import format_size
from longtake.planner.gradient_flow import (
    GradientWatch,
    Trap,
    costly_policies,
    flow_traps,
    idle_recompute,
)
from longtake.planner.memory import measured

Run = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    """Adds something to tokens [B, D], and what a side branch has for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, tokens: Tensor, side: Any = None) -> Tensor:
        """The new tokens."""
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
        """The new tokens."""
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
                _make_fake(model)
            tokens = torch.randn(2, model.embed.in_features)
            with GradientWatch(model, _blocks(model), [tokens]) as watch:
                watch.backward(model(tokens).square().mean())
        return watch, flow_traps(watch)

    return watched


def _blocks(model: Model) -> dict[str, nn.Module]:
    return {f"blocks.{index}": block for index, block in enumerate(model.blocks)}


def _make_fake(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)


def _untrained(model: Model) -> list[str]:
    """What is left without a gradient when nobody watches."""
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
        return checkpoint(nn.Sequential(*model.blocks), tokens, use_reentrant=reentrant)  # type: ignore[no-any-return]

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


def test_a_reentrant_region_that_is_handed_no_gradient(traps_of: Any) -> None:
    assert len(_untrained(Model(_each(reentrant=True)))) == 8
    watch, [trap] = traps_of(Model(_each(reentrant=True)))
    assert len(watch.unreached()) == 8
    assert trap.block == "blocks.0"
    assert trap.stops
    assert "reentrant recompute region, and no tensor that it is handed" in trap.trap
    assert "nor does anything in blocks.1, blocks.2 and blocks.3" in trap.trap
    assert "8 trainable parameters (blocks.0.linear.weight, " in trap.trap
    assert "use_reentrant=False" in trap.fix


@pytest.mark.parametrize("side", [_pose_in_dict, _pose_in_dataclass])
def test_a_reentrant_region_that_is_handed_gradient_in_a_container(
    traps_of: Any, side: Any
) -> None:
    run = _each(reentrant=True, side=side)
    assert "side.weight" in _untrained(Model(run, side=True))
    _, [trap] = traps_of(Model(run, side=True))
    assert "inside a dict, list or dataclass, where such a region does not look" in trap.trap
    assert "10 trainable parameters" in trap.trap
    assert trap.fix.endswith("or hand that tensor over as an argument of its own.")


def test_a_container_that_is_gone_back_through_twice(traps_of: Any) -> None:
    run = _each(reentrant=True, first=1, side=_pose_in_dict)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _untrained(Model(run, side=True))
    _, [trap] = traps_of(Model(run, side=True))
    assert trap.stops
    assert trap.block == "blocks.1"
    assert "recompute of blocks.1, blocks.2 and blocks.3 uses a tensor" in trap.trap

    def only_the_last(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks[:3]:
            tokens = block(tokens)
        pose = _pose_in_dict(model, tokens.detach())
        return checkpoint(model.blocks[3], tokens, pose, use_reentrant=True)  # type: ignore[no-any-return]

    assert _untrained(Model(only_the_last, side=True)) == []
    assert traps_of(Model(only_the_last, side=True))[1] == []


def test_a_captured_tensor_that_is_gone_back_through_twice(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        pose = model.side(tokens).square()
        tokens = model.blocks[0](tokens)
        for block in model.blocks[1:]:
            tokens = checkpoint(
                lambda tokens, block=block: block(tokens) + pose, tokens, use_reentrant=True
            )
        return tokens

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _untrained(Model(run, side=True))
    _, [trap] = traps_of(Model(run, side=True))
    assert "or comes from outside" in trap.trap


def test_an_error_that_is_not_about_recompute_is_raised(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        tokens = model.blocks[0](tokens)
        tokens.sum().backward()  # type: ignore[no-untyped-call]
        return tokens

    with pytest.raises(RuntimeError, match="a second time"):
        traps_of(Model(run))


def test_requires_grad_on_what_a_region_gives(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=True)
            tokens.requires_grad_()
        return tokens

    assert _untrained(Model(run)) == ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    _, [region, demand] = traps_of(Model(run))
    assert region.block == "blocks.0"
    assert demand.stops
    assert "neither a parameter nor an input of the model" in demand.trap
    assert "(blocks.0.linear.weight and blocks.0.linear.bias)" in demand.trap
    assert "the reentrant region of blocks.0" in demand.fix


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_requires_grad_on_a_detached_tensor(traps_of: Any, how: str) -> None:

    def ask(tokens: Tensor) -> Tensor:
        leaf = tokens.detach()
        if how == "method":
            return leaf.requires_grad_()
        leaf.requires_grad = True
        return leaf

    def run(model: Model, tokens: Tensor) -> Tensor:
        return _after(model, tokens, ask)

    assert len(_untrained(Model(run))) == 4
    _, [trap] = traps_of(Model(run))
    assert trap.stops
    assert "4 trainable parameters (blocks.0.linear.weight, " in trap.trap
    assert trap.fix.endswith("the detach() (or .data) in model.")


def test_requires_grad_before_anything_trained(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        return _each(reentrant=True)(model, tokens.requires_grad_())

    assert _untrained(Model(run)) == []
    _, [trap] = traps_of(Model(run))
    assert not trap.stops
    assert "Nothing before it is trained" in trap.trap

    model, tokens = Model(_each(reentrant=True)), torch.randn(2, 4)
    model.embed = nn.Identity()  # type: ignore[assignment]
    with GradientWatch(model, _blocks(model), [tokens]) as watch:
        watch.backward(model(tokens.requires_grad_()).square().mean())
    assert flow_traps(watch) == []


def test_one_reentrant_region_for_all_blocks(traps_of: Any) -> None:
    assert len(_untrained(Model(_all_at_once(reentrant=True)))) == 8
    _, [trap] = traps_of(Model(_all_at_once(reentrant=True)))
    assert trap.stops
    assert trap.block == "model"
    assert "holds all blocks that train (blocks.0, blocks.1, blocks.2 and 1 more)" in trap.trap


def test_one_region_for_all_blocks_saves_no_memory(traps_of: Any) -> None:
    at_once, one_by_one = _all_at_once(reentrant=False), _each(reentrant=False)
    usual = _peak_bytes(Model(_plain, width=64))
    assert _peak_bytes(Model(at_once, width=64)) > 0.95 * usual
    assert _peak_bytes(Model(one_by_one, width=64)) < 0.8 * usual
    _, [trap] = traps_of(Model(at_once))
    assert not trap.stops
    assert "the peak is as high as without recompute" in trap.trap
    assert 'recompute.policy = "all"' in trap.fix


def test_regions_within_a_region_are_recomputed_one_by_one(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        def inner(tokens: Tensor) -> Tensor:
            return _each(reentrant=False)(model, tokens)

        return checkpoint(inner, tokens, use_reentrant=False)  # type: ignore[no-any-return]

    assert traps_of(Model(run))[1] == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_first_block_that_is_frozen(traps_of: Any, first: int) -> None:
    run = _each(reentrant=True, first=first)
    assert len(_untrained(Model(run, frozen_blocks=1))) == 6
    _, [trap] = traps_of(Model(run, frozen_blocks=1))
    assert trap.block == "blocks.1"
    assert trap.trap.startswith("blocks.0 is frozen, so that no tensor handed on to blocks.1")
    assert "6 trainable parameters" in trap.trap


def test_recompute_before_the_first_trainable_parameter() -> None:
    """It saves nothing there, which the real allocator confirms; behind it, it does."""

    def front(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks[:3]:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return model.blocks[3](tokens)  # type: ignore[no-any-return]

    usual = _peak_bytes(Model(_plain, frozen_blocks=3, width=64))
    assert _peak_bytes(Model(front, frozen_blocks=3, width=64)) >= usual

    def behind(run: Run) -> Model:
        """The side branch alone is trained, and all blocks come after it."""
        return Model(
            lambda model, tokens: run(model, model.side(tokens)),
            frozen_blocks=4,
            side=True,
            width=64,
        )

    assert _peak_bytes(behind(_each(reentrant=False))) < 0.8 * _peak_bytes(behind(_plain))
    options = {"blocks.0": "recompute", "blocks.1": "recompute", "blocks.2": "keep"}
    [trap] = idle_recompute(options, {"blocks.0": 0, "blocks.1": 0, "blocks.2": 3 * 2**30})
    assert not trap.stops
    assert "Recomputing blocks.0 and blocks.1 saves 0 bytes" in trap.trap
    assert "blocks.2 saves 3.00 GiB. Frozen blocks count there too" in trap.fix


def test_recompute_where_everything_is_trained_or_nothing_is_recomputed() -> None:
    assert idle_recompute({"a": "recompute"}, {"a": 8}) == []
    assert idle_recompute({"a": "keep"}, {"a": 0}) == []


class Added(nn.Module):
    """Recomputes itself, in the way that needs an argument that carries gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """The new tokens."""
        return checkpoint(self.layer, tokens, use_reentrant=True)  # type: ignore[no-any-return]


def test_a_region_of_an_added_module_says_after_which_block(traps_of: Any) -> None:

    def model() -> Model:
        made = Model(_plain, frozen_blocks=4)
        made.added = Added()
        for number in (1, 3):
            block = made.blocks[number]
            block.register_forward_hook(lambda block, args, tokens: made.added(tokens))
        return made

    _, [trap] = traps_of(model())
    assert trap.block == "added after blocks.1"
    assert trap.trap.startswith("added after blocks.1 runs in a reentrant recompute region")
    assert "nor does anything in added after blocks.3. Untrained: 2 train" in trap.trap


def test_a_policy_that_costs_memory() -> None:

    def lora(model: Model, tokens: Tensor) -> Tensor:
        return _low_rank(model, tokens, lambda block, tokens: block(tokens))

    def keep_matmuls(model: Model, tokens: Tensor) -> Tensor:
        return _low_rank(model, tokens, _keeping_matmuls)

    usual = _peak_bytes(Model(lora, frozen_blocks=4, side=True, width=64))
    peak = _peak_bytes(Model(keep_matmuls, frozen_blocks=4, side=True, width=64))
    assert peak > usual
    [trap] = costly_policies({"none": usual, "save-matmuls": peak, "all": usual // 2})
    assert not trap.stops
    assert f'policy = "none", {format_size(usual)}, are: "save-matmuls" by ' in trap.trap
    assert "take another" in trap.fix


def test_policies_that_cost_memory_share_a_note() -> None:
    peaks = {"none": 2**30, "all": 2**30 + 2**20, "alternate": 2**31, "save-attention": 3 * 2**29}
    [trap] = costly_policies(peaks)
    assert '1.00 GiB, are: "alternate" by 1.00 GiB, "save-attention" by 512.00 MiB.' in trap.trap
    assert costly_policies({"none": 2**30, "all": 2**30 + 2**20}) == []
    assert costly_policies({"all": 2**30}) == []


def _low_rank(model: Model, tokens: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """Frozen matrices between a few trained numbers, without a nonlinearity that keeps them."""

    def block(tokens: Tensor) -> Tensor:
        for layer in model.blocks:
            tokens = tokens + layer.linear(tokens)  # type: ignore[operator]
        return tokens

    return call(block, model.side(tokens))


def _keeping_matmuls(block: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return checkpoint(block, tokens, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def test_fp32_weights_on_a_16_bit_base(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        for block in model.blocks:
            tokens = tokens + block.linear(tokens.float()).to(tokens.dtype)  # type: ignore[operator]
        return tokens

    def mixed() -> Model:
        model = Model(run)
        model.embed.to(torch.bfloat16)
        model.forward = lambda tokens: run(model, model.embed(tokens.bfloat16()))  # type: ignore[method-assign]
        return model

    kept = _kept_bytes(mixed(), torch.float32)
    assert kept == 4 * 2 * 4 * 4  # blocks x tokens x width x bytes
    _, [trap] = traps_of(mixed())
    assert not trap.stops
    assert "4 of their layers copy their input to fp32" in trap.trap
    assert f"{kept} bytes in all" in trap.trap
    assert 'trainable.dtype = "model"' in trap.fix


def test_one_copy_for_several_layers(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        copy: Tensor = tokens.bfloat16().float()
        layers: list[Any] = [block.linear for block in model.blocks]
        return torch.stack([layer(copy) for layer in layers]).sum(0)

    def model(dtype: torch.dtype) -> Model:
        made = Model(run)
        made.side.to(dtype)
        return made

    assert _kept_bytes(model(torch.bfloat16), torch.float32) == 2 * 4 * 4
    _, [trap] = traps_of(model(torch.bfloat16))
    assert "1 of their layers" in trap.trap
    assert "32 bytes in all" in trap.trap
    assert traps_of(model(torch.float32))[1] == []


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (lambda tokens: tokens.detach(), "The detach() (or .data) in model lets no gradient"),
        (lambda tokens: tokens.data, "The detach() (or .data) in model lets no gradient"),
        (
            lambda tokens: nn.functional.one_hot(tokens.argmax(-1), 4).float(),
            "The argmax(), which has no derivative, in model lets no gradient",
        ),
    ],
)
def test_gradient_that_is_cut_off(traps_of: Any, cut: Any, says: str) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        return _after(model, tokens, cut)

    untrained = _untrained(Model(run))
    watch, [trap] = traps_of(Model(run))
    assert len(untrained) == 4
    assert watch.unreached() == untrained
    assert trap.stops
    assert trap.trap.startswith(says)
    assert "4 trainable parameters (blocks.0.linear.weight, " in trap.trap


def test_gradient_that_is_cut_off_before_a_reentrant_region(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        tokens = model.blocks[0](tokens).detach()
        return checkpoint(model.blocks[1], tokens, use_reentrant=True)  # type: ignore[no-any-return]

    assert len(_untrained(Model(run))) == 8
    _, [region, cut, unused] = traps_of(Model(run))
    assert region.trap.startswith("blocks.1 runs in a reentrant recompute region")
    assert "frozen" not in region.trap
    assert "2 trainable parameters (blocks.0.linear.weight and blocks.0.linear.bias)" in cut.trap
    assert "No parameter of blocks.2 and blocks.3" in unused.trap


def test_what_a_reentrant_region_drops(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        def region(tokens: Tensor) -> Tensor:
            model.side(tokens)
            return model.blocks[1](tokens)  # type: ignore[no-any-return]

        tokens = checkpoint(region, model.blocks[0](tokens), use_reentrant=True)
        return model.blocks[3](model.blocks[2](tokens))  # type: ignore[no-any-return]

    assert _untrained(Model(run, side=True)) == ["side.weight", "side.bias"]
    _, [trap] = traps_of(Model(run, side=True))
    assert trap.trap.startswith("No parameter of side gets a gradient: what they compute does not")


def test_a_region_where_gradients_are_off_anyway(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            tokens = checkpoint(model.blocks[0], tokens, use_reentrant=True)
        for block in model.blocks[1:]:
            tokens = block(tokens)
        return tokens

    assert len(_untrained(Model(run))) == 2
    _, [trap] = traps_of(Model(run))
    assert trap.trap.startswith("The torch.no_grad() in model lets no gradient through.")


def test_modules_that_run_without_gradient(traps_of: Any) -> None:

    class Frozen(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @torch.no_grad()
        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens)  # type: ignore[no-any-return]

    def model() -> Model:
        made = Model(_plain)
        made.blocks[2] = Frozen(made.blocks[2])
        return made

    assert len(_untrained(model())) == 6
    _, [trap] = traps_of(model())
    assert trap.block == "blocks.2"
    assert trap.trap.startswith("The torch.no_grad() in blocks.2 lets no gradient through.")
    assert "blocks.0.linear.weight" in trap.trap


def test_what_the_forward_pass_does_not_use(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        model.blocks[3](tokens)
        return _after_two(model, tokens)

    def _after_two(model: Model, tokens: Tensor) -> Tensor:
        return model.blocks[1](model.blocks[0](tokens))  # type: ignore[no-any-return]

    assert len(_untrained(Model(run, side=True))) == 6
    _, [unused, dropped] = traps_of(Model(run, side=True))
    assert unused.stops
    assert dropped.stops
    assert "No parameter of blocks.2 and side gets a gradient: the forward pass does" in unused.trap
    assert "No parameter of blocks.3 gets a gradient: what they compute does" in dropped.trap


def test_a_few_leftovers_in_a_block_that_trains(traps_of: Any) -> None:

    def run(model: Model, tokens: Tensor) -> Tensor:
        last: Any = model.blocks[3]
        changed: Tensor = _plain(model, tokens) @ last.linear.weight
        return changed

    def without_bias() -> Model:
        model = Model(run)
        model.blocks = model.blocks[:3].append(Stray())
        return model

    assert _untrained(without_bias()) == ["blocks.3.linear.bias"]
    _, [trap] = traps_of(without_bias())
    assert not trap.stops
    assert trap.trap.startswith("Some parameters of blocks.3 get no gradient")


class Stray(Block):
    """A block whose weights are used elsewhere."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, tokens: Tensor, side: Any = None) -> Tensor:
        """The tokens."""
        return tokens


@pytest.mark.parametrize(
    ("run", "frozen_blocks"),
    [
        (_plain, 0),
        (_plain, 3),
        (_each(reentrant=False), 0),
        (_each(reentrant=False), 3),
        (_each(reentrant=True, first=1), 0),
    ],
)
def test_what_trains_as_it_should_is_no_trap(traps_of: Any, run: Run, frozen_blocks: int) -> None:
    """Without recompute, with it, and with every block but the first in a reentrant region."""
    watch, traps = traps_of(Model(run, frozen_blocks=frozen_blocks))
    assert traps == []
    assert watch.unreached() == []
    assert len(watch.reached()) == 2 * (4 - frozen_blocks)


def _peak_bytes(model: Model) -> int:
    """Of a real step, with a loss that takes next to nothing."""
    tokens = torch.randn(512, model.embed.in_features)
    with measured(torch.device("cpu")) as memory:
        model(tokens).sum().backward()
    return memory.peak_bytes


def _kept_bytes(model: Model, dtype: torch.dtype) -> int:
    """What autograd keeps of activations in one dtype."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dtype == dtype and tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(torch.randn(2, 4))
    del loss
    return sum(kept.values())
