"""The loss of flow matching on one batch, and the operations of one forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longtake import config
from longtake.flow import path
from longtake.models import numerics
from longtake.models.base import Conditioning, latent_shape
from longtake.models.components import Components
from longtake.models.conditioning import outline_conditioning


@dataclass(frozen=True)
class FlowBatch:
    """The samples of one forward pass: their latents, noise, sigmas and conditioning."""

    latents: Tensor  # [B, C, F, H, W], never padded: all clips of a batch have one shape
    noise: Tensor  # [B, C, F, H, W]
    sigmas: Tensor  # [B]
    conditioning: Conditioning
    # [B, 1, F, H, W] in the latents' resolution: the mask that `flow.loss_mask` names, averaged
    # over the pixels of each latent position, at least `flow.loss_mask_floor`.
    loss_weights: Tensor | None = None


def flow_losses(
    parts: Components, batch: FlowBatch, precision: numerics.Precision, device: torch.device
) -> Tensor:
    """Compute the flow-matching loss [B] fp32 of each sample (`flow.path` has the formulas).

    It is the mean over C, F, H, W of (predicted velocity - (noise - latents))^2, where the model
    predicts from (1 - sigma) latents + sigma noise. With weights it is the mean of weight * square
    divided by the mean weight. Captions of unlike length are padded; their lengths, from which the
    family makes the attention's mask, are in the conditioning.

    A model with bf16 weights computes in bf16 without autocast.
    """
    noisy = path.interpolate(batch.latents, batch.noise, batch.sigmas)
    with numerics.autocast(precision if parts.dtype == torch.float32 else "fp32", device):
        predicted = parts.predict_velocity(noisy, batch.sigmas, batch.conditioning)
    return _velocity_loss(parts, batch, predicted)


def losses_of_zero(parts: Components, batch: FlowBatch) -> Tensor:
    """Compute the loss [B] fp32 of each sample for a predicted velocity of 0 everywhere."""
    return _velocity_loss(parts, batch, torch.zeros_like(batch.noise))


def _velocity_loss(parts: Components, batch: FlowBatch, predicted: Tensor) -> Tensor:
    # 0 at frames that the model is given rather than asked for (image to video); mostly None.
    weights = parts.family.inputs.loss_weights(batch.latents, batch.conditioning)
    if weights is None or batch.loss_weights is None:
        weights = batch.loss_weights if weights is None else weights
    else:
        # A product, because given frames have no loss whatever the recipe's mask says.
        weights = weights * batch.loss_weights
    return path.velocity_loss(predicted, path.velocity(batch.latents, batch.noise), weights)


def forward_flops(
    parts: Components, recipe: config.Recipe, bucket: config.Bucket
) -> numerics.ForwardFlops:
    """Count the floating-point operations of one forward pass over one sample."""
    inputs = {
        "noisy_latents": torch.empty(1, *latent_shape(parts.codec, bucket), device="meta"),
        "sigmas": torch.empty(1, device="meta"),
        **outline_conditioning(parts, recipe, bucket),
    }
    return numerics.count_flops(_WithConditioning(parts), inputs)


class _WithConditioning(nn.Module):
    """A family's model whose `forward` takes all inputs, so that its FLOPs can be counted."""

    def __init__(self, parts: Components) -> None:
        super().__init__()
        self.model = parts.model
        self.parts = parts

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, **conditioning: Tensor) -> Tensor:
        return self.parts.predict_velocity(noisy_latents, sigmas, conditioning)
