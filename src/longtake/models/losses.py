"""What the model is asked in training, and how far off its answers are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.flow.path import interpolate, velocity, velocity_loss
from longtake.models.assemble import Components
from longtake.models.family import Conditioning
from longtake.models.precision import Precision, autocast


@dataclass(frozen=True)
class Examples:
    """What one forward pass is asked, and what it should answer."""

    latents: Tensor
    """[B, C, F, H, W]"""
    noise: Tensor
    """[B, C, F, H, W]"""
    sigmas: Tensor
    """[B]"""
    conditioning: Conditioning


def flow_losses(
    parts: Components, examples: Examples, precision: Precision, device: torch.device
) -> Tensor:
    """[B] fp32: the flow-matching loss of each example.

    A model that is kept in bf16 computes in it without autocast.
    """
    noisy = interpolate(examples.latents, examples.noise, examples.sigmas)
    with autocast(precision if parts.dtype == torch.float32 else "fp32", device):
        predicted = parts.predict_velocity(noisy, examples.sigmas, examples.conditioning)
    return velocity_loss(predicted, velocity(examples.latents, examples.noise))
