"""The straight path from latents to noise, its velocity, and the training loss.

sigma = 0 is the latents, 1 pure noise. The velocity is the derivative with respect to sigma, with
the sign of diffusers; Open-Sora and flow_matching use the opposite one.
"""

import torch
from torch import Tensor

# Tensors are [B, ...] with one sigma per sample, [B]. A result has the widest dtype of the
# arguments: half-precision latents with fp32 sigmas give fp32.

SIGMA_FLOOR = 0.05
"""Least divisor in converting predicted latents to a velocity (JiT, arXiv:2511.13720)."""


def interpolate(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Interpolate (1 - sigma) * latents + sigma * noise for each sample: [B, ...].

    Source: rectified flow, arXiv:2209.03003, with time running from latents to noise.
    """
    sigmas = _per_sample(sigmas, latents)
    return (1 - sigmas) * latents + sigmas * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """Return the velocity of the straight path, [B, ...], which is the same at every sigma."""
    return noise - latents


def velocity_from_latents(
    noisy_latents: Tensor, predicted_latents: Tensor, sigmas: Tensor, floor: float = SIGMA_FLOOR
) -> Tensor:
    """Convert predicted latents to the velocity (noisy - predicted) / sigma, [B, ...].

    The divisor is at least `floor`: near sigma = 0 the quotient would magnify the prediction's
    error without bound.
    """
    sigmas = _per_sample(sigmas, noisy_latents)
    return (noisy_latents - predicted_latents) / sigmas.clamp(min=floor)


def velocity_loss(predicted: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean squared error, [B] fp32, of each sample's predicted velocity.

    Half precision is raised to fp32 before the difference. With `weights` [B, 1, F, H, W], fp32, of
    at least 0 it is a weighted mean: weights of 1 change no bit, and where all of a sample's are 0,
    so is its loss.
    """
    # Unequal shapes would broadcast into a plausible number.
    assert predicted.shape == target.shape, f"{list(predicted.shape)} and {list(target.shape)}"
    errors = (predicted.float() - target.float()).square()
    if weights is None:
        return errors.flatten(1).mean(dim=1)
    assert weights.shape == (len(errors), 1, *errors.shape[2:]), f"weights {list(weights.shape)}"
    mean_weights = weights.flatten(1).double().mean(dim=1).float()  # ones are summed exactly
    smallest = torch.finfo(torch.float32).tiny
    return (errors * weights).flatten(1).mean(dim=1) / mean_weights.clamp(min=smallest)


def _per_sample(sigmas: Tensor, like: Tensor) -> Tensor:
    assert sigmas.shape == like.shape[:1], f"{list(sigmas.shape)} sigmas for {list(like.shape)}"
    return sigmas.reshape(-1, *[1] * (like.ndim - 1))
