"""Weights in bf16 train as well as in fp32. Run by torchrun, this file is one of two ranks."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from longtake.config import ParallelSection
from longtake.optim import master_weights
from longtake.optim.master_weights import MasterAdamW
from longtake.parallel.fsdp import apply_fsdp, full
from longtake.parallel.mesh import World, join

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def _train(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: Sequence[int] = range(5)
) -> None:
    """Steps of bf16 gradients that follow from their numbers, sharded like the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            gradient = gradient.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                gradient = distribute_tensor(gradient, mesh, placements)
            parameter.grad = gradient
        optimizer.step()


def _assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_bf16_weights_alone_do_not_move_at_a_usual_learning_rate() -> None:
    """1000 steps of 1e-5 ought to move a weight of 1 by 0.01; in bf16 each is rounded away."""
    alone, with_master = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    usual = torch.optim.AdamW([alone], lr=1e-5, weight_decay=0, fused=True)
    ours = MasterAdamW([with_master], lr=1e-5)
    for _ in range(1000):
        for parameter, optimizer in ((alone, usual), (with_master, ours)):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert (alone == 1).all()
    exact = ours.state[with_master]["master"]
    torch.testing.assert_close(exact, torch.full((4,), 0.99), rtol=1e-4, atol=0)
    assert torch.equal(with_master, exact.bfloat16())


@pytest.mark.parametrize("offload", [False, True])
def test_masters_move_like_fp32_weights(offload: bool) -> None:
    exact, rounded = _network(torch.float32), _network(torch.bfloat16)
    exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    _train(torch.optim.AdamW(exact.parameters(), fused=True, **_SETTINGS), list(exact.parameters()))
    ours = MasterAdamW(rounded.parameters(), offload=offload, **_SETTINGS)
    _train(ours, list(rounded.parameters()))
    _assert_equal([ours.state[p]["master"] for p in rounded.parameters()], list(exact.parameters()))
    _assert_equal(list(rounded.parameters()), [p.bfloat16() for p in exact.parameters()])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("most_elements", [2**26, 20])
def test_fp32_weights_move_as_with_torch(
    offload: bool, most_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in one batch or many; where they lie beside their states without masters."""
    monkeypatch.setattr(master_weights, "MAX_BATCH_ELEMENTS", most_elements)
    wanted, found = _network(torch.float32), _network(torch.float32)
    torchs = torch.optim.AdamW(wanted.parameters(), fused=True, **_SETTINGS)
    ours = MasterAdamW(found.parameters(), offload=offload, **_SETTINGS)
    _train(torchs, list(wanted.parameters()))
    _train(ours, list(found.parameters()))
    _assert_equal(list(found.parameters()), list(wanted.parameters()))
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert ours.state[one].keys() == torchs.state[other].keys()
        _assert_equal(list(ours.state[one].values()), list(torchs.state[other].values()))


def test_a_weight_without_gradient_is_left_alone() -> None:
    network = _network(torch.bfloat16)
    last = network.get_parameter("2.weight")
    before = last.detach().clone()
    ours = MasterAdamW(network.parameters(), **_SETTINGS)
    _train(ours, list(network[0].parameters()))
    assert torch.equal(last, before)
    assert len(ours.state) == 2


def test_a_restored_state_goes_on_to_the_last_bit() -> None:
    whole, first, second = (_network(torch.bfloat16) for _ in range(3))
    _train(MasterAdamW(whole.parameters(), **_SETTINGS), list(whole.parameters()), range(6))
    optimizers = [MasterAdamW(each.parameters(), **_SETTINGS) for each in (first, second)]
    _train(optimizers[0], list(first.parameters()), range(3))
    first.zero_grad(set_to_none=True)
    saved: dict[str, Any] = dict(get_optimizer_state_dict(first, optimizers[0], options=_FLAT))
    assert saved["state.0.weight.master"].dtype == torch.float32
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, optimizers[1], copy.deepcopy(saved), options=_FLAT)
    _train(optimizers[1], list(second.parameters()), range(3, 6))
    _assert_equal(list(second.parameters()), list(whole.parameters()))


def test_a_state_can_be_loaded_by_an_optimizer_that_has_none() -> None:
    """As torch's optimizers load theirs; no fp32 number passes through bf16 on its way."""
    network = _network(torch.bfloat16)
    ours, other = (MasterAdamW(network.parameters(), **_SETTINGS) for _ in range(2))
    _train(ours, list(network.parameters()))
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for parameter in network.parameters():
        _assert_equal(list(other.state[parameter].values()), list(ours.state[parameter].values()))


def test_two_ranks_update_as_one(run_on_two_ranks: Callable[..., None]) -> None:
    run_on_two_ranks(__file__)


def _check(world: World, dtype: torch.dtype, offload: bool) -> None:
    alone, sharded = _network(dtype), _network(dtype)
    apply_fsdp(sharded, [sharded[0], sharded[2]], world)
    one = MasterAdamW(alone.parameters(), **_SETTINGS)
    two = MasterAdamW(sharded.parameters(), offload=offload, **_SETTINGS)
    _train(one, list(alone.parameters()))
    _train(two, list(sharded.parameters()), range(3))
    sharded.zero_grad(set_to_none=True)
    saved = get_optimizer_state_dict(sharded, two, options=_FLAT)
    third = MasterAdamW(sharded.parameters(), offload=offload, **_SETTINGS)
    set_optimizer_state_dict(sharded, third, copy.deepcopy(saved), options=_FLAT)
    _train(third, list(sharded.parameters()), range(3, 5))
    for mine, whole in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine.detach()), whole.detach())
        assert third.state[mine].keys() == one.state[whole].keys()
        for name, value in one.state[whole].items():
            # Not to the last bit: the kernel counts the ends of rows otherwise than the rest.
            torch.testing.assert_close(full(third.state[mine][name]), value, rtol=1e-6, atol=1e-9)
        average = third.state[mine]["exp_avg"]
        assert isinstance(average, DTensor)
        assert average.placements == mine.placements  # type: ignore[attr-defined]


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        for dtype in (torch.float32, torch.bfloat16):
            for offload in (False, True):
                _check(world, dtype, offload)
