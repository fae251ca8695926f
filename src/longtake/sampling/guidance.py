"""Classifier-free guidance in sampling: its passes, its scale at each sigma, and its refusals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.config import Bucket, SamplingSection
from longtake.errors import RecipeError
from longtake.flow import solver
from longtake.flow.timesteps import build_sigmas
from longtake.models.base import Conditioning
from longtake.models.components import Components

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""A model: a function from noisy latents [B, C, F, H, W], sigmas [B] and conditioning to fp32
velocities."""

_END = 16  # the last sixteenth of the steps has a scale of its own, in the presets of Ideogram 4


class GuidanceEnd(NamedTuple):
    """Another scale of guidance for the last steps, from a sigma down."""

    sigma: float
    scale: float


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of N videos: their conditioning, of which any part can be used."""

    predict: Predict
    conditional: Conditioning  # by the prompts; tensors [N, ...]
    unconditional: Conditioning | None  # by the negative prompt; None: no second pass
    scale: float  # of classifier-free guidance
    guided: Callable[[Tensor, Tensor, float], Tensor] = solver.guided
    second: Predict | None = None  # the model of the second pass, if it is another one
    end: GuidanceEnd | None = None

    def velocity(self, part: slice, *, two_passes: bool) -> solver.Velocity:
        """Return the function that predicts the guided velocity of some of the videos.

        A single pass over both halves takes twice the memory of two passes. Results are equal
        except for the rounding of matrix products of another size.
        """
        conditional = {name: value[part] for name, value in self.conditional.items()}
        if self.unconditional is None:
            return lambda latents, sigma: _at(self.predict, latents, sigma, conditional)
        unconditional = {name: value[part] for name, value in self.unconditional.items()}
        second = self.second or self.predict
        if two_passes or self.second is not None:
            return lambda latents, sigma: self.guided(
                _at(self.predict, latents, sigma, conditional),
                _at(second, latents, sigma, unconditional),
                self.scale_at(sigma),
            )
        both = {name: torch.cat([conditional[name], unconditional[name]]) for name in conditional}

        def in_one_pass(latents: Tensor, sigma: float) -> Tensor:
            first, other = _at(self.predict, torch.cat([latents] * 2), sigma, both).chunk(2)
            return self.guided(first, other, self.scale_at(sigma))

        return in_one_pass

    def scale_at(self, sigma: float) -> float:
        return self.scale if self.end is None or sigma > self.end.sigma else self.end.scale


def _at(predict: Predict, latents: Tensor, sigma: float, conditioning: Conditioning) -> Tensor:
    return predict(latents, torch.full((len(latents),), sigma, device=latents.device), conditioning)


def guidance_scale(components: Components, settings: SamplingSection) -> float:
    scale = settings.guidance_scale
    return components.defaults.guidance_scale if scale is None else scale


def guidance_end(
    components: Components, settings: SamplingSection, bucket: Bucket, num_steps: int
) -> GuidanceEnd | None:
    """Return the release's scale for the last steps; None if it has one for all, or settings do."""
    scale = components.defaults.end_guidance_scale
    if scale is None or settings.guidance_scale is not None:
        return None
    rule = components.shift_rule(settings.shift)
    factor = components.shift(settings.shift, bucket, num_steps)
    sigmas = build_sigmas(num_steps, factor, rule.terminal, rule.logit_std)
    return GuidanceEnd(sigmas[num_steps - -(-num_steps // _END)], scale)


def uses_other(components: Components, settings: SamplingSection) -> bool:
    """Return True if sampling by these settings needs the transformer that is not trained."""
    has_expert, unconditional = components.experts is not None, components.unconditional
    return has_expert or (unconditional is not None and guidance_scale(components, settings) > 1)


def refuse_wrong_settings(components: Components, settings: SamplingSection) -> None:
    """Refuse a negative prompt or scale without effect, and a solver that the sound does not fit.

    Raises:
        RecipeError: the model has distilled guidance, the scale makes no second pass, or there is
            no text in it, or no second expert; or the sound has sigmas of its own and the solver is
            not Euler's.
    """
    if components.defaults.audio_shift != 1 and settings.solver != "euler":
        raise RecipeError(
            f'The solver "{settings.solver}" takes the same sigmas for video and audio, which have '
            'their own here. Set sampling.solver = "euler".'
        )
    scale, second = guidance_scale(components, settings), settings.guidance_scale_2
    if second is not None and components.experts is None:
        raise RecipeError(
            f"guidance_scale_2 {second:g} is the low-noise expert's of a release with two "
            "transformers, and this model has one. Leave guidance_scale_2 out."
        )
    if second is not None and second > 1 >= scale:
        raise RecipeError(
            f"guidance_scale_2 {second:g} would have no effect: guidance_scale {scale:g} makes no "
            "second pass, for neither expert. Set guidance_scale above 1, or leave "
            "guidance_scale_2 out."
        )
    folder = components.unconditional
    is_distilled = components.family.distils_guidance(components.model)
    if not settings.negative_prompt or not (is_distilled or scale <= 1 or folder is not None):
        return
    why = "this model is guidance-distilled and takes no second pass"
    if folder is not None:
        why = f"the second pass is by the release's {folder}, which reads no text"
    elif not is_distilled:
        why = f"guidance_scale {scale:g} makes no second pass; it is above 1 with guidance"
    raise RecipeError(
        f"negative_prompt {settings.negative_prompt!r} would have no effect: {why}. Leave "
        "negative_prompt out."
    )
