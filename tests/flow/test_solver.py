"""The solvers, against exact solutions and diffusers' schedulers."""

import math
from typing import Any, cast

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from longtake.errors import RecipeError
from longtake.flow.path import interpolate
from longtake.flow.path import velocity as path_velocity
from longtake.flow.solver import SolverName, guided, integrate, solve
from longtake.flow.timesteps import build_sigmas

MEAN, STD = 1.5, 0.4  # of the data in the Gaussian example


def _gaussian_velocity(noisy_latents: Tensor, sigma: float) -> Tensor:
    """The exact velocity E[noise - x | noisy] of data that is N(MEAN, STD^2)."""
    clean = 1 - sigma
    variance = clean**2 * STD**2 + sigma**2
    slope = (sigma - clean * STD**2) / variance
    return slope * (noisy_latents - clean * MEAN) - MEAN


def _noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _error(solver: SolverName, num_steps: int, shift: float) -> float:
    """The largest distance to the exact flow, which maps noise n to MEAN + STD * n."""
    noise = _noise(256)
    found = integrate(_gaussian_velocity, noise, build_sigmas(num_steps, shift), solver)
    return (found - (MEAN + STD * noise)).abs().max().item()


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_order_of_convergence(solver: SolverName, order: int, shift: float) -> None:
    """Twice the steps halve Euler's error and quarter Heun's, on Gaussian data."""
    observed = math.log2(_error(solver, 100, shift) / _error(solver, 200, shift))
    assert observed == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_unipc_is_closer_than_euler_in_as_many_steps(shift: float) -> None:
    noise, done = _noise(256, 1, 1), list[int]()
    exact = MEAN + STD * noise
    found = solve(_gaussian_velocity, noise, 20, shift, "unipc", done.append)
    assert (found - exact).abs().max().item() < _error("euler", 20, shift) / 2
    assert done == list(range(1, 21))


@pytest.mark.parametrize("solver", ["euler", "heun"])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_straight_path_is_followed_exactly(solver: SolverName, num_steps: int) -> None:
    """Where the velocity is constant, any number of steps, even one, ends at the clip."""
    latents, noise = _noise(2, 2, 4, 3, 5, 5)
    constant = path_velocity(latents, noise)
    found = integrate(lambda _, __: constant, noise, build_sigmas(num_steps, 3.0), solver)
    assert_close(found, latents)


def test_integration_may_start_on_the_way() -> None:
    latents, noise = _noise(2, 2, 4, 3, 5, 5)
    start = interpolate(latents, noise, torch.full((2,), 0.6, dtype=torch.float64))
    constant = path_velocity(latents, noise)
    assert_close(integrate(lambda _, __: constant, start, [0.6, 0.2, 0.0]), latents)


@pytest.mark.parametrize(("solver", "num_velocities"), [("euler", 4), ("heun", 7)])
def test_sigmas_the_model_is_asked_for(solver: SolverName, num_velocities: int) -> None:
    """Euler asks once per step, Heun twice but for the last, and neither ever at sigma 0."""
    asked: list[float] = []

    def velocity(noisy_latents: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        return noisy_latents

    sigmas = build_sigmas(4)
    integrate(velocity, _noise(1), sigmas, solver)
    assert len(asked) == num_velocities
    assert sorted(set(asked), reverse=True) == sigmas[:-1]


def test_half_precision_noise_is_integrated_in_fp32() -> None:
    noise = _noise(8).bfloat16()
    found = integrate(_gaussian_velocity, noise, build_sigmas(50))
    assert found.dtype == torch.float32
    assert_close(found, integrate(_gaussian_velocity, noise.float(), build_sigmas(50)))


def test_an_unknown_solver_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(RecipeError, match=r"'rk4' is no solver\. Choose euler or heun"):
        integrate(_gaussian_velocity, _noise(1), [1.0, 0.0], cast("SolverName", "rk4"))


def test_rising_sigmas_are_a_defect() -> None:
    """Sigmas of a library whose time runs the other way do not pass silently."""
    with pytest.raises(AssertionError, match="must fall"):
        integrate(_gaussian_velocity, _noise(1), [0.0, 0.5, 1.0])


def _learnt(noisy_latents: Tensor, sigma: float) -> Tensor:
    """Something bent in both arguments, in place of a model."""
    return torch.sin(3 * noisy_latents) + sigma * noisy_latents


def _diffusers_end(scheduler: Any, noise: Tensor) -> Tensor:
    latents = noise
    for timestep in scheduler.timesteps:
        predicted = _learnt(latents, timestep.item() / 1000)
        latents = scheduler.step(predicted, timestep, latents).prev_sample
    return latents


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_euler_steps_like_diffusers(shift: float) -> None:
    """The same velocities at the same sigmas end within 1e-6 of diffusers' scheduler: same sign."""
    noise = _noise(2, 4, 3, 5, 5, dtype=torch.float32)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    found = integrate(_learnt, noise, build_sigmas(4, shift))
    assert_close(found, _diffusers_end(scheduler, noise), atol=1e-6, rtol=1e-6)


def test_heun_steps_like_diffusers() -> None:
    """The same agreement for diffusers' Heun scheduler, on that scheduler's own grid."""
    noise = _noise(2, 4, 3, 5, 5, dtype=torch.float32)
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(6)
    sigmas = [*torch.linspace(1, 0.001, 6).tolist(), 0.0]
    found = integrate(_learnt, noise, sigmas, "heun")
    assert_close(found, _diffusers_end(scheduler, noise), atol=5e-6, rtol=5e-6)


def test_noise_is_mixed_like_diffusers() -> None:
    """`interpolate` is the scheduler's `scale_noise`, at the sigma of each of its timesteps."""
    latents, noise = _noise(2, 5, 4, 3, 2, 2, dtype=torch.float32)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    expected = scheduler.scale_noise(latents, scheduler.timesteps, noise)
    assert_close(interpolate(latents, noise, scheduler.sigmas[:5]), expected, atol=0, rtol=0)


@given(st.floats(-2, 10))
def test_guidance_is_a_line_through_both_velocities(guidance_scale: float) -> None:
    """Scale 0 is unconditional, 1 conditional, 2 as far again beyond it."""
    cond, uncond = _noise(2, 6)
    assert_close(guided(cond, uncond, 0.0), uncond)
    assert_close(guided(cond, uncond, 1.0), cond)
    assert_close(guided(cond, uncond, 2.0), 2 * cond - uncond)
    expected = guidance_scale * cond + (1 - guidance_scale) * uncond
    assert_close(guided(cond, uncond, guidance_scale), expected)
