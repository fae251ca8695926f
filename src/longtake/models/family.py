"""What every model family answers, and the words in which it is asked.

A family is the one place that knows how an architecture differs from the others: the layout of its
latents, what its timestep input means, what it is conditioned on, the sign of what it predicts.
Everything outside speaks latents [B, C, F, H, W], sigmas (1 = pure noise) and velocity
(= noise - latents).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from longtake.config import ModelSection
from longtake.models.codec import Codec
from longtake.models.text import TextEncoder

Conditioning = dict[str, Tensor]
"""What a text encoder gives and a family's model takes: named tensors, each [B, ...]."""


class LatentShape(NamedTuple):
    """Shape of one sample's latents."""

    channels: int
    num_frames: int
    height: int
    width: int


class Family(Protocol):
    """One architecture: how to build it and what to ask of it."""

    def check(self, section: ModelSection, shapes: Sequence[LatentShape]) -> None:
        """Refuse shapes that the model cannot take, before anything is built.

        Raises:
            RecipeError: names the shape and the nearest that fits.
        """
        ...

    def build(
        self, section: ModelSection, shapes: Sequence[LatentShape], text: TextEncoder
    ) -> nn.Module:
        """The model in fp32 on the CPU, with random or pretrained weights.

        Raises:
            RecipeError: the model's arguments do not fit.
            ModelError: pretrained weights cannot be loaded.
        """
        ...

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The repeated blocks: the units of sharding, whose matrices Muon trains."""
        ...

    def num_tokens(self, model: nn.Module, shape: LatentShape) -> int:
        """How many tokens the model makes of one sample's latents."""
        ...

    def predict_velocity(
        self, model: nn.Module, noisy_latents: Tensor, sigmas: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The model's velocity, [B, C, F, H, W], for latents of that shape and sigmas [B]."""
        ...

    def export(
        self, model: nn.Module, codec: Codec, text: TextEncoder, shift: float, folder: Path
    ) -> None:
        """Write a diffusers pipeline folder that `from_pretrained` loads.

        Raises:
            RecipeError: diffusers has no pipeline for this family, codec and text encoder.
        """
        ...
