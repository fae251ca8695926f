"""A spread model is the same model. Run by torchrun, this file is one of two ranks."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.build import ALONE, not_none
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from longtake.config import EmaProfile, ParallelSection
from longtake.errors import JointWorkError
from longtake.optim.update import Averages
from longtake.parallel.collectives import gather_objects, joint_work, sum_over_ranks
from longtake.parallel.fsdp import (
    apply_fsdp,
    clip_gradients,
    free_gathered,
    full,
    local_shard,
    reduce_gradients,
    send_weights,
    set_gradient_sync,
    squares,
)
from longtake.parallel.mesh import World, arranged, join

_PROFILES = [EmaProfile(name="fixed", decay=0.9), EmaProfile(name="power", sigma_rel=0.1)]


def test_alone_a_model_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    apply_fsdp(model, list(model), ALONE)
    set_gradient_sync(model, wanted=False)
    assert type(model) is nn.Sequential
    assert not isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_gradients_are_clipped_to_a_norm(max_norm: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    clip_gradients(model, 5.0, max_norm)
    assert model.weight.grad.norm().item() == pytest.approx(min(5.0, max_norm), rel=1e-4)
    # Tiny ones too as by torch, which adds to the norm.
    tiny = torch.tensor([[3e-6, 4e-6]])
    model.weight.grad = tiny.clone()
    torch.nn.utils.clip_grad_norm_(model.weight, max_norm * 1e-6)
    expected, model.weight.grad = model.weight.grad, tiny
    clip_gradients(model, 5e-6, max_norm * 1e-6)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("bfloat16", "float32", "bfloat16")])
def test_bf16_gradients_have_a_norm_as_accurate_as_fp32(dtypes: tuple[str, ...]) -> None:
    """A norm or a factor in bf16 would change most gradients."""
    torch.manual_seed(0)
    kinds = zip((10, 1000, 30_000), dtypes, strict=True)
    model = nn.ParameterList(torch.zeros(n, dtype=getattr(torch, kind)) for n, kind in kinds)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    before = _gradients(model)
    norm = before.norm().item()
    found = squares([p.grad for p in model.parameters() if p.grad is not None])
    assert found.sum().sqrt().item() == pytest.approx(norm, rel=1e-5)
    clip_gradients(model, 3 * norm, 7.0, scale=3.0)
    wanted = (before * 7 / norm).bfloat16()
    assert (_gradients(model).bfloat16() == wanted).double().mean() > 0.99


def _gradients(model: nn.Module) -> Tensor:
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients)


def test_two_ranks_have_the_gradients_of_one(run_on_two_ranks: Callable[..., None]) -> None:
    run_on_two_ranks(__file__)


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def _accumulate(model: nn.Module, samples: Tensor, world: World = ALONE) -> None:
    """Two micro-steps, of which only the second reduces."""
    for number, part in enumerate(samples.chunk(2), start=1):
        set_gradient_sync(model, wanted=number == 2)
        (model(part).square().sum() / len(samples)).backward()
    reduce_gradients(model, list(model.children()), world)


def _assert_equal_gradients(
    alone: nn.Module, model: nn.Module, rtol: float = 1.3e-6, atol: float = 1e-5
) -> None:
    """Compare gradients, which have one dtype, of a whole model and of a spread one."""
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        gradient = full(not_none(other.grad))
        torch.testing.assert_close(gradient, not_none(one.grad), rtol=rtol, atol=atol)


def _norm(model: nn.Module, world: World = ALONE) -> float:
    """Norm of all gradients, from every rank's share."""
    shares = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    local = float(squares(shares).sum()) / world.num_copies
    return math.sqrt(sum_over_ranks({"squares": local}, world)["squares"])


