"""Gradients of bf16 weights add up in fp32. Run by torchrun, this file is one of two ranks."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.build import ALONE, MakeRecipe, quiet_session
from torch import Tensor, nn

from longtake.config import ParallelSection
from longtake.data.catalog import Catalog
from longtake.data.loader import Loader
from longtake.models.components import assemble
from longtake.parallel.fsdp import apply_fsdp, full, reduce_gradients, set_gradient_sync
from longtake.parallel.mesh import World, arranged, join
from longtake.planner.devices import CPU
from longtake.planner.memory import outline_step, static_memory
from longtake.planner.profiler import measured
from longtake.training.build import build_state
from longtake.training.step import compute_gradients

_MICRO_BATCHES = 8
_ONE_ROUNDING = 2.0**-8
"""The largest relative error of rounding to bf16."""


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 8))
    return network.to(torch.bfloat16)


def _micro_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(_MICRO_BATCHES, 4, 16, generator=generator)
    return list(made.to(torch.bfloat16))


def _backward(network: nn.Module, batch: Tensor) -> None:
    loss = network(batch).float().square().mean()
    loss.backward()


def _exact() -> list[Tensor]:
    """The sum of the gradients of all micro-batches, in fp64."""
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in _network().parameters()]
    for batch in _micro_batches():
        network = _network()
        _backward(network, batch)
        for total, parameter in zip(sums, network.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.double()
    return sums


def _accumulated(world: World) -> list[Tensor]:
    """The same by backward passes of this rank's micro-batches, one after the other."""
    network = _network()
    apply_fsdp(network, [], world)
    mine = _micro_batches()[world.rank :: world.size]
    for number, batch in enumerate(mine, start=1):
        set_gradient_sync(network, wanted=number == len(mine))
        _backward(network, batch)
    reduce_gradients(network, [], world)
    gradients = [parameter.grad for parameter in network.parameters()]
    return [full(each).double() * world.size for each in gradients if each is not None]


def _largest_error(found: Sequence[Tensor]) -> float:
    pairs = zip(found, _exact(), strict=True)
    return max(
        float(((one - exact).abs() / exact.abs().clamp(min=1e-9)).max()) for one, exact in pairs
    )


def test_micro_batches_add_up_without_rounding_to_bf16() -> None:
    """On one process; bf16 sums would be wrong by some tenths of a per cent."""
    assert _largest_error(_accumulated(ALONE)) < 1e-5


def test_two_ranks_add_up_to_the_same(run_on_two_ranks: Callable[..., None]) -> None:
    run_on_two_ranks(__file__)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_plan_counts_gradients_as_they_are_measured(
    small_recipe: MakeRecipe, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtake.models.text.MAX_WORDS", 8)  # fewer than the captions have
    recipe = small_recipe(
        f"trainable.kind={kind}", "model.dtype=bf16", "ema.decay=0.0",
        "training.global_batch_size=8", "training.micro_batch_size=4",
    )  # fmt: skip
    step = outline_step(recipe, CPU)
    trace = step.tracer.trace({})
    assert recipe.data.catalog is not None
    parts = assemble(recipe, Catalog.load(recipe.data.catalog).captions(), None)
    session = quiet_session(recipe)
    state = build_state(session, parts)
    (batch,) = Loader(recipe.data, batch_size=8, seed=0).batches(1)
    compute_gradients(session, state, batch)
    parts.model.zero_grad(set_to_none=True)
    with measured(torch.device("cpu")) as memory:
        compute_gradients(session, state, batch)
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    gradients = sum(4 * p.numel() for p in trained)
    assert static_memory(step).gradients == gradients
    assert sum(p.grad.nbytes for p in trained if p.grad is not None) == gradients
    assert memory.end_bytes == pytest.approx(gradients, rel=0.01)
    predicted = trace.peak_bytes - trace.weight_bytes
    assert predicted == pytest.approx(memory.peak_bytes, rel=0.05)


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as world:
        assert _largest_error(_accumulated(world)) < 1.01 * _ONE_ROUNDING
        assert _largest_error(_accumulated(arranged(world, ParallelSection()))) < 1e-5
