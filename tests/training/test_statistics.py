"""Norms, and where NaN and inf are, on one and two ranks; run by torchrun it is a rank."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.build import ALONE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from longtake.config import ParallelSection
from longtake.optim.prodigy import Prodigy
from longtake.optim.update import set_learning_rates
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.fsdp import apply_fsdp, full, local_shard, squares
from longtake.parallel.mesh import World, join
from longtake.training.guard_runner import describe_non_finite_gradients
from longtake.training.statistics import Norms, NormStats


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(60, 60, bias=False)
        self.mlp_in = nn.Linear(60, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.mlp_in(self.attn(x).tanh()))
        return out


class _Network(nn.Module):
    """Named as transformers are; one parameter is larger than what is probed of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 60)
        self.blocks = nn.ModuleList([_Block()])
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](self.embed(x))
        return out


def _network() -> _Network:
    torch.manual_seed(0)
    network = _Network()
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    network(x).pow(3).sum().backward()
    return network


def _norms(network: nn.Module, stats: NormStats, scale: float = 1.0, world: World = ALONE) -> Norms:
    return stats.norms(sum_over_ranks(stats.sums(), world), scale)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([each.detach().double().flatten() for each in tensors]).norm())


def test_norms_are_those_of_all_trained_tensors_together() -> None:
    """By group and in all; gradients as they will be after the scale; no frozen ones."""
    network = _network()
    stats = NormStats(network, list(network.blocks), ALONE)
    norms = _norms(network, stats, scale=3.0)
    trained = [p for p in network.parameters() if p.requires_grad]
    gradients = [p.grad for p in trained if p.grad is not None]
    assert norms.grad_norm == pytest.approx(3 * _norm(gradients), rel=1e-6)
    assert norms.weight_norm == pytest.approx(_norm(trained), rel=1e-6)
    assert stats.groups == ("embedding", "attention", "mlp", "other")
    attention = network.get_parameter("blocks.0.attn.weight")
    assert norms.group_weight_norms["attention"] == pytest.approx(_norm([attention]), rel=1e-6)
    embedding = list(network.embed.parameters())
    assert norms.group_weight_norms["embedding"] == pytest.approx(_norm(embedding), rel=1e-6)
    assert norms.update_ratio == norms.nonfinite_share == 0.0


def test_an_update_is_measured_where_it_was_made() -> None:
    network = _network()
    stats = NormStats(network, list(network.blocks), ALONE)
    before = copy.deepcopy(network)
    with stats.track_update(), torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    kept = stats.last_update()
    norms = _norms(network, stats)
    for group, names in {
        "embedding": ["embed.weight", "embed.bias"],
        "attention": ["blocks.0.attn.weight"],
    }.items():
        new = [network.get_parameter(name) for name in names]
        old = [before.get_parameter(name) for name in names]
        moved = _norm([a - b for a, b in zip(new, old, strict=True)])
        exact = 0.05 if group == "attention" else 1e-6  # 3,600 numbers, of which 900 are probed
        assert norms.group_update_ratios[group] == pytest.approx(moved / _norm(new), rel=exact)
    assert _norms(network, stats).update_ratio == 0.0
    stats.set_last_update(kept, num_ranks=1)
    assert _norms(network, stats).group_update_ratios == norms.group_update_ratios


def test_the_rate_of_an_update_is_what_its_optimizer_used() -> None:
    """The given one times Prodigy's estimate from before the step; it is kept with the update."""
    network = _network()
    optimizer = Prodigy(network.parameters(), lr=1.0)
    (group,) = optimizer.param_groups
    group |= {"base_lr": 1.0, "distance": 0.02}
    stats = NormStats(network, list(network.blocks), ALONE)
    with stats.track_update([optimizer]):
        set_learning_rates([optimizer], 0.5)
        group["distance"] = 0.3  # for the next step
    stats.set_last_update(stats.last_update(), num_ranks=1)
    assert _norms(network, stats).learning_rate_factor == 0.5 * 0.02
    assert _norms(network, stats).learning_rate_factor == 0.0


def test_weights_without_any_gradient_are_named_and_those_no_graph_reaches_are_not() -> None:
    """A layer that begins at 0 behind a gate that does too; LoRA's first half moves later."""
    network = _network()
    gate, out = nn.Parameter(torch.zeros(7)), nn.Linear(7, 7)
    nn.init.zeros_(out.weight)
    nn.init.zeros_(out.bias)
    network.register_parameter("gate", gate)
    network.add_module("out", out)
    network.add_module("unused", nn.Linear(2, 2))
    stats = NormStats(network, list(network.blocks), ALONE)
    for is_first in (True, False):
        network.zero_grad()
        x = network(torch.ones(8, 5))
        scale = network.embed.weight.sum() * (0 if is_first else 1)  # as before B has moved
        (x + gate * out(x) + scale).pow(3).sum().backward()
        assert network.embed.weight.grad is not None
        network.embed.weight.grad.fill_(1e-30)  # whose square is 0 in fp32
        stats.sums()
        assert stats.without_gradient(ALONE) == ["gate", "out.weight", "out.bias"]


