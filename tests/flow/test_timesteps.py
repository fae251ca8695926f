"""Distributions of sigmas, shifts and sampling schedules, against published and exact numbers."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import (
    _logit_normal_sigmas,
    _resolution_aware_mu,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from longtake.errors import RecipeError
from longtake.flow.shift import opensora_shift
from longtake.flow.timesteps import (
    MODE_SCALE_MAX,
    MODE_SCALE_MIN,
    SigmaKind,
    build_sigmas,
    cosmap,
    logit_normal,
    mode,
    range_share,
    sample_sigmas,
    shift_sigmas,
    stretched_logit_normal,
)

KINDS: tuple[SigmaKind, ...] = get_args(SigmaKind)


def _exact(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _key(text: str) -> list[float]:
    """The numbers of a key such as `m0.5,s1,t0.25`."""
    return [float(part[1:]) for part in text.split(",")]


def _grid(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float64)


# --- distributions ------------------------------------------------------------------------------


def test_logit_normal_inverts_its_cumulative_distribution(anchors: Any) -> None:
    for sigma, uniform in anchors["ln_cdf_0_1"].items():
        assert logit_normal(_exact(uniform)).item() == pytest.approx(float(sigma), abs=1e-12)


def test_logit_normal_moments(anchors: Any) -> None:
    sigmas = logit_normal((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    mean, variance = anchors["ln_mean_var_0_1"]
    assert sigmas.mean().item() == pytest.approx(mean, abs=1e-9)
    assert sigmas.var(correction=0).item() == pytest.approx(variance, abs=1e-7)


def test_mode_is_the_published_function_read_backwards(anchors: Any) -> None:
    """SD3's f falls from 1 to 0; ours rises, and f(u) = mode(1 - u)."""
    for uniform, expected in anchors["mode_f_s1.29"].items():
        sigma = mode(1 - _exact(float(uniform)), 1.29).item()
        assert sigma == pytest.approx(expected, abs=1e-12)


def test_the_largest_scale_of_mode(anchors: Any) -> None:
    assert pytest.approx(anchors["mode_s_max"], rel=1e-14) == MODE_SCALE_MAX


@given(
    uniform=st.floats(0.001, 0.999),
    mean=st.floats(-2, 2),
    std=st.floats(0.3, 2),
    scale=st.floats(MODE_SCALE_MIN, MODE_SCALE_MAX),
)
def test_quantile_functions_are_the_published_formulas(
    uniform: float, mean: float, std: float, scale: float
) -> None:
    """The published CosMap has a pole at 1 that ours has not."""
    u, angle = _exact(uniform), _exact(math.pi * uniform / 2)
    assert_close(logit_normal(u, mean, std), torch.sigmoid(mean + std * torch.special.ndtri(u)))
    assert_close(mode(1 - u, scale), 1 - u - scale * (torch.cos(angle).square() - 1 + u))
    assert_close(cosmap(u), 1 - 1 / (torch.tan(angle) + 1))
    assert cosmap(torch.ones(1)).item() == pytest.approx(1.0)


# --- from uniform numbers to sigmas -------------------------------------------------------------


@given(
    kind=st.sampled_from(KINDS),
    mean=st.floats(-3, 3),
    std=st.floats(0.1, 3),
    scale=st.floats(MODE_SCALE_MIN, MODE_SCALE_MAX),
    shift=st.floats(0.1, 12),
)
def test_sigmas_rise_with_the_uniform_number_and_stay_in_range(
    kind: SigmaKind, mean: float, std: float, scale: float, shift: float
) -> None:
    """Every kind is a quantile function: monotone from [0, 1] into [0, 1], both ends included."""
    sigmas = sample_sigmas(_grid(0, 1, 201), kind, mean=mean, std=std, scale=scale, shift=shift)
    assert sigmas.diff().min() >= -1e-12
    assert sigmas[0] >= 0
    assert sigmas[-1] <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_draws_stay_in_range_and_keep_their_type(kind: SigmaKind) -> None:
    ordinary = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    extremes = torch.tensor([0.0, 2**-24, 1 - 2**-24])
    sigmas = sample_sigmas(torch.cat([ordinary, extremes]), kind, shift=3.0)
    assert sigmas.dtype == torch.float32
    assert sigmas.isfinite().all()
    assert sigmas.min() >= 0
    assert sigmas.max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_s_sigma_does_not_depend_on_its_batch(kind: SigmaKind) -> None:
    """Two ranks that share a batch's numbers draw the sigmas that one rank would, bit for bit."""
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(1))
    halves = [sample_sigmas(half, kind, shift=3.0) for half in (uniform[0::2], uniform[1::2])]
    whole = sample_sigmas(uniform, kind, shift=3.0)
    assert torch.equal(torch.stack(halves, dim=1).flatten(), whole)


