"""The average follows its formula, in fp32, under the model's own names."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from longtake.training.ema import Ema


def _set(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_it_equals_the_sum_that_the_formula_expands_to() -> None:
    """After n updates it is the weighted sum of all weights seen, the first one included."""
    model, decay, updates = nn.Linear(3, 2), 0.5, 30
    _set(model, 7.0)
    ema = Ema(model, decay)
    seen = [7.0]
    for number in range(1, updates + 1):
        seen.append(math.sin(number))
        _set(model, seen[-1])
        ema.update(number)
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(1, updates + 1)]
    shares = [1.0, *(1 - d for d in decays)]
    expected = sum(
        value * share * math.prod(decays[index:])
        for index, (value, share) in enumerate(zip(seen, shares, strict=True))
    )
    torch.testing.assert_close(ema.averages["weight"], torch.full((2, 3), expected))


@pytest.mark.parametrize("decay", ["0.99", "0.999"])
def test_half_of_a_step_is_forgotten_after_the_half_life(decay: str, material: Path) -> None:
    """Long after the ramp, a jump of the weights is half taken in after ln 0.5 / ln d updates."""
    half_life = json.loads((material / "ANCHORS.json").read_text())["ema_halflife_steps"][decay]
    model = nn.Linear(1, 1, bias=False)
    _set(model, 0.0)
    ema = Ema(model, float(decay))
    _set(model, 1.0)
    begun = 100_000
    for number in range(begun, begun + math.floor(half_life)):
        ema.update(number)
    before = ema.averages["weight"].item()
    ema.update(begun + math.ceil(half_life))
    assert before < 0.5 < ema.averages["weight"].item()


def test_a_short_run_forgets_its_random_start() -> None:
    """After 20 updates at 0.9999 less than a thousandth of the first weights is left."""
    model = nn.Linear(1, 1, bias=False)
    _set(model, 1.0)
    ema = Ema(model, 0.9999)
    _set(model, 0.0)
    for number in range(1, 21):
        ema.update(number)
    assert 0 < ema.averages["weight"].item() < 1e-3


def test_its_state_has_the_models_names_without_what_is_frozen() -> None:
    """It loads into the model: averages for what trains, and buffers as they are."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    ema = Ema(model, 0.9)
    _set(model, 3.0)
    ema.update(1)
    state, weights = ema.state(), model.state_dict()
    assert list(state) == [name for name in weights if name != "0.bias"]
    assert not torch.equal(state["0.weight"], weights["0.weight"])
    assert torch.equal(state["1.running_var"], weights["1.running_var"])
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["0.bias"]


def test_averages_are_fp32_and_apart_from_the_weights() -> None:
    """bf16 could not hold a thousandth of a step; an average never changes a weight."""
    model = nn.Linear(2, 2).to(torch.bfloat16)
    ema = Ema(model, 0.9)
    before = model.weight.clone()
    ema.averages["weight"].zero_()
    assert ema.averages["weight"].dtype == torch.float32
    assert torch.equal(model.weight, before)


def test_bf16_weights_are_averaged_in_fp32_like_any() -> None:
    """To the bit as fp32 weights of the same values are, beside which they may stand."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    _set(model, 0.0)
    ema = Ema(model, 0.9)
    for number in range(1, 5):
        _set(model, 0.5 * number)
        ema.update(number)
    exact, rounded = ema.averages["0.weight"], ema.averages["1.weight"]
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, exact)
    assert not torch.equal(rounded, rounded.bfloat16().float())
