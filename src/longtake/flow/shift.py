"""Shifts of sigmas toward noise: by a factor, or by a release's rule. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

ShiftName = Literal["flux", "opensora"]

FLUX2_MAX_TOKENS = 4096
"""Number of tokens of 1024 x 1024 pixels: `max_image_seq_len` in FLUX.2's scheduler_config.json."""


class ClipSize(NamedTuple):
    """Sizes of a clip (tokens, pixels, frames) on which the shift of sigmas can depend."""

    num_tokens: int
    """Number of tokens of the noisy latents in the transformer: latent pixels after patching."""
    height: int
    """Height of the clip in pixels."""
    width: int
    num_latent_frames: int


@dataclass(frozen=True)
class MuLine:
    """A line for mu, the logarithm of the shift, over tokens; it extends beyond its two points.

    Diffusers' dynamic shifting; the values are FLUX.1's.
    """

    base_tokens: int = 256
    base_mu: float = 0.5
    max_tokens: int = 4096
    max_mu: float = 1.15

    def mu(self, num_tokens: int) -> float:
        slope = (self.max_mu - self.base_mu) / (self.max_tokens - self.base_tokens)
        return self.base_mu + slope * (num_tokens - self.base_tokens)


@dataclass(frozen=True)
class ShiftRule:
    """A rule that shifts sigmas toward noise, and the sigma at which sampling ends."""

    by: float | MuLine | Literal["flux2", "opensora"]
    """Way of shifting: by a factor; by exp(mu), from a line or `flux2_mu`; or as Open-Sora, by
    pixels and frames."""
    terminal: float = 0.0
    """Last sigma above 0 in sampling, to which `build_sigmas` stretches; 0: no stretching."""
    logit_std: float | None = None
    """Standard deviation of the logit-normal distribution whose quantiles are the sigmas before the
    shift; None: they are evenly spaced."""

    def factor(self, size: ClipSize, num_steps: int) -> float:
        """Return the factor of the shift for clips of one size; `flux2` depends on the steps."""
        if isinstance(self.by, MuLine):
            return math.exp(self.by.mu(size.num_tokens))
        if self.by == "flux2":
            return math.exp(flux2_mu(size.num_tokens, num_steps))
        if self.by == "opensora":
            return opensora_shift(size.height, size.width, size.num_latent_frames)
        return float(self.by)

    def within_range(self, size: ClipSize) -> ClipSize:
        """Limit a clip's size to the tokens that the rule was made for.

        Training takes the factor of this size. Beyond it the rule only says how to sample: trained
        by it, a model would see hardly anything but noise.
        """
        if isinstance(self.by, MuLine):
            most = max(self.by.base_tokens, self.by.max_tokens)
        elif self.by == "flux2":
            most = FLUX2_MAX_TOKENS
        else:
            return size
        return size._replace(num_tokens=min(size.num_tokens, most))

    def __str__(self) -> str:
        said = f"{self.by:g}" if isinstance(self.by, int | float) else str(self.by)
        if isinstance(self.by, MuLine):
            line = self.by
            first = f"{line.base_mu:g} at {line.base_tokens}"
            said = f"exp(mu), mu {first} and {line.max_mu:g} at {line.max_tokens} tokens"
        if self.logit_std is not None:
            said += f", of logit-normal sigmas with standard deviation {self.logit_std:g}"
        return said + (f"; the last sigma is {self.terminal:g}" if self.terminal else "")


def named_rule(shift: float | ShiftName) -> ShiftRule:
    """Return the shift rule that a recipe's number or name stands for."""
    return ShiftRule(MuLine() if shift == "flux" else shift)


def flux2_mu(num_tokens: int, num_steps: int) -> float:
    """Return FLUX.2's empirical mu, linear in tokens and, between 10 and 200 steps, in steps.

    Above 4300 tokens the line of 200 steps holds for any number of steps, so mu falls there.
    Source: `compute_empirical_mu` of diffusers' Flux2Pipeline.
    """
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200
    return at_200 + (at_200 - at_10) * (num_steps - 200) / 190


def opensora_shift(height: int, width: int, num_latent_frames: int) -> float:
    """Return Open-Sora's shift factor, by pixels over 512 x 512 and by latent frames.

    Source: `timestep_transform` in Open-Sora 1.2's rectified flow.
    """
    return math.sqrt(height * width / 512**2) * math.sqrt(num_latent_frames)
