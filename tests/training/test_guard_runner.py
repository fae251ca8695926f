"""NaN and inf in gradients are located. Run by torchrun, this file is one of two ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longtake.config import ParallelSection
from longtake.parallel.fsdp import apply_fsdp, full, squares
from longtake.parallel.mesh import World, join
from longtake.training.guard_runner import describe_non_finite_gradients

_ALONE = World(0, 0, 1, torch.device("cpu"), None)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        out: torch.Tensor = self.last(x)
        return out


def _with_gradients(dtype: torch.dtype = torch.float32) -> _Network:
    torch.manual_seed(0)
    network = _Network().to(dtype)
    network(torch.ones(2, 4, dtype=dtype)).sum().backward()
    return network


def _gradient(model: nn.Module, name: str) -> torch.Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_parameters_their_blocks_and_how_much_is_lost(dtype: torch.dtype) -> None:
    """The last in the model come first; sound ones are not named."""
    network = _with_gradients(dtype)
    for index, values in ((0, [float("nan")]), (1, [float("nan"), float("inf"), -float("inf")])):
        _gradient(network, f"blocks.{index}.weight")[0, : len(values)] = torch.tensor(values)
    said = describe_non_finite_gradients(network, list(network.blocks), _ALONE)
    assert "the gradients of 2 of 9 trained parameters" in said
    named = (
        "blocks.1.weight (block 2 of 3), 1 NaN and 2 infinite of 16 numbers; "
        "blocks.0.weight (block 1 of 3), 1 NaN of 16 numbers."
    )
    assert said.endswith(named)


def test_names_no_more_than_a_few() -> None:
    """A model has thousands of parameters."""
    network = _with_gradients()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    said = describe_non_finite_gradients(network, list(network.blocks), _ALONE)
    assert "first: last.weight (outside the blocks), 4 infinite of 4 numbers; blocks.2." in said
    assert "9 of 9" in said
    assert said.endswith("blocks.2.weight (block 3 of 3), 16 infinite of 16 numbers and more.")


def test_gradients_may_be_finite_though_their_norm_is_not() -> None:
    """1e30 squared is more than fp32 holds."""
    network = _with_gradients()
    _gradient(network, "last.weight").fill_(1e30)
    assert squares([_gradient(network, "last.weight")]).isinf().all()
    assert "Each gradient is finite" in describe_non_finite_gradients(
        network, list(network.blocks), _ALONE
    )


def test_two_ranks_say_what_one_says(run_on_two_ranks: Callable[..., None]) -> None:
    """Sharded: a NaN on one rank is named by both, and neither waits for the other."""
    run_on_two_ranks(__file__)


def _check(world: World) -> None:
    alone, sharded = _with_gradients(), _with_gradients()
    sharded.zero_grad(set_to_none=True)
    apply_fsdp(sharded, list(sharded.blocks), world)
    sharded(torch.ones(2, 4)).sum().backward()
    share = _gradient(sharded, "blocks.1.weight")
    assert isinstance(share, DTensor)
    if world.rank == 1:
        share.to_local()[0, 0] = float("nan")
    _gradient(alone, "blocks.1.weight")[2, 0] = float("nan")
    said = describe_non_finite_gradients(sharded, list(sharded.blocks), world)
    assert said == describe_non_finite_gradients(alone, list(alone.blocks), _ALONE)
    assert "blocks.1.weight (block 2 of 3), 1 NaN of 16" in said
    assert (
        full(_gradient(sharded, "last.weight")).isfinite().all()
    )  # one row: rank 1 has none of it


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(world)
