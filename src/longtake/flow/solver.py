"""Solvers of d(noisy_latents) / d(sigma) = velocity, from noise to latents."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from longtake.errors import RecipeError
from longtake.flow.timesteps import build_sigmas

Velocity = Callable[[Tensor, float], Tensor]
"""A function from noisy latents [B, ...] and their common sigma to the velocity [B, ...]."""

SolverName = Literal["euler", "heun", "unipc"]


def euler(velocity: Velocity, noisy_latents: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """Return the latents after one Euler step (order 1, one velocity evaluation)."""
    return noisy_latents + (next_sigma - sigma) * velocity(noisy_latents, sigma)


def heun(velocity: Velocity, noisy_latents: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """Return the latents after one Heun step (order 2, two velocity evaluations).

    A step to sigma 0 is an Euler step, as in EDM (arXiv:2206.00364, algorithm 1) and diffusers:
    models are hardly trained there, and one such step leaves the order at 2.
    """
    step = next_sigma - sigma
    slope = velocity(noisy_latents, sigma)
    guess = noisy_latents + step * slope
    if next_sigma == 0:
        return guess
    return noisy_latents + step * 0.5 * (slope + velocity(guess, next_sigma))


_SOLVERS = {"euler": euler, "heun": heun}


def solve(
    velocity: Velocity,
    noise: Tensor,
    num_steps: int,
    shift: float,
    solver: SolverName = "euler",
    on_step: Callable[[int], None] | None = None,
    *,
    terminal: float = 0.0,
    logit_std: float | None = None,
) -> Tensor:
    """Solve from noise to latents in `num_steps` steps by any solver; see `integrate`.

    Euler and Heun visit `build_sigmas`, UniPC the sigmas of diffusers' scheduler, whatever
    `logit_std` is.
    """
    if solver == "unipc":
        return unipc(velocity, noise, num_steps, shift, on_step, terminal=terminal)
    sigmas = build_sigmas(num_steps, shift, terminal, logit_std)
    return integrate(velocity, noise, sigmas, solver, on_step)


def unipc(
    velocity: Velocity,
    noise: Tensor,
    num_steps: int,
    shift: float,
    on_step: Callable[[int], None] | None = None,
    *,
    terminal: float = 0.0,
) -> Tensor:
    """Solve by diffusers' UniPCMultistepScheduler as Wan's releases configure it.

    It has order 2 and evaluates one velocity a step (arXiv:2302.04867). Its sigmas end at 1 / 1000
    before the shift; velocities are evaluated at multiples of 1 / 1000, rounded down, as in
    pipelines.
    """
    from diffusers import UniPCMultistepScheduler

    scheduler: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=shift,
        shift_terminal=terminal or None,
    )
    scheduler.set_timesteps(num_steps)
    scheduler.set_begin_index(0)  # else it searches each step's number on the device
    per_sigma = scheduler.config.num_train_timesteps
    latents = noise.to(torch.promote_types(noise.dtype, torch.float32))
    for num_done, timestep in enumerate(scheduler.timesteps, start=1):
        predicted = velocity(latents, int(timestep) / per_sigma)
        latents = scheduler.step(predicted, timestep, latents, return_dict=False)[0]
        if on_step is not None:
            on_step(num_done)
    return latents


def num_evaluations(solver: SolverName, num_steps: int) -> int:
    """Count the velocities that `solve` evaluates in this number of steps."""
    return 2 * num_steps - 1 if solver == "heun" else num_steps


def integrate(
    velocity: Velocity,
    noise: Tensor,
    sigmas: Sequence[float],
    solver: SolverName = "euler",
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Integrate the velocity over sigmas; return latents in fp32, or the noise's wider dtype.

    Args:
        velocity: the model, with guidance if any; it gets latents of the returned dtype.
        noise: the latents at the first sigma, [B, ...].
        sigmas: strictly decreasing, such as `longtake.flow.timesteps.build_sigmas`.
        solver: "euler" or "heun".
        on_step: called with the number of steps done after each (for a progress bar).

    Raises:
        RecipeError: the solver is unknown.
    """
    if solver not in _SOLVERS:
        raise RecipeError(f"{solver!r} is no solver. Choose {' or '.join(_SOLVERS)}.")
    assert all(sigma > next_sigma for sigma, next_sigma in pairwise(sigmas)), f"{sigmas} must fall"
    # Half precision would round away most of a small step.
    latents = noise.to(torch.promote_types(noise.dtype, torch.float32))
    for num_done, (sigma, next_sigma) in enumerate(pairwise(sigmas), start=1):
        latents = _SOLVERS[solver](velocity, latents, sigma, next_sigma)
        if on_step is not None:
            on_step(num_done)
    return latents


def guided(velocity_cond: Tensor, velocity_uncond: Tensor, guidance_scale: float) -> Tensor:
    """Combine velocities by classifier-free guidance: uncond + guidance_scale * (cond - uncond).

    A scale of 1 is the conditional velocity, 0 the unconditional one (arXiv:2207.12598, in
    diffusers' convention).
    """
    return velocity_uncond + guidance_scale * (velocity_cond - velocity_uncond)
