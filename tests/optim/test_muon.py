"""What Muon promises: orthogonal steps, torch's own numbers, and the same on any rank count.

Run by torchrun, this file is one of two ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim.steps import take_steps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from longtake.config import ParallelSection
from longtake.optim import muon
from longtake.optim.muon import Muon, orthogonalise
from longtake.parallel.fsdp import apply_fsdp
from longtake.parallel.mesh import World, arranged, join

_SHAPES = [(24, 24), (96, 24), (96, 24), (24, 96), (24, 24), (7, 5)]


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 96, 24), (1, 24, 96), (3, 32, 48)])
def test_the_singular_values_of_a_step_are_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for scale in (1e-6, 1.0, 1e6):
        values = torch.linalg.svdvals(orthogonalise(scale * torch.randn(shape)).float())
        median = values.median().item()
        assert 0.7 < median < 1.2
        assert values.max() < 1.3
    assert values.shape == (*shape[:-2], min(shape[-2:]))


def test_orthogonalising_keeps_the_singular_vectors() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 16)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalise(matrix[None])[0].float()
    assert torch.cosine_similarity(result.flatten(), (u @ vh).flatten(), dim=0) > 0.98


def test_a_batch_equals_its_members() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 48, 24)
    alone = torch.cat([orthogonalise(matrix[None]) for matrix in batch])
    torch.testing.assert_close(orthogonalise(batch), alone, atol=0.01, rtol=0.0)


def test_a_zero_gradient_is_a_zero_step() -> None:
    assert not orthogonalise(torch.zeros(1, 4, 3)).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(nesterov: bool, weight_decay: float) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "weight_decay": weight_decay}
    ours, theirs, start = _parameters(), _parameters(), _parameters()
    take_steps(Muon(ours, **settings), ours)
    take_steps(torch.optim.Muon(theirs, **settings), theirs)
    for one, two, before in zip(ours, theirs, start, strict=True):
        moved = (two - before).norm()
        assert ((one - two).norm() / moved).item() < 0.01


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not of \[3\]; give this one to AdamW"):
        Muon([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    "setting", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"num_iterations": 0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Muon(_parameters(), **setting)


def test_two_sharded_processes_take_the_steps_of_one(
    run_on_two_ranks: Callable[..., None], tmp_path: Path
) -> None:
    run_on_two_ranks(__file__, str(tmp_path))
    model = _layers()
    take_steps(Muon(_matrices(model)), list(model.parameters()), range(4))
    sharded = torch.load(tmp_path / "weights.pt")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(sharded[name], weight, atol=1e-6, rtol=0.0)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 10), nn.Linear(10, 5))


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def _train_sharded(world: World, folder: Path) -> None:
    """Each rank orthogonalises half of the four matrices in each step."""
    model, whole, orthogonalised = _layers(), muon.orthogonalise, list[int]()

    def counted(matrices: Tensor, num_iterations: int) -> Tensor:
        orthogonalised.append(len(matrices))
        return whole(matrices, num_iterations)

    muon.orthogonalise = counted  # type: ignore[assignment]
    apply_fsdp(model, list(model), world)
    optimizer = Muon(_matrices(model))
    take_steps(optimizer, list(model.parameters()), range(2))
    momentum = optimizer.state[_matrices(model)[0]]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    saved = get_optimizer_state_dict(model, optimizer)
    optimizer = Muon(_matrices(model))
    set_optimizer_state_dict(model, optimizer, saved)
    take_steps(optimizer, list(model.parameters()), range(2, 4))
    assert sum(orthogonalised) == 4 * 2
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if world.is_first:
        torch.save(weights, folder / "weights.pt")
    _check_replicas(world, orthogonalised)


def _check_replicas(world: World, orthogonalised: list[int]) -> None:
    """Each rank computes half of the steps, and all take the steps of one, bit by bit."""
    replicated = arranged(world, ParallelSection())
    assert replicated.mesh is not None
    for dtype in (torch.float32, torch.bfloat16):
        alone, shared = _layers(), _layers()
        for model, replicas in ((alone, None), (shared, replicated.mesh.get_group())):
            optimizer = Muon(_matrices(model), dtype=dtype, replicas=replicas)
            orthogonalised.clear()
            take_steps(optimizer, list(model.parameters()), range(2))
            assert sum(orthogonalised) == (4 if replicas is None else 2) * 2
        for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
            assert torch.equal(one, other)


def test_batches_of_bounded_size_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[Tensor]:
        model = _layers()
        optimizer = Muon(_matrices(model), dtype=torch.float32)
        take_steps(optimizer, list(model.parameters()), range(1))
        return [parameter.detach() for parameter in model.parameters()]

    together = step()
    monkeypatch.setattr(muon, "_MAX_BATCH_ELEMENTS", 1)
    torch.testing.assert_close(step(), together)


if __name__ == "__main__":
    with join("cpu", ParallelSection(strategy="shard")) as entered:
        _train_sharded(entered, Path(sys.argv[1]))
