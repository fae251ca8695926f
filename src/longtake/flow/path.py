"""The straight path between a clip and noise, and the two ways to say where it leads.

`sigmas` is the share of noise: 0 is the clip, 1 is pure noise. The velocity is the path's
derivative with respect to sigma, so it points from the clip towards the noise. diffusers uses the
same sign; Open-Sora and flow_matching use the opposite one.

Everything here takes [B, ...] tensors and one sigma per sample, [B]. The result has the wider of
the arguments' types: half-precision latents with fp32 sigmas give fp32.
"""

from torch import Tensor

SIGMA_FLOOR = 0.05
"""Least divisor when a predicted clip is turned into a velocity (JiT, arXiv:2511.13720)."""


def interpolate(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Return the point (1 - sigma) * latents + sigma * noise of each sample's path, [B, ...].

    Source: rectified flow, arXiv:2209.03003, with time running from the clip to the noise.
    """
    share = _per_sample(sigmas, latents)
    return (1 - share) * latents + share * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """Return noise - latents, the derivative of `interpolate` with respect to sigma, [B, ...]."""
    return noise - latents


def velocity_from_latents(
    noisy_latents: Tensor, predicted_latents: Tensor, sigmas: Tensor, floor: float = SIGMA_FLOOR
) -> Tensor:
    """Return the velocity (noisy - predicted) / sigma that a predicted clip implies, [B, ...].

    Where sigma is below `floor` the divisor is `floor`: close to the clip the quotient would
    otherwise magnify the prediction's error without bound.
    """
    share = _per_sample(sigmas, noisy_latents)
    return (noisy_latents - predicted_latents) / share.clamp(min=floor)


def _per_sample(sigmas: Tensor, like: Tensor) -> Tensor:
    """Return [B] sigmas as [B, 1, 1, ...], ready to multiply `like`."""
    assert sigmas.shape == like.shape[:1], f"{list(sigmas.shape)} sigmas for {list(like.shape)}"
    return sigmas.reshape(-1, *[1] * (like.ndim - 1))
