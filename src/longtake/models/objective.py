"""The training objective: a model's inputs, its loss, and the cost of a forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longtake.config import Recipe
from longtake.flow.path import interpolate, velocity, velocity_loss
from longtake.models.base import Conditioning, LatentShape
from longtake.models.build import Components
from longtake.models.numerics import Precision, autocast, count_flops


@dataclass(frozen=True)
class FlowBatch:
    """Samples of one forward pass, and what their velocities are computed from."""

    latents: Tensor  # [B, C, F, H, W]
    noise: Tensor  # [B, C, F, H, W]
    sigmas: Tensor  # [B]
    conditioning: Conditioning


def flow_losses(
    parts: Components, batch: FlowBatch, precision: Precision, device: torch.device
) -> Tensor:
    """[B] fp32: the flow-matching loss of each sample.

    A model whose weights are bf16 computes in it without autocast.
    """
    noisy = interpolate(batch.latents, batch.noise, batch.sigmas)
    with autocast(precision if parts.dtype == torch.float32 else "fp32", device):
        predicted = parts.predict_velocity(noisy, batch.sigmas, batch.conditioning)
    return velocity_loss(predicted, velocity(batch.latents, batch.noise))


def training_conditioning(
    parts: Components, recipe: Recipe, conditioning: Conditioning
) -> Conditioning:
    if not parts.family.distils_guidance(parts.model):
        return conditioning
    return conditioning | guidance_of(conditioning, recipe.model.guidance)


def guidance_of(conditioning: Conditioning, scale: float) -> Conditioning:
    like = next(iter(conditioning.values()))
    return {"guidance": torch.full((len(like),), scale, device=like.device)}


def outline_conditioning(
    parts: Components, recipe: Recipe, shape: LatentShape, batch_size: int = 1
) -> Conditioning:
    """A model's conditioning in training, on the meta device, for samples of a shape.

    Reference images have a clip's rows and columns.
    """
    one = parts.text.outline()
    for name in recipe.data.references:
        one[f"{name}_latents"] = torch.empty(1, *shape._replace(num_frames=1), device="meta")
    batch = {key: value.new_empty(batch_size, *value.shape[1:]) for key, value in one.items()}
    return training_conditioning(parts, recipe, batch)


def forward_flops(parts: Components, recipe: Recipe, shape: LatentShape) -> int:
    """Floating-point operations of one forward pass over one sample."""
    inputs = {
        "noisy_latents": torch.empty(1, *shape, device="meta"),
        "sigmas": torch.empty(1, device="meta"),
        **outline_conditioning(parts, recipe, shape),
    }
    return count_flops(_WithConditioning(parts), inputs)


class _WithConditioning(nn.Module):
    """A family's model as a module, so that its FLOPs can be counted through `forward`."""

    def __init__(self, parts: Components) -> None:
        super().__init__()
        self.model = parts.model
        self.parts = parts

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, **conditioning: Tensor) -> Tensor:
        return self.parts.predict_velocity(noisy_latents, sigmas, conditioning)
