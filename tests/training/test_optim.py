"""Which weights go to which optimizer, and how learning rates run."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from longtake.config import OptimizerSection
from longtake.training.master import MasterAdamW
from longtake.training.muon import Muon
from longtake.training.optim import build_optimizers, schedule_factor, set_learning_rates


def _section(**values: Any) -> OptimizerSection:
    return OptimizerSection.model_validate(values)


@given(
    steps=st.integers(1, 10_000),
    warmup_steps=st.integers(0, 10_000),
    final_factor=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    data=st.data(),
)
def test_a_factor_is_a_share(
    steps: int, warmup_steps: int, final_factor: float, schedule: str, data: st.DataObject
) -> None:
    """Whatever the recipe, no step's learning rate leaves [0, 1] of its full value."""
    section = _section(warmup_steps=warmup_steps, final_factor=final_factor, schedule=schedule)
    step = data.draw(st.integers(0, steps - 1))
    assert 0 <= schedule_factor(step, steps, section) <= 1


def test_the_warmup_rises_in_equal_parts_to_the_full_rate() -> None:
    """Step warmup_steps is the first at the full rate; none has a rate of 0."""
    section = _section(warmup_steps=3, schedule="constant")
    factors = [schedule_factor(step, 10, section) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.6), ("cosine", 0.6)])
def test_a_descent_ends_at_the_final_factor(schedule: str, middle: float) -> None:
    """The last update has the final factor, the middle one the mean of it and 1."""
    section = _section(warmup_steps=10, schedule=schedule, final_factor=0.2)
    assert schedule_factor(10, 111, section) == 1.0
    assert schedule_factor(60, 111, section) == pytest.approx(middle)
    assert schedule_factor(110, 111, section) == pytest.approx(0.2)


def test_a_cosine_is_above_the_line_first_and_below_it_later() -> None:
    """Half a cosine: cos(pi / 3) = 1 / 2, so after a third three quarters are left."""
    section = _section(warmup_steps=0, schedule="cosine")
    assert schedule_factor(30, 91, section) == pytest.approx(0.75)
    assert schedule_factor(60, 91, section) == pytest.approx(0.25)


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 4)


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest() -> None:
    """Each weight that trains is in exactly one optimizer; what is frozen is in none."""
    model = _Network()
    section = _section(kind="muon", learning_rate=1e-3, muon_learning_rate=0.05)
    adamw, muon = build_optimizers(model, [model.block], section, "fp32")
    assert isinstance(muon, Muon)
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(model.block[0].weight)]
    rest = {id(p) for p in adamw.param_groups[0]["params"]}
    frozen = {id(p) for p in model.frozen.parameters()}
    assert rest == {id(p) for p in model.parameters()} - frozen - {id(model.block[0].weight)}
    assert (adamw.param_groups[0]["lr"], muon.param_groups[0]["lr"]) == (1e-3, 0.05)


def test_adamw_alone_takes_all_that_trains() -> None:
    """Without Muon there is one optimizer."""
    model = _Network()
    (adamw,) = build_optimizers(model, [model.block], _section(), "fp32")
    assert isinstance(adamw, torch.optim.AdamW)
    assert len(adamw.param_groups[0]["params"]) == 8


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.bfloat16, {}), (torch.float32, {"offload": True}), (torch.bfloat16, {"kind": "muon"})],
)
def test_what_cannot_be_updated_in_place_has_masters(
    dtype: torch.dtype, values: dict[str, Any]
) -> None:
    """bf16 weights, and offloaded ones, are no case for torch's AdamW."""
    model = _Network().to(dtype)
    optimizer = build_optimizers(model, [model.block], _section(**values), "fp32")[0]
    assert isinstance(optimizer, MasterAdamW)
    assert optimizer.param_groups[0]["betas"] == _section().betas


def test_one_bf16_weight_among_fp32_ones_is_enough() -> None:
    """LoRA in fp32 and a module in bf16, say: each is updated in fp32."""
    model = _Network()
    model.last.to(torch.bfloat16)
    (optimizer,) = build_optimizers(model, [model.block], _section(), "fp32")
    assert isinstance(optimizer, MasterAdamW)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with_masters = [p for p in optimizer.state if "master" in optimizer.state[p]]
    assert [id(p) for p in with_masters] == [id(p) for p in model.last.parameters()]


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_only_adamw_is_offloaded(kind: str) -> None:
    """The others' updates are made on the card; said when the recipe is read."""
    with pytest.raises(ValidationError, match=f'not "{kind}", whose states stay on the card'):
        _section(kind=kind, offload=True)


def test_learning_rates_are_scaled_from_their_own_full_value() -> None:
    """Scaling twice does not compound, and each optimizer keeps its own base."""
    model = _Network()
    section = _section(kind="muon", learning_rate=1e-3, muon_learning_rate=0.05)
    optimizers = build_optimizers(model, [model.block], section, "fp32")
    set_learning_rates(optimizers, 0.5)
    set_learning_rates(optimizers, 0.1)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    assert rates == pytest.approx([1e-4, 5e-3])
