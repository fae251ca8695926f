"""Weights that are updated in the backward pass, each alone."""

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake.config import OptimizerSection
from longtake.errors import RecipeError
from longtake.optim.build import build_optimizers
from longtake.optim.fused_backward import refuse_fused_ranks, updating_in_backward

_SECTION = OptimizerSection(fused_backward=True, max_grad_norm=1e9)


def _loss(network: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    return (network(x) - torch.sin(2 * x)).square().mean()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")  # compiling warns of parts that will go
def test_eight_bit_states_are_those_of_ordinary_steps() -> None:
    torch.manual_seed(0)
    ordinary = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    fused = copy.deepcopy(ordinary)
    section = _SECTION.model_copy(update={"kind": "adamw8bit"})
    (expected,), (optimizer,) = (
        build_optimizers(each, [], section, "fp32") for each in (ordinary, fused)
    )
    for step in range(3):
        _loss(ordinary, step).backward()  # type: ignore[no-untyped-call]
        expected.step()
        ordinary.zero_grad(set_to_none=True)
        with updating_in_backward([optimizer], 1.0) as norms:
            _loss(fused, step).backward()  # type: ignore[no-untyped-call]
        assert norms.keys() == set(fused.parameters())
        assert all(weight.grad is None for weight in fused.parameters())
    assert all(map(torch.equal, fused.parameters(), ordinary.parameters()))
    assert len(optimizer.param_groups[0]["params"]) == 2  # a checkpoint has them all


def test_each_step_is_of_one_weight_also_where_rules_make_several_groups() -> None:
    network = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    rules = [{"layers": ["0"], "factor": 2.0}]
    section = OptimizerSection(fused_backward=True, max_grad_norm=1e9, rules=rules)  # type: ignore[arg-type]
    (optimizer,) = build_optimizers(network, [], section, "fp32")
    counts: list[list[int]] = []
    optimizer.register_step_pre_hook(
        lambda *_: counts.append([len(group["params"]) for group in optimizer.param_groups])
    )
    with updating_in_backward([optimizer], 1.0):
        _loss(network, 0).backward()  # type: ignore[no-untyped-call]
    assert sorted(counts) == [[0, 1], [1, 0]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


class _Shared(nn.Module):
    """A weight that two reentrant checkpoint calls use: each hands on its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_in_parts_is_refused() -> None:
    network = _Shared()
    optimizers = build_optimizers(network, [], _SECTION, "fp32")
    message = r"shape \[64\].* came in several parts.* use_reentrant=False"
    with pytest.raises(RecipeError, match=message), updating_in_backward(optimizers, 1.0):
        _loss(network, 0).backward()  # type: ignore[no-untyped-call]
    # The hooks are gone: an ordinary step follows.
    _loss(network, 1).backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None for weight in network.parameters())


def test_several_processes_are_refused() -> None:
    refuse_fused_ranks(_SECTION, 1)
    refuse_fused_ranks(OptimizerSection(), 2)
    with pytest.raises(RecipeError, match="there are 2 processes: start one"):
        refuse_fused_ranks(_SECTION, 2)


def test_a_step_that_fails_leaves_the_optimizer_all_its_weights() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("out of memory")

    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = Fails(weights, lr=0.1)
    with pytest.raises(RuntimeError, match="out of memory"), updating_in_backward([optimizer], 1.0):
        torch.autograd.backward(torch.cat(tuple(weights)).sum())
    assert optimizer.param_groups[0]["params"] == weights
