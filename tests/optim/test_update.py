"""Averages follow their formulas, in fp32, under the model's own names."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from longtake.config import EmaProfile
from longtake.optim.master_weights import MasterAdamW
from longtake.optim.update import Averages, gamma_of, masters_of


def _set(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _decay(decay: float, name: str = "main") -> EmaProfile:
    return EmaProfile(name=name, decay=decay)


def _width(width: float, name: str = "main") -> EmaProfile:
    return EmaProfile(name=name, sigma_rel=width)


def _averaged(values: Sequence[float], *profiles: EmaProfile) -> list[float]:
    """What averages make of weights that begin at the first value and are updated to the others."""
    model = nn.Linear(1, 1, bias=False)
    _set(model, values[0])
    averages = Averages(model, profiles)
    for number, value in enumerate(values[1:], start=1):
        _set(model, value)
        averages.update(number)
    return [state["weight"].item() for state in averages.states().values()]


def test_with_a_decay_it_equals_the_sum_that_the_formula_expands_to() -> None:
    """After n updates it is the weighted sum of all weights seen, the first ones included."""
    decay, seen = 0.5, [7.0, *(math.sin(number) for number in range(1, 31))]
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(1, len(seen))]
    shares = [1.0, *(1 - d for d in decays)]
    expected = sum(
        value * share * math.prod(decays[index:])
        for index, (value, share) in enumerate(zip(seen, shares, strict=True))
    )
    assert _averaged(seen, _decay(decay)) == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("decay", ["0.99", "0.999"])
def test_half_of_a_step_is_forgotten_after_the_half_life(decay: str, anchors: Any) -> None:
    """Long after the ramp, a jump of the weights is half taken in after ln 0.5 / ln d updates."""
    half_life = anchors["ema_halflife_steps"][decay]
    model = nn.Linear(1, 1, bias=False)
    _set(model, 0.0)
    averages = Averages(model, [_decay(float(decay))])
    average = averages.states()["main"]["weight"]
    _set(model, 1.0)
    begun = 100_000
    for number in range(begun, begun + math.floor(half_life)):
        averages.update(number)
    before = average.item()
    averages.update(begun + math.ceil(half_life))
    assert before < 0.5 < average.item()


@pytest.mark.parametrize(("width", "gamma"), [(0.05, 16.972198), (0.1, 6.937204)])
def test_a_width_is_the_exponent_of_a_power(width: float, gamma: float) -> None:
    assert gamma_of(width) == pytest.approx(gamma, abs=1e-6)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_with_a_width_it_is_the_sum_of_the_weights_by_powers_of_their_time(width: float) -> None:
    """The weights after update i count as the part of t^gamma from i - 1 to i; the first not."""
    power, num_updates = gamma_of(width) + 1, 200
    seen = [1e6, *(math.sin(number / 5) for number in range(1, num_updates + 1))]
    shares = [(i**power - (i - 1) ** power) / num_updates**power for i in range(1, num_updates + 1)]
    expected = sum(share * value for share, value in zip(shares, seen[1:], strict=True))
    assert sum(shares) == pytest.approx(1)
    assert _averaged(seen, _width(width)) == [pytest.approx(expected, abs=1e-5)]


def test_profiles_stand_side_by_side() -> None:
    """Each is what it would be alone, to the bit."""
    seen = [math.cos(number) for number in range(50)]
    profiles = [_decay(0.5, "short"), _width(0.1, "tenth"), _decay(0.99, "long")]
    together = _averaged(seen, *profiles)
    assert together == [_averaged(seen, profile)[0] for profile in profiles]
    assert len(set(together)) == 3


def test_states_have_the_models_names_without_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    averages = Averages(model, [_decay(0.9, "a"), _width(0.1, "b")])
    _set(model, 3.0)
    averages.update(2)
    weights = model.state_dict()
    assert list(averages.states()) == ["a", "b"]
    for state in averages.states().values():
        assert list(state) == [name for name in weights if name != "0.bias"]
        assert not torch.equal(state["0.weight"], weights["0.weight"])
        assert torch.equal(state["1.running_var"], weights["1.running_var"])
        assert model.load_state_dict(state, strict=False).missing_keys == ["0.bias"]


def test_a_run_goes_on_from_loaded_states_to_the_bit() -> None:
    model, profiles = nn.Linear(2, 2), [_decay(0.9, "a"), _width(0.1, "b")]
    straight = Averages(model, profiles)
    for number in range(1, 4):
        _set(model, number)
        straight.update(number)
    saved = {
        profile: {name: value.clone() for name, value in state.items()}
        for profile, state in straight.states().items()
    }
    resumed = Averages(model, profiles)
    resumed.load(saved)
    for state in saved.values():
        state["weight"].zero_()
    _set(model, 4.0)
    for averages in (straight, resumed):
        averages.update(4)
    for profile, state in straight.states().items():
        assert torch.equal(state["weight"], resumed.states()[profile]["weight"])
        assert state["weight"].all()


def test_averages_are_fp32_and_apart_from_the_weights() -> None:
    """bf16 could not hold a thousandth of a step; an average never changes a weight."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    averages = Averages(model, [_decay(0.9)]).states()["main"]
    before = [parameter.clone() for parameter in model.parameters()]
    for average in averages.values():
        assert average.dtype == torch.float32
        average.zero_()
    assert all(map(torch.equal, model.parameters(), before))


def test_an_average_that_cannot_be_put_into_the_model_leaves_it_as_it_was() -> None:
    model = nn.Linear(3, 2)
    before = [each.detach().clone() for each in model.parameters()]
    averages = Averages(model, [EmaProfile(name="main", decay=0.5)])
    state = averages.states()["main"]
    state["weight"].zero_()
    averages._averages["main"]["bias"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match="7"), averages.in_place_of_weights("main"):
        pass
    assert all(map(torch.equal, model.parameters(), before))


def test_bf16_weights_are_averaged_in_fp32_like_any() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    _set(model, 0.0)
    averages = Averages(model, [_decay(0.9)])
    for number in range(1, 5):
        _set(model, 0.5 * number)
        averages.update(number)
    state = averages.states()["main"]
    exact, rounded = state["0.weight"], state["1.weight"]
    assert torch.equal(rounded, exact)
    assert not torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.parametrize("sees_masters", [True, False])
def test_masters_are_averaged_instead_of_what_they_are_rounded_to(sees_masters: bool) -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    _set(model, 1.0)
    optimizer = MasterAdamW(model.parameters(), lr=1e-4)
    averages = Averages(model, [_decay(0.0)])  # of the last weights alone
    for number in range(1, 4):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        averages.update(number, masters_of([optimizer]) if sees_masters else None)
    average, master = averages.states()["main"]["weight"], optimizer.state[model.weight]["master"]
    assert model.weight.item() == 1
    assert master.item() < 1
    assert average.item() == (master.item() if sees_masters else 1)