def test_numbers_that_are_none_are_counted() -> None:
    network = _network()
    gradient = network.embed.weight.grad
    assert gradient is not None
    gradient[0, :2] = torch.tensor([float("nan"), float("inf")])
    stats = NormStats(network, list(network.blocks), ALONE)
    norms = _norms(network, stats)
    elements = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert norms.nonfinite_share == pytest.approx(2 / elements)
    assert torch.tensor(norms.grad_norm).isnan()
    assert torch.tensor(norms.group_grad_norms["attention"]).isfinite()


def test_without_gradients_the_norm_is_zero() -> None:
    network = _network()
    network.zero_grad(set_to_none=True)
    assert _norms(network, NormStats(network, list(network.blocks), ALONE)).grad_norm == 0.0


# --- NaN and inf are located ------------------------------------------------------------------


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.last(x)
        return out


def _with_gradients(dtype: torch.dtype = torch.float32) -> _Deep:
    torch.manual_seed(0)
    network = _Deep().to(dtype)
    network(torch.ones(2, 4, dtype=dtype)).sum().backward()
    return network


def _gradient(model: nn.Module, name: str) -> Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_parameters_their_blocks_and_how_much_is_lost(dtype: torch.dtype) -> None:
    network = _with_gradients(dtype)
    for index, values in ((0, [float("nan")]), (1, [float("nan"), float("inf"), -float("inf")])):
        _gradient(network, f"blocks.{index}.weight")[0, : len(values)] = torch.tensor(values)
    said = describe_non_finite_gradients(network, list(network.blocks), ALONE)
    assert "the gradients of 2 of 9 trained parameters" in said
    named = (
        "blocks.1.weight (block 2 of 3), 1 NaN and 2 infinite of 16 numbers; "
        "blocks.0.weight (block 1 of 3), 1 NaN of 16 numbers."
    )
    assert said.endswith(named)


def test_names_no_more_than_a_few() -> None:
    network = _with_gradients()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    said = describe_non_finite_gradients(network, list(network.blocks), ALONE)
    assert "first: last.weight (outside the blocks), 4 infinite of 4 numbers; blocks.2." in said
    assert "9 of 9" in said
    assert said.endswith("blocks.2.weight (block 3 of 3), 16 infinite of 16 numbers and more.")


def test_gradients_may_be_finite_though_their_norm_is_not() -> None:
    network = _with_gradients()
    _gradient(network, "last.weight").fill_(1e30)
    assert squares([_gradient(network, "last.weight")]).isinf().all()
    assert "Each gradient is finite" in describe_non_finite_gradients(
        network, list(network.blocks), ALONE
    )


def test_two_ranks_measure_what_one_measures(run_on_two_ranks: Callable[..., None]) -> None:
    run_on_two_ranks(__file__)


def _check(world: World) -> None:
    alone, spread_out = _network(), _network()
    gradients = [p.grad for p in alone.parameters()]
    spread_out.zero_grad(set_to_none=True)
    apply_fsdp(spread_out, list(spread_out.blocks), world)
    samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    spread_out(samples).pow(3).sum().backward()
    pairs = ((alone, ALONE), (spread_out, world))
    measured = [NormStats(each, list(each.blocks), of) for each, of in pairs]
    for network, stats in zip((alone, spread_out), measured, strict=True):
        with stats.track_update(), torch.no_grad():
            for parameter in network.parameters():
                local_shard(parameter).mul_(1.5)
    kept = sum_over_ranks(measured[1].last_update(), world)
    wanted = _norms(alone, measured[0])
    found = _norms(spread_out, measured[1], world=world)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.weight_norm == pytest.approx(wanted.weight_norm, rel=1e-6)
    for group in measured[0].groups:
        assert found.group_update_ratios[group] == pytest.approx(
            wanted.group_update_ratios[group], rel=0.1
        )
    measured[1].set_last_update(kept, world.size)
    again = _norms(spread_out, measured[1], world=world)
    assert again.group_update_ratios == pytest.approx(found.group_update_ratios, rel=1e-12)
    assert len(gradients) == len(list(spread_out.parameters()))
    if world.rank == 1:
        lost = spread_out.get_parameter("blocks.0.attn.weight").grad
        assert lost is not None
        local_shard(lost)[0, 0] = float("nan")
    lost_norms = _norms(spread_out, measured[1], world=world)
    assert 0 < lost_norms.nonfinite_share < 1e-3
    assert torch.tensor(lost_norms.grad_norm).isnan()


def _check_named(world: World) -> None:
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
    assert said == describe_non_finite_gradients(alone, list(alone.blocks), ALONE)
    assert "blocks.1.weight (block 2 of 3), 1 NaN of 16" in said
    assert (
        full(_gradient(sharded, "last.weight")).isfinite().all()
    )  # one row: rank 1 has none of it


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(world)
        _check_named(world)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        _check(World(world.rank, world.local_rank, 2, world.device, mesh))
