"""Samplers of recipes that nothing was trained by, and the latents that they make."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longtake.config import Recipe
from longtake.models.components import Components, assemble
from longtake.sampling.presets import Request, settings_for
from longtake.sampling.sampler import Sampler


class _KeepsLatents:
    """A codec that keeps what it is to decode, of the sound too."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.latents: list[Tensor] = []
        audio = getattr(codec, "audio", None)
        self.audio = None if audio is None else _KeepsLatents(audio)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def decode(self, latents: Tensor, **how: Any) -> Any:
        self.latents.append(latents.clone())
        return self.codec.decode(latents, **how)


def make_sampler(
    recipe: Recipe, captions: Sequence[str] = (), parts: Components | None = None
) -> Sampler:
    """Make a sampler, on the CPU in fp32, of a recipe's parts as they are at the start."""
    parts = parts or assemble(recipe, captions, None)
    parts.model.eval()
    return Sampler(parts, recipe, 0, torch.device("cpu"), "fp32")


def sample_latents(sampler: Sampler, request: Request, **settings: Any) -> Tensor:
    """Sample as usual; return what is decoded, [1, C, F, h, w]; with sound [1, numel] of both."""
    codec: Any = _KeepsLatents(sampler.components.codec)
    parts = dataclasses.replace(sampler.components, codec=codec)
    chosen, bucket = settings_for(sampler.recipe, **settings)
    dataclasses.replace(sampler, components=parts).sample([request], chosen, bucket)
    (latents,) = codec.latents
    if codec.audio is None:
        return latents
    return torch.cat([latents.flatten(1), codec.audio.latents[0].flatten(1)], dim=1)