def _check(world: World, parts: int) -> None:
    samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    alone, model = _build(), _build()
    apply_fsdp(model, [model[0], model[2]], world)
    is_sharded = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    assert is_sharded == {parts > 1}
    assert local_shard(next(model.parameters())).shape == (6 // parts, 5)

    _accumulate(alone, samples)
    _accumulate(model, samples.chunk(2)[world.rank], world)
    expected = _norm(alone)
    assert expected > 0.5
    assert _norm(model, world) == pytest.approx(expected, rel=1e-6)
    for network in (alone, model):
        clip_gradients(network, expected, 0.5)

    if world.is_sharded:
        halves = [_build().bfloat16(), _build().bfloat16()]
        apply_fsdp(halves[1], [halves[1][0], halves[1][2]], world)
        for half, network in zip(halves, (alone, model), strict=True):
            for one, other in zip(half.parameters(), network.parameters(), strict=True):
                one.grad = not_none(other.grad).bfloat16()
        assert _norm(halves[1], world) == pytest.approx(_norm(halves[0]), rel=1e-6)

    averages = [Averages(network, _PROFILES) for network in (alone, model)]
    for network, each in zip((alone, model), averages, strict=True):
        torch.optim.AdamW(network.parameters(), lr=0.1, fused=True).step()
        each.update(2)
    _assert_equal_gradients(alone, model)
    for (name, wanted), found in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(found.detach()), wanted.detach())
        for profile, state in averages[0].states().items():
            sharded = averages[1].states()[profile]
            torch.testing.assert_close(full(sharded[name]), state[name])
            assert list(sharded) == list(alone.state_dict())
    model.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())


class Mixed(nn.Module):
    """Trains in two dtypes, as Wan's blocks do, with a part that is asked beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6).bfloat16()])
        self.side = Prepares(6, 6).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, 6]."""
        prepared = self.side.prepare()
        hidden = self.layers[1]((self.layers[0](tokens) * self.scale).bfloat16())
        changed: Tensor = self.side(hidden + prepared).float()
        return changed


class Prepares(nn.Linear):
    """Asked as an added module is."""

    def prepare(self) -> Tensor:
        """[6]."""
        return self.weight.sum(0)


def _check_mixed(world: World) -> None:
    """FSDP2 alone refuses this: it shards together only parameters of one dtype."""
    torch.manual_seed(0)
    alone = Mixed()
    model = copy.deepcopy(alone)
    apply_fsdp(model, [], world)
    samples = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    _accumulate(alone, samples)
    _accumulate(model, samples.chunk(2)[world.rank])
    assert all(isinstance(each, DTensor) for each in model.parameters())
    _assert_equal_gradients(alone, model, rtol=0.1, atol=0.1)


def _collectives(
    model: nn.Module, samples: Tensor, world: World, *, is_last: bool
) -> dict[str, int]:
    """Count the collectives after a micro-step's forward pass, by kind."""
    set_gradient_sync(model, wanted=is_last)
    losses = model(samples).square().sum()
    with CommDebugMode() as seen:  # type: ignore[no-untyped-call]
        losses.backward()
        if is_last:
            reduce_gradients(model, list(model.children()), world)
    return {str(kind): count for kind, count in seen.get_comm_counts().items() if count}


