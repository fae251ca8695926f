"""Which optimizer updates which weights, how learning rates run, and AdamW with 8-bit states.

Run by torchrun, this file is one of two ranks.
"""

import copy
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.build import ALONE
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from longtake.checkpoint import store
from longtake.checkpoint.store import keep_saver
from longtake.config import CheckpointSection, OptimizerSection, ParallelSection
from longtake.errors import RecipeError
from longtake.optim.build import build_optimizers, has_eight_bit_state, refuse_missing_torchao
from longtake.optim.master_weights import MasterAdamW
from longtake.optim.muon import Muon
from longtake.optim.update import schedule_factor, set_learning_rates
from longtake.parallel.fsdp import apply_fsdp, full
from longtake.parallel.mesh import World, join
from longtake.planner.memory import optimizer_bytes
from longtake.planner.profiler import measured
from longtake.run_dir import RunDirectory

_EIGHT_BIT = OptimizerSection(kind="adamw8bit", learning_rate=2e-3)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
lets_torch_warn = pytest.mark.filterwarnings("ignore")  # compiling warns of parts that will go


def _section(**values: Any) -> OptimizerSection:
    return OptimizerSection.model_validate(values)


@given(
    steps=st.integers(1, 10_000),
    warmup_steps=st.integers(0, 10_000),
    min_lr_ratio=st.floats(0, 1),
    schedule=st.sampled_from(
        ["constant", "linear", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt"]
    ),
    schedule_power=st.floats(0.1, 10),
    schedule_cycles=st.integers(1, 10_000),
    data=st.data(),
)
def test_a_factor_is_a_share(steps: int, data: st.DataObject, **values: Any) -> None:
    section = _section(**values)
    step = data.draw(st.integers(0, steps - 1))
    assert 0 <= schedule_factor(step, steps, section) <= 1
    if section.warmup_steps < steps - 1 and section.depends_on_end():
        assert schedule_factor(steps - 1, steps, section) == pytest.approx(section.min_lr_ratio)


@pytest.mark.parametrize(
    ("values", "steps", "factors"),
    [
        # Step warmup_steps is the first at the full rate; none has a rate of 0.
        ({"warmup_steps": 3, "schedule": "constant"}, 10, {0: 0.25, 2: 0.75, 3: 1.0, 9: 1.0}),
        ({"warmup_steps": 10, "schedule": "linear", "min_lr_ratio": 0.2}, 111, {60: 0.6, 110: 0.2}),
        ({"warmup_steps": 10, "min_lr_ratio": 0.2}, 111, {10: 1.0, 60: 0.6, 110: 0.2}),
        # Half a cosine: cos(pi / 3) = 1 / 2, so after a third three quarters are left.
        ({"warmup_steps": 0, "schedule": "cosine"}, 91, {30: 0.75, 60: 0.25}),
        # The same three times.
        (
            {"warmup_steps": 9, "schedule": "cosine_restarts", "schedule_cycles": 3},
            280,
            {8: 0.9, 9: 1.0, 39: 0.75, 99: 1.0, 159: 0.25, 189: 1.0, 279: 0.0},
        ),
        # Cycles of 10.5 steps.
        (
            {"warmup_steps": 0, "schedule": "cosine_restarts", "schedule_cycles": 2}
            | {"min_lr_ratio": 0.5},
            22,
            {0: 1.0, 7: 0.625, 14: 0.875, 21: 0.5},
        ),
        ({"warmup_steps": 0, "schedule": "linear", "schedule_cycles": 3}, 11, {5: 0.5, 10: 0.0}),
        # A third of the steps is left: 1 / 9 of the way down to a half.
        (
            {"warmup_steps": 0, "schedule": "polynomial", "schedule_power": 2, "min_lr_ratio": 0.5},
            91,
            {0: 1.0, 60: 0.5 + 0.5 / 9, 90: 0.5},
        ),
        # Four warm-ups from the beginning, half the rate; the end does not count.
        ({"warmup_steps": 10, "schedule": "inverse_sqrt"}, 41, {10: 1.0, 40: 0.5}),
        (
            {"warmup_steps": 0, "schedule": "inverse_sqrt", "min_lr_ratio": 0.4},
            10**6,
            {0: 1.0, 30_000: 0.5, 900_000: 0.4},
        ),
        # A tenth of 40 steps.
        ({"warmup_ratio": 0.1, "schedule": "constant"}, 40, {0: 0.2, 3: 0.8, 4: 1.0}),
    ],
)
def test_a_schedule_has_its_factors(
    values: dict[str, Any], steps: int, factors: dict[int, float]
) -> None:
    section = _section(**values)
    found = {step: schedule_factor(step, steps, section) for step in factors}
    assert found == pytest.approx(factors)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest() -> None:
    model = _Network()
    section = _section(kind="muon", learning_rate=1e-3, muon_learning_rate=0.05)
    adamw, muon = build_optimizers(model, [model.block], section, "fp32")
    assert isinstance(muon, Muon)
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(model.block[0].weight)]
    rest = {id(p) for p in adamw.param_groups[0]["params"]}
    frozen = {id(p) for p in model.frozen.parameters()}
    assert rest == {id(p) for p in model.parameters()} - frozen - {id(model.block[0].weight)}
    assert (adamw.param_groups[0]["lr"], muon.param_groups[0]["lr"]) == (1e-3, 0.05)


