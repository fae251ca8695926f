"""Builds all that a recipe names: family, transformer, codec and text encoder."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from longtake.config import Bucket, Recipe, Shift
from longtake.flow.timesteps import resolution_shift
from longtake.models.codec import Codec, build_codec
from longtake.models.family import Conditioning, Family, LatentShape
from longtake.models.flops import count_flops
from longtake.models.registry import family
from longtake.models.text import TextEncoder, build_text


@dataclass(frozen=True)
class Components:
    """The parts of a text-to-video model; only `model` is trained."""

    family: Family
    model: nn.Module
    codec: Codec
    text: TextEncoder

    def predict_velocity(
        self, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's velocity, [B, C, F, H, W]."""
        return self.family.predict_velocity(self.model, noisy_latents, sigmas, conditioning)

    def shift(self, shift: Shift, bucket: Bucket) -> float:
        """The recipe's shift of sigmas for clips of one shape."""
        shape = latent_shape(self.codec, bucket)
        return resolution_shift(
            shift,
            num_tokens=self.family.num_tokens(self.model, shape),
            height=bucket.height,
            width=bucket.width,
            num_latent_frames=shape.num_frames,
        )

    def to(self, device: torch.device) -> None:
        """Move every part to a device."""
        self.model.to(device)
        self.codec.to(device)
        self.text.to(device)


def assemble(recipe: Recipe, captions: Iterable[str], made: Path | None) -> Components:
    """Build every part on the CPU; random weights follow from the recipe's seed alone.

    Args:
        recipe: the recipe; all that does not fit together in it is found here.
        captions: of the catalog, for a vocabulary (not read where the run has one).
        made: the folder of frozen parts that the run made when it began; None when it begins.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: weights cannot be loaded.
    """
    chosen = family(recipe.model.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        codec = build_codec(recipe.codec, made)
        shapes = [latent_shape(codec, bucket) for bucket in recipe.data.buckets]
        chosen.check(recipe.model, shapes)
        text = build_text(recipe.text, captions, made)
        torch.manual_seed(recipe.seed)  # the model's weights do not depend on the other parts'
        model = chosen.build(recipe.model, shapes, text)
    return Components(chosen, model, codec, text)


def latent_shape(codec: Codec, bucket: Bucket) -> LatentShape:
    """Shape of one clip's latents in a bucket.

    Raises:
        RecipeError: the codec cannot divide the bucket.
    """
    return LatentShape(codec.channels, *codec.latent_shape(bucket))


def forward_flops(components: Components, shape: LatentShape) -> int:
    """Floating-point operations of one forward pass over one sample."""
    inputs = {
        "noisy_latents": torch.empty(1, *shape, device="meta"),
        "sigmas": torch.empty(1, device="meta"),
        **components.text.outline(),
    }
    return count_flops(_Asked(components.family, components.model), inputs)


class _Asked(nn.Module):
    """A model as its family asks it, so that its FLOPs can be counted through `forward`."""

    def __init__(self, asking: Family, model: nn.Module) -> None:
        super().__init__()
        self.asking = asking
        self.model = model

    def forward(self, noisy_latents: Tensor, sigmas: Tensor, **conditioning: Tensor) -> Tensor:
        """The model's velocity."""
        return self.asking.predict_velocity(self.model, noisy_latents, sigmas, conditioning)
