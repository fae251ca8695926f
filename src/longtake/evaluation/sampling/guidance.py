"""What a model is told about a batch of videos, with and without the prompts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.flow.solver import Velocity, guided
from longtake.models.base import Conditioning

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""Maps noisy latents [B, C, F, H, W], sigmas [B] and conditioning to a velocity in fp32."""


@dataclass(frozen=True)
class Guidance:
    """All that steers N videos, of which any part can be sampled on its own.

    Attributes:
        predict: the model.
        told: conditioning with the prompts, each [N, ...].
        untold: the same without them; None where one pass is enough.
        scale: of classifier-free guidance.
    """

    predict: Predict
    told: Conditioning
    untold: Conditioning | None
    scale: float

    @property
    def has_two_halves(self) -> bool:
        """Whether each velocity wants the model's answer with the prompt and without it."""
        return self.untold is not None

    def velocity(self, part: slice, *, two_passes: bool) -> Velocity:
        """The guided velocity of some of the videos.

        Both halves in one pass take twice the memory of two passes; what comes out is the same up
        to the rounding of matrix products of another size.
        """
        told = _cut(self.told, part)
        if self.untold is None:
            return lambda latents, sigma: self._ask(latents, sigma, told)
        untold = _cut(self.untold, part)
        if two_passes:
            return lambda latents, sigma: guided(
                self._ask(latents, sigma, told), self._ask(latents, sigma, untold), self.scale
            )
        both = {name: torch.cat([told[name], untold[name]]) for name in told}
        return lambda latents, sigma: self._halves(latents, sigma, both)

    def _halves(self, latents: Tensor, sigma: float, both: Conditioning) -> Tensor:
        with_prompt, without = self._ask(torch.cat([latents] * 2), sigma, both).chunk(2)
        return guided(with_prompt, without, self.scale)

    def _ask(self, latents: Tensor, sigma: float, conditioning: Conditioning) -> Tensor:
        sigmas = torch.full((len(latents),), sigma, device=latents.device)
        return self.predict(latents, sigmas, conditioning)


def _cut(conditioning: Conditioning, part: slice) -> Conditioning:
    return {name: value[part] for name, value in conditioning.items()}