def test_rules_set_the_learning_rates_of_weights_and_the_first_one_holds() -> None:
    """A rule for a layer is one for its weights; Adam's first step is as large as the rate."""
    rules = [
        {"layers": ["block.*.bias", "last"], "factor": 0.5},
        {"layers": ["block"], "factor": 4.0},
    ]
    model = _Network()
    optimizers = build_optimizers(model, [], _section(learning_rate=1e-3, rules=rules), "fp32")
    expected = dict.fromkeys(["first.weight", "first.bias"], 1.0)
    expected |= dict.fromkeys(["block.0.weight", "block.1.weight"], 4.0)
    expected |= dict.fromkeys(["block.0.bias", "block.1.bias", "last.weight", "last.bias"], 0.5)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    set_learning_rates(optimizers, 0.1)
    model.last(model.block(model.first(torch.ones(3, 4)))).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, factor in expected.items():
        moved = (model.get_parameter(name).detach() - before[name]).abs().max()
        assert float(moved) == pytest.approx(1e-4 * factor, rel=1e-3)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"layers": ["lasst"], "factor": 2.0}], r"rules\[0\]\.layers: lasst .*did you mean last"),
        ([{"layers": ["frozen"], "factor": 2.0}], r"rules\[0\]\.layers: frozen match no trained"),
        ([{"layers": ["block.0.biass"], "factor": 2.0}], r"did you mean block\.\*\.bias"),
        (
            [{"layers": ["*"], "factor": 2.0}, {"layers": ["last"], "factor": 1.0}],
            r"rules\[1\].*earlier",
        ),
    ],
)
def test_a_rule_for_no_weight_is_refused(rules: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build_optimizers(_Network(), [], _section(rules=rules), "fp32")


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.bfloat16, {}), (torch.float32, {"offload": True}), (torch.bfloat16, {"kind": "muon"})],
)
def test_what_cannot_be_updated_in_place_has_masters(
    dtype: torch.dtype, values: dict[str, Any]
) -> None:
    """bf16 weights, and offloaded ones, are no case for torch's AdamW."""
    model = _Network().to(dtype)
    optimizer = build_optimizers(model, [model.block], _section(**values), "fp32")[0]
    assert isinstance(optimizer, MasterAdamW)
    assert optimizer.param_groups[0]["betas"] == _section().betas


