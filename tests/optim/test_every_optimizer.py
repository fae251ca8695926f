"""Masters, resumption and missing gradients, which are alike for all optimizers of longtake."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from tests.optim.steps import take_steps
from torch import Tensor, nn

from longtake.optim.master_weights import Fp32Optimizer, MasterAdamW
from longtake.optim.muon import Muon
from longtake.optim.prodigy import Prodigy

_Make = Callable[[Sequence[Tensor]], Fp32Optimizer]
_OPTIMIZERS: dict[str, _Make] = {
    "adamw": partial(MasterAdamW, lr=1e-3, weight_decay=0.1),
    "offloaded adamw": partial(MasterAdamW, lr=1e-3, weight_decay=0.1, offload=True),
    "muon": partial(Muon, weight_decay=0.1),
    "prodigy": Prodigy,
}
each_optimizer = pytest.mark.parametrize("make", _OPTIMIZERS.values(), ids=_OPTIMIZERS)


def _matrices(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((8, 6), (6, 3), (6, 3))]


@each_optimizer
def test_bf16_weights_have_masters_that_move_like_fp32_weights(make: _Make) -> None:
    rounded = _matrices(torch.bfloat16)
    exact = [nn.Parameter(weight.detach().float()) for weight in rounded]
    optimizer = make(rounded)
    take_steps(optimizer, rounded)
    take_steps(make(exact), exact)
    for weight, expected in zip(rounded, exact, strict=True):
        torch.testing.assert_close(
            optimizer.state[weight]["master"], expected.detach(), rtol=0, atol=0
        )
        assert torch.equal(weight, expected.bfloat16())


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_goes_on_to_the_last_bit(make: _Make, dtype: torch.dtype) -> None:
    """As with torch's optimizers; no fp32 number passes through bf16 on its way."""
    whole, parted = _matrices(dtype), _matrices(dtype)
    take_steps(make(whole), whole, range(6))
    first = make(parted)
    take_steps(first, parted, range(3))
    again = copy.deepcopy(parted)
    resumed = make(again)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(resumed.state_dict(), first.state_dict(), rtol=0, atol=0)
    take_steps(resumed, again, range(3, 6))
    assert all(map(torch.equal, again, whole))


@each_optimizer
def test_a_weight_without_gradient_is_left_alone(make: _Make) -> None:
    used, unused = _matrices(torch.bfloat16)[:2]
    before = unused.detach().clone()
    optimizer = make([used, unused])
    take_steps(optimizer, [used])
    assert torch.equal(unused, before)
    assert unused not in optimizer.state
