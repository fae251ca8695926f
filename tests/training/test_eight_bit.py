"""AdamW with 8-bit states trains like AdamW, and goes on after a break as if there had been none.

Run by torchrun, this file is one of two ranks.
"""

import copy
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from longtake.checkpoint import store
from longtake.checkpoint.saver import keep_saver
from longtake.config import CheckpointSection, OptimizerSection, ParallelSection
from longtake.errors import RecipeError
from longtake.parallel.fsdp import apply_fsdp, full
from longtake.parallel.mesh import World, join
from longtake.planner.measure import measured
from longtake.run_dir import RunDirectory
from longtake.training.eight_bit import has_eight_bit_state, refuse_missing_torchao
from longtake.training.optim import build_optimizers, set_learning_rates
from longtake.training.optimizer_memory import optimizer_bytes

_SECTION = OptimizerSection(kind="adamw8bit", learning_rate=2e-3)
_ALONE = World(0, 0, 1, torch.device("cpu"), None)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


@pytest.fixture(autouse=True)
def _let_torch_compile(recwarn: pytest.WarningsRecorder) -> None:
    """Compiling warns about parts of torch and of torchao that will go one day."""


def _network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
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
        refuse_missing_torchao(_SECTION)
    with pytest.raises(RecipeError, match="pip install"):
        build_optimizers(_network(), [], _SECTION, "fp32")
    refuse_missing_torchao(OptimizerSection())


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update is compiled at the first step: too late to find that it cannot be."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RecipeError, match=r"no C\+\+ compiler here"):
        refuse_missing_torchao(_SECTION)


@pytest.mark.parametrize(
    ("shape", "expected"), [((64, 64), True), ((4095,), False), ((4096,), True), ((3, 1366), False)]
)
def test_large_states_in_whole_blocks_are_kept_in_eight_bits(
    shape: tuple[int, ...], expected: bool
) -> None:
    """At least 4096 numbers, in blocks of 256."""
    assert has_eight_bit_state(torch.empty(shape, device="meta")) == expected


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_within_its_bytes_and_goes_on_after_a_break(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Near AdamW's loss; a restored run ends with the same weights; nobody else's luck changes."""
    network, reference = _network(dtype), _network()
    optimizers = build_optimizers(network, [], _SECTION, "fp32")
    set_learning_rates(optimizers, 1.0)
    with measured(torch.device("cpu")) as memory:
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    gradients = sum(parameter.nbytes for parameter in network.parameters())
    predicted = optimizer_bytes(network, [], _SECTION, "fp32", "cpu").device
    assert memory.end_bytes - gradients == pytest.approx(predicted, abs=64)
    network.zero_grad(set_to_none=True)

    luck = torch.get_rng_state()
    _train(network, optimizers, 30)
    assert torch.equal(torch.get_rng_state(), luck)
    saved = copy.deepcopy(network.state_dict())
    path = _save(network, optimizers, tmp_path, _ALONE)
    loss = _train(network, optimizers, 30)

    again = _network(dtype)
    again.load_state_dict(saved)
    others = build_optimizers(again, [], _SECTION, "fp32")
    _load(again, others, path, _ALONE)
    assert _train(again, others, 30) == loss
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)

    usual = build_optimizers(reference, [], OptimizerSection(learning_rate=2e-3), "fp32")
    first = _train(reference, usual, 1)
    assert loss - _train(reference, usual, 59) < 0.05 * first


@needs_torchao
@pytest.mark.slow
def test_two_ranks_update_as_one(run_on_two_ranks: Callable[..., None], tmp_path: Path) -> None:
    """Sharded weights have sharded 8-bit states, and save and restore them as such."""
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
    one, two = (build_optimizers(each, [], _SECTION, "fp32") for each in (alone, sharded))
    _train(alone, one, 6)
    _train(sharded, two, 3)
    path = _save(sharded, two, folder, world)
    third = build_optimizers(sharded, [], _SECTION, "fp32")
    _load(sharded, third, path, world)
    _train(sharded, third, 3)
    for mine, whole in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.detach()), whole.detach(), rtol=0, atol=1e-4)


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(world, Path(sys.argv[1]))