def test_each_kind_reads_its_own_settings() -> None:
    u = _grid(0.1, 0.9, 9)
    assert torch.equal(sample_sigmas(u, "uniform"), u)
    assert torch.equal(
        sample_sigmas(u, "logit_normal", mean=0.5, std=0.7, shift=3),
        shift_sigmas(logit_normal(u, 0.5, 0.7), 3),
    )
    assert torch.equal(sample_sigmas(u, "mode", scale=0.8), mode(u, 0.8))
    assert torch.equal(sample_sigmas(u, "cosmap", shift=2), shift_sigmas(cosmap(u), 2))


def test_wrong_settings_name_the_way_out() -> None:
    u = torch.rand(2)
    with pytest.raises(
        RecipeError, match=r"'normal' is no distribution.*uniform, logit_normal, mode, cosmap"
    ):
        sample_sigmas(u, "normal")  # type: ignore[arg-type]  # what a recipe could hold
    with pytest.raises(RecipeError, match=r"deviation of 0\.0 is not above 0"):
        sample_sigmas(u, "logit_normal", std=0.0)
    with pytest.raises(RecipeError, match=r"scale of 1\.8 folds.*from -1\.0 to 1\.751938"):
        sample_sigmas(u, "mode", scale=1.8)
    with pytest.raises(RecipeError, match="shift of nan"):
        sample_sigmas(u, "uniform", shift=math.nan)
    with pytest.raises(RecipeError, match="in 0 steps"):
        build_sigmas(0)


# --- shifts -------------------------------------------------------------------------------------


def test_shift(anchors: Any) -> None:
    for key, expected in anchors["shift"].items():
        shift, sigma = _key(key)
        assert shift_sigmas(_exact(sigma), shift).item() == pytest.approx(expected, rel=1e-14)
        assert expected >= sigma


@given(st.floats(0, 1), st.floats(0.01, 100))
def test_a_shift_keeps_its_ends_and_its_order(sigma: float, shift: float) -> None:
    ends = torch.tensor([0.0, 1.0])
    assert torch.equal(shift_sigmas(ends, shift), ends)
    assert 0 <= shift_sigmas(_exact(sigma), shift).item() <= 1
    assert shift_sigmas(_exact(sigma), 1.0).item() == sigma


@given(st.floats(0, 1), st.floats(0.1, 10), st.floats(0.1, 10))
def test_shifts_multiply(sigma: float, first: float, second: float) -> None:
    """Shifting twice is shifting by the product; this is why a doubled shift is a larger one."""
    twice = shift_sigmas(shift_sigmas(_exact(sigma), first), second)
    assert_close(twice, shift_sigmas(_exact(sigma), first * second))


# --- sampling schedules -------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1.0, 3.0, math.exp(1.15)])
def test_build_sigmas_falls_from_one_to_zero(shift: float) -> None:
    sigmas = build_sigmas(7, shift)
    assert len(sigmas) == 8
    assert (sigmas[0], sigmas[-1]) == (1.0, 0.0)
    assert sigmas == sorted(set(sigmas), reverse=True)


