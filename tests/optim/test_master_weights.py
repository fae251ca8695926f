"""Weights in bf16 train as well as in fp32. Run by torchrun, this file is one of two ranks."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.optim.steps import take_steps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

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
@pytest.mark.parametrize("most_elements", [2**26, 20])
def test_fp32_weights_move_as_with_torch(
    offload: bool, most_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, in one batch or many; where they lie beside their states without masters."""
    monkeypatch.setattr(master_weights, "MAX_BATCH_ELEMENTS", most_elements)
    wanted, found = _network(torch.float32), _network(torch.float32)
    torchs = torch.optim.AdamW(wanted.parameters(), fused=True, **_SETTINGS)
    ours = MasterAdamW(found.parameters(), offload=offload, **_SETTINGS)
    take_steps(torchs, list(wanted.parameters()))
    take_steps(ours, list(found.parameters()))
    _assert_equal(list(found.parameters()), list(wanted.parameters()))
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert ours.state[one].keys() == torchs.state[other].keys()
        _assert_equal(list(ours.state[one].values()), list(torchs.state[other].values()))


def test_weights_are_updated_together_while_their_fp32_gradients_take_256_mib() -> None:
    large, small = (torch.empty(2**power, device="meta") for power in (27, 25))
    batches = master_weights.in_batches([large, small, small, small])
    assert [len(batch) for batch in batches] == [1, 2, 1]


def test_two_ranks_update_as_one(run_on_two_ranks: Callable[..., None]) -> None:
    run_on_two_ranks(__file__)


def _check(world: World, dtype: torch.dtype, offload: bool) -> None:
    alone, sharded = _network(dtype), _network(dtype)
    apply_fsdp(sharded, [sharded[0], sharded[2]], world)
    one = MasterAdamW(alone.parameters(), **_SETTINGS)
    two = MasterAdamW(sharded.parameters(), offload=offload, **_SETTINGS)
    take_steps(one, list(alone.parameters()))
    take_steps(two, list(sharded.parameters()), range(3))
    sharded.zero_grad(set_to_none=True)
    saved = get_optimizer_state_dict(sharded, two, options=_FLAT)
    third = MasterAdamW(sharded.parameters(), offload=offload, **_SETTINGS)
    set_optimizer_state_dict(sharded, third, copy.deepcopy(saved), options=_FLAT)
    take_steps(third, list(sharded.parameters()), range(3, 5))
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