def test_one_bf16_weight_among_fp32_ones_is_enough() -> None:
    model = _Network()
    model.last.to(torch.bfloat16)
    (optimizer,) = build_optimizers(model, [model.block], _section(), "fp32")
    assert isinstance(optimizer, MasterAdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with_masters = [p for p in optimizer.state if "master" in optimizer.state[p]]
    assert [id(p) for p in with_masters] == [id(p) for p in model.last.parameters()]


def test_learning_rates_are_scaled_from_their_own_full_value() -> None:
    model = _Network()
    section = _section(kind="muon", learning_rate=1e-3, muon_learning_rate=0.05)
    optimizers = build_optimizers(model, [model.block], section, "fp32")
    set_learning_rates(optimizers, 0.5)
    set_learning_rates(optimizers, 0.1)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    assert rates == pytest.approx([1e-4, 5e-3])


@pytest.mark.parametrize("kind", ["adamw", "offloaded", "prodigy", "torch.optim:Adam", "adamw8bit"])
def test_eps_is_in_the_denominator(kind: str) -> None:
    """One large enough to bound a first step, which would else be the learning rate long."""
    given = {"kind": "adamw", "offload": True} if kind == "offloaded" else {"kind": kind}
    lengths = []
    for eps in (1e-12, 1.0):
        weight = nn.Parameter(torch.zeros(2, 2))
        section = _section(**given, learning_rate=0.1, betas=(0.0, 0.0), eps=eps)
        [optimizer] = build_optimizers(nn.ParameterList([weight]), [], section, "fp32")
        weight.grad = torch.full((2, 2), 1e-3)
        optimizer.step()
        lengths.append(float(weight.detach().abs().max()))
    assert 0 < lengths[1] < lengths[0] / 100


def _perceptron(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)


def _train(network: nn.Module, optimizers: list[Optimizer], num_steps: int) -> float:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    loss = torch.zeros(())
    for _ in range(num_steps):
        predicted = network(x.to(next(network.parameters()).dtype)).float()
        loss = (predicted - torch.sin(2 * x)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        network.zero_grad(set_to_none=True)
    return float(loss.detach())


def test_without_torchao_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with the command, before anything is built; other optimizers need none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"not installed.* pip install \"longtake\[eightbit\]\""):
        refuse_missing_torchao(_EIGHT_BIT)
    with pytest.raises(RecipeError, match="pip install"):
        build_optimizers(_perceptron(), [], _EIGHT_BIT, "fp32")
    refuse_missing_torchao(OptimizerSection())


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update is compiled at the first step: too late to find that it cannot be."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler here"):
        refuse_missing_torchao(_EIGHT_BIT)


@pytest.mark.parametrize(
    ("shape", "expected"), [((64, 64), True), ((4095,), False), ((4096,), True), ((3, 1366), False)]
)
def test_large_states_in_whole_blocks_are_kept_in_eight_bits(
    shape: tuple[int, ...], expected: bool
) -> None:
    """At least 4096 numbers, in blocks of 256."""
    assert has_eight_bit_state(torch.empty(shape, device="meta")) == expected


_OWN = """
import torch


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0, momentum=0.5):
        super().__init__(params, {"lr": lr, "decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state = self.state[weight]
                mean = state.setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["decay"]).sub_(mean, alpha=group["lr"])


class Asking(Momentum):
    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].sum().item() < 9
        super().step()
        for state in self.state.values():
            self.keep(state)

    def keep(self, state):
        state["count"] = state.get("count", 0) + 1
        sums = state.setdefault("sums", {"first": torch.zeros(3)})
        sums["first"] += 1


class WithoutClosure(Momentum):
    def step(self):
        super().step()


class NotSaved(Asking):
    def keep(self, state):
        state["last"] = None


class Growing(Asking):
    def keep(self, state):
        state["means"] = torch.cat([state.get("means", torch.zeros(0)), torch.zeros(1)])


class Late(Asking):
    def keep(self, state):
        if "count" in state:
            state["late"] = torch.zeros(2)
        state["count"] = 1


class Shared(Momentum):
    def step(self, closure=None):
        super().step()
        self.state["all"]["count"] = 1


class Divides(Momentum):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["mean"].mul_(1 / self.param_groups[0]["lr"])


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params, lr):
        self.rate = lr
        super().__init__(params, {})

    def step(self, closure=None):
        pass


class WithFunction(Momentum):
    def __init__(self, params, lr):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "rule": lambda mean: mean})
"""