@pytest.mark.parametrize(("num_steps", "shift"), [(1, 1.0), (4, math.exp(1.15)), (28, 3.16)])
def test_build_sigmas_is_what_the_scheduler_does_with_an_even_grid(
    num_steps: int, shift: float
) -> None:
    """Given 1, ..., 1 / n as the pipelines do, diffusers' scheduler shifts once, like ours."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps).tolist())
    assert build_sigmas(num_steps, shift) == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(("num_steps", "side"), [(1, 512), (12, 256), (48, 1024), (1000, 2048)])
def test_sigmas_at_quantiles_are_those_of_ideograms_pipeline(num_steps: int, side: int) -> None:
    """Its mean is the logarithm of a shift; ends stay within its limits of the signal to noise."""
    mean = _resolution_aware_mu(side, side, 0.0)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=_logit_normal_sigmas(num_steps, mean, 1.5).tolist())
    found = build_sigmas(num_steps, opensora_shift(side, side, 1), logit_std=1.5)
    assert found == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


# --- a range of sigmas ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("sigma_range", [(0.0, 0.3), (0.875, 1.0), (0.4, 0.6)])
def test_a_range_restricts_the_distribution_exactly(
    kind: SigmaKind, shift: float, sigma_range: tuple[float, float]
) -> None:
    """Its quantiles are those of the samples of the whole distribution that lie in it."""
    uniform = _grid(0, 1, 2_000_001)[:-1]
    whole = sample_sigmas(uniform, kind, shift=shift)
    low, high = sigma_range
    inside = whole[(whole >= low) & (whole <= high)]
    levels = _grid(0.001, 0.999, 101)
    found = sample_sigmas(levels, kind, shift=shift, sigma_range=sigma_range)
    assert_close(found, torch.quantile(inside[::4], levels), rtol=0, atol=1e-4)
    below, within = range_share(kind, 0.0, 1.0, 1.29, shift, sigma_range)
    assert within == pytest.approx(len(inside) / len(whole), abs=2e-6)
    assert below == pytest.approx(float((whole < low).double().mean()), abs=2e-6)
    ends = sample_sigmas(
        torch.tensor([0.0, 1 - 2**-24]), kind, shift=shift, sigma_range=sigma_range
    )
    assert low <= ends[0] < ends[1] <= high


def test_the_whole_range_changes_no_bit() -> None:
    uniform = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    whole = sample_sigmas(uniform, "logit_normal", shift=3.0)
    assert torch.equal(sample_sigmas(uniform, "logit_normal", shift=3.0, sigma_range=(0, 1)), whole)


def test_a_range_without_sigmas_is_refused() -> None:
    with pytest.raises(RecipeError, match="less than a millionth of the sigmas of logit_normal"):
        sample_sigmas(torch.zeros(1), "logit_normal", std=0.01, sigma_range=(0.9, 1.0))


@pytest.mark.parametrize(
    ("mean", "quantiles"),
    [(1.5458333, (0.051, 0.354, 0.757, 0.935)), (2.05, (0.059, 0.417, 0.812, 0.952))],
)
def test_the_stretched_logit_normal_is_that_of_ltx2s_trainer(
    mean: float, quantiles: tuple[float, ...]
) -> None:
    """Quantiles of 1, 10, 50 and 90 % of its own sampler, at 2,688 and at 4,096 tokens or more."""
    uniform = torch.tensor([0.01, 0.1, 0.5, 0.9])
    found = stretched_logit_normal(uniform, mean, 1.0, 0.1)
    assert_close(found, torch.tensor(quantiles), rtol=0, atol=1.5e-3)


def test_the_stretched_logit_normal_is_what_its_formula_draws() -> None:
    mean, std, share, drawn = 1.2, 0.8, 0.3, 400_000
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(drawn, generator=generator, dtype=torch.float64)
    first, last = logit_normal(torch.tensor([0.005, 0.999], dtype=torch.float64), mean, std)
    folded = ((torch.sigmoid(mean + std * normal) - first) / (last - first)).abs().clamp(max=1)
    chosen, uniform = torch.rand(2, drawn, generator=generator, dtype=torch.float64)
    expected = torch.where(chosen < share, uniform, folded).sort().values
    levels = (torch.arange(drawn, dtype=torch.float64)[::4000] + 0.5) / drawn
    found = sample_sigmas(
        levels, "logit_normal", mean=mean - math.log(2), std=std, shift=2.0, uniform_share=share
    )
    assert_close(found, expected[::4000], rtol=0, atol=5e-3)
    assert found.diff().min() > 0
    ends = sample_sigmas(
        torch.tensor([0.0, 1 - 2**-24]), "logit_normal", sigma_range=(0.2, 0.7), uniform_share=share
    )
    assert_close(ends, torch.tensor([0.2, 0.7]))