def _check_that_only_the_last_micro_step_reduces(world: World) -> None:
    """Replicated, ranks need nothing of each other in all others; sharded, only the weights."""
    samples = torch.randn(4, 5, generator=torch.Generator().manual_seed(world.rank))
    replicated, sharded, copies = _build(), _build(), arranged(world, ParallelSection())
    apply_fsdp(replicated, [replicated[0], replicated[2]], copies)
    apply_fsdp(sharded, [sharded[0], sharded[2]], world)
    assert _collectives(replicated, samples, copies, is_last=False) == {}
    assert _collectives(replicated, samples, copies, is_last=True) == {"c10d.allreduce_": 2}
    assert set(_collectives(sharded, samples, world, is_last=False)) == {"c10d._allgather_base_"}
    reduced = _collectives(sharded, samples, world, is_last=True)
    assert reduced["c10d._reduce_scatter_base_"] == 2


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that copy a weight, or into one."""

    _COPYING = ("copy", "clone", "cat", "allgather", "unshard")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._weights = {_place(local_shard(parameter)) for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in self._COPYING):
            tensors = torch.utils._pytree.tree_leaves((args, kwargs))
            places = {_place(each) for each in tensors if isinstance(each, Tensor)}
            self.count += bool(places & self._weights)
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_that_replicas_copy_no_weight(world: World) -> None:
    """FSDP2 does, on a mesh with shards of 1, which gives the same gradients bit by bit."""
    of_one = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).chunk(2)[world.rank]
    counts, gradients = [], []
    for here in (arranged(world, ParallelSection()), replace(world, mesh=of_one)):
        model = _build()
        apply_fsdp(model, [model[0], model[2]], here)
        with _Copies(model) as copies:
            _accumulate(model, samples, here)
        counts.append(copies.count)
        gradients.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    assert counts[0] == 0
    assert counts[1] > 0
    assert all(map(torch.equal, *gradients))


def _check_that_replicas_begin_and_stay_equal(world: World) -> None:
    """Parameters that have a gradient on one rank only are averaged, too."""
    torch.manual_seed(world.rank)  # as random numbers of two kinds of processors
    frozen, trained = blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model, copies = nn.Sequential(*blocks), arranged(world, ParallelSection())
    frozen.requires_grad_(False)
    apply_fsdp(model, blocks, copies)
    send_weights(model, copies)
    mine, theirs = gather_objects([each.weight.tolist() for each in (frozen, trained)], world)
    assert mine[0] != theirs[0]
    assert mine[1] == theirs[1]
    if world.is_first:
        model(torch.ones(1, 2)).sum().backward()
    reduce_gradients(model, blocks, copies)
    assert not_none(trained.bias.grad).tolist() == [0.5, 0.5]


def _check_that_gradients_add_up_in_fp32(world: World) -> None:
    """A small one added to a large one would be lost in bf16; FSDP2 rounds their sum."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False)).bfloat16()
    apply_fsdp(model, [model[0]], world)
    parts = [1.0, *[2.0**-9] * 4]
    for number, size in enumerate(parts, start=1):
        set_gradient_sync(model, wanted=number == len(parts))
        model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    reduce_gradients(model, list(model), world)
    found = full(not_none(next(model.parameters()).grad))
    assert found.dtype == (torch.bfloat16 if world.is_sharded else torch.float32)
    assert found.flatten().tolist() == [1 + 2.0**-7] * 2  # and 1 if added up in bf16


def _check_that_weights_travel_in_bf16(world: World) -> None:
    """Parameters and gradients stay in fp32."""
    alone, model = _build(), _build()
    apply_fsdp(model, [model[0], model[2]], world, gather_in_bf16=True)
    met = []
    model[0].register_forward_pre_hook(lambda layer, _args: met.append(layer.weight.dtype))
    samples = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for network, part in ((alone, samples), (model, samples.chunk(2)[world.rank])):
        with torch.autocast("cpu", torch.bfloat16):
            losses = network(part).float().square().sum() / len(part)
        losses.backward()
    assert met == [torch.bfloat16]
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    _assert_equal_gradients(alone, model, rtol=0.03, atol=0.01)


def _check_that_an_error_of_one_ends_a_pass_on_all(world: World) -> None:
    """Passes and gradients behind it are as without it, bit by bit."""
    samples = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))

    def fail(*_: object) -> None:
        if world.rank == 1:
            raise ValueError("a broken kernel")

    outcomes = []
    for fails in (False, True):
        model = _build()
        apply_fsdp(model, [model[0], model[2]], world)
        free_gathered(model)
        if fails:
            hook = model[0].register_forward_hook(fail, prepend=True)  # its weights are gathered
            expected = ValueError if world.rank == 1 else JointWorkError
            broken = pytest.raises(expected, match="a broken kernel")
            with broken, torch.no_grad(), joint_work(world):
                model(samples)
            hook.remove()
            free_gathered(model)
            assert all(isinstance(each, DTensor) for each in model.parameters())
        with torch.no_grad(), joint_work(world):
            found = [model(samples)]
        free_gathered(model)
        _accumulate(model, samples)
        gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
        outcomes.append(found + gradients)
    assert all(map(torch.equal, *outcomes))


def _check_as_one_of_two() -> None:
    with join("cpu", ParallelSection(strategy="shard")) as world:
        _check(world, parts=2)
        _check_mixed(world)
        _check(arranged(world, ParallelSection()), parts=1)
        _check_that_only_the_last_micro_step_reduces(world)
        for here in (world, arranged(world, ParallelSection())):
            _check_that_gradients_add_up_in_fp32(here)
        _check_that_replicas_copy_no_weight(world)
        _check_that_replicas_begin_and_stay_equal(world)
        _check_that_weights_travel_in_bf16(world)
        _check_that_an_error_of_one_ends_a_pass_on_all(world)


if __name__ == "__main__":
    _check_as_one_of_two()