@pytest.fixture
def _own_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_optim.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_optim", raising=False)


@pytest.mark.usefixtures("_own_optimizers")
@pytest.mark.parametrize("name", ["Momentum", "Asking"])
def test_an_optimizer_of_the_users_own_trains_and_goes_on_after_a_break(
    tmp_path: Path, name: str
) -> None:
    """It has the recipe's rate, decay and options; what its states take is planned."""
    options = {"momentum": 0.9}
    given = _section(kind=f"my_optim:{name}", learning_rate=0.3, options=options)
    section = _section(**given.model_dump())  # every key is set, as in the recipe that a run keeps
    network, again = _perceptron(), _perceptron()
    [optimizer] = optimizers = build_optimizers(network, [], section, "fp32")
    wanted = {"lr": 0.3, "base_lr": 0.3, "decay": section.weight_decay, "momentum": 0.9}
    assert wanted.items() <= optimizer.param_groups[0].items()
    first = _train(network, optimizers, 1)
    saved = copy.deepcopy(network.state_dict())
    path = _save(network, optimizers, tmp_path, ALONE)
    last = _train(network, optimizers, 30)
    assert last < 0.95 * first
    again.load_state_dict(saved)
    others = build_optimizers(again, [], section, "fp32")
    _load(again, others, path, ALONE)
    assert _train(again, others, 30) == last
    weights = sum(each.nbytes for each in network.parameters())
    times = 2 if name == "Asking" else 1  # as it asks for values, its states are not known
    assert optimizer_bytes(network, [], section, "fp32", "cpu").device == times * weights
    for states, copied in zip(optimizer.state.values(), others[0].state.values(), strict=True):
        assert states.get("count") == copied.get("count")
        torch.testing.assert_close(states.get("sums", {}), copied.get("sums", {}))


@pytest.mark.usefixtures("_own_optimizers")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "my_optim:Momentun"}, r"^optimizer\.kind .* did you mean Momentum\?"),
        ({"kind": "torch.nn:Linear"}, r"is not a torch\.optim\.Optimizer"),
        ({"options": {"momentun": 1}}, r"optimizer\.options\.momentun is not .*momentum"),
        ({"options": {"momentum": 0.5, "lr": "x"}}, r"optimizer\.options\.lr is set by the recipe"),
        ({"betas": (0.8, 0.9)}, r"takes no betas: remove optimizer\.betas"),
        ({"eps": 1e-8}, r"takes no eps: remove optimizer\.eps"),
        ({"kind": "my_optim:WithoutClosure"}, r"its step\(self\) cannot be called as step\(clos"),
        ({"kind": "my_optim:NotSaved"}, r"keeps \['last'\] of weight 0 as NoneType"),
        (
            {"kind": "my_optim:Growing"},
            r"state \['means'\] of weight 0 is torch.float32 \[1\] after one step and .* \[3\] ",
        ),
        ({"kind": "my_optim:Late"}, r"\['late'\] of weight 0 is missing after one step"),
        ({"kind": "my_optim:Shared"}, r"keeps state\['all'\], which belongs to no weight"),
        ({"kind": "my_optim:Divides"}, "a step with lr = 0 divides by it"),
        ({"kind": "my_optim:WithoutRate"}, 'has no "lr" in its param_groups'),
        ({"kind": "my_optim:WithFunction"}, "has rule = <function .* in its param_groups"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused(values: dict[str, Any], message: str) -> None:
    section = _section(**{"kind": "my_optim:Momentum", **values})
    with pytest.raises(RecipeError, match=message):
        build_optimizers(_Network(), [], section, "fp32")


@pytest.mark.usefixtures("_own_optimizers")
def test_an_optimizer_of_the_users_own_gets_no_bf16_weights() -> None:
    with pytest.raises(
        RecipeError, match=r"weights are bfloat16, .* Set trainable\.dtype = \"fp32"
    ):
        build_optimizers(_Network().bfloat16(), [], _section(kind="my_optim:Momentum"), "fp32")


@needs_torchao
@lets_torch_warn
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_within_its_bytes_and_goes_on_after_a_break(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Near AdamW's loss; a restored run ends with the same weights; nobody else's luck changes."""
    network, reference = _perceptron(dtype), _perceptron()
    optimizers = build_optimizers(network, [], _EIGHT_BIT, "fp32")
    set_learning_rates(optimizers, 1.0)
    with measured(torch.device("cpu")) as memory:
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    gradients = sum(parameter.nbytes for parameter in network.parameters())
    predicted = optimizer_bytes(network, [], _EIGHT_BIT, "fp32", "cpu").device
    assert memory.end_bytes - gradients == pytest.approx(predicted, abs=64)
    network.zero_grad(set_to_none=True)

    luck = torch.get_rng_state()
    _train(network, optimizers, 30)
    assert torch.equal(torch.get_rng_state(), luck)
    saved = copy.deepcopy(network.state_dict())
    path = _save(network, optimizers, tmp_path, ALONE)
    loss = _train(network, optimizers, 30)

    again = _perceptron(dtype)
    again.load_state_dict(saved)
    others = build_optimizers(again, [], _EIGHT_BIT, "fp32")
    _load(again, others, path, ALONE)
    assert _train(again, others, 30) == loss
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)

    usual = build_optimizers(reference, [], OptimizerSection(learning_rate=2e-3), "fp32")
    first = _train(reference, usual, 1)
    assert loss - _train(reference, usual, 59) < 0.05 * first


@needs_torchao
@lets_torch_warn
@pytest.mark.slow
def test_two_ranks_update_as_one(run_on_two_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_on_two_ranks(__file__, str(tmp_path))


def _save(network: nn.Module, optimizers: list[Optimizer], folder: Path, world: World) -> Path:
    state = get_optimizer_state_dict(network, optimizers, options=_FLAT)
    run = RunDirectory(folder)
    with keep_saver(run, world, CheckpointSection(), start=0) as saver:
        saver.save(1, {"optimizer": state}, {})
    return run.checkpoint_path(1)


def _load(network: nn.Module, optimizers: list[Optimizer], path: Path, world: World) -> None:
    state = get_optimizer_state_dict(network, optimizers, options=_FLAT)
    store.load_parts(path, {"optimizer": state}, world)
    set_optimizer_state_dict(network, optimizers, state, options=_FLAT)


def _check(world: World, folder: Path) -> None:
    torch.manual_seed(0)
    alone, sharded = (nn.Sequential(nn.Linear(64, 128), nn.MaxPool1d(2)) for _ in range(2))
    sharded.load_state_dict(alone.state_dict())
    apply_fsdp(sharded, [], world)
    odd = distribute_tensor(torch.zeros(3, 4096), world.mesh, [Shard(0)])
    assert has_eight_bit_state(odd) is True
    assert (
        has_eight_bit_state(distribute_tensor(torch.zeros(1, 4096), world.mesh, [Shard(0)]))
        is False
    )
    one, two = (build_optimizers(each, [], _EIGHT_BIT, "fp32") for each in (alone, sharded))
    _train(alone, one, 6)
    _train(sharded, two, 3)
    path = _save(sharded, two, folder, world)
    third = build_optimizers(sharded, [], _EIGHT_BIT, "fp32")
    _load(sharded, third, path, world)
    _train(sharded, third, 3)
    for mine, whole in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.detach()), whole.detach(), rtol=0, atol=1e-4)


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(world, Path(sys.argv[1]))
