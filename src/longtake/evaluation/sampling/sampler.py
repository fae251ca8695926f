"""A trained model that makes videos: noise, guidance, solver, codec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.config import Bucket, Recipe, SamplingSection
from longtake.errors import SamplingError
from longtake.evaluation.sampling.guidance import Guidance
from longtake.evaluation.sampling.memory import Memory
from longtake.evaluation.sampling.read_pictures import Request, read_pictures
from longtake.flow.solver import integrate
from longtake.flow.timesteps import build_sigmas
from longtake.models.base import Conditioning, LatentShape
from longtake.models.build import Components, latent_shape
from longtake.models.numerics import Precision, autocast
from longtake.models.objective import guidance_of
from longtake.models.text import NO_CAPTION


@dataclass(frozen=True)
class Sampler:
    """A trained model, ready to make videos."""

    components: Components
    recipe: Recipe
    step: int
    """Updates that the weights have seen."""
    device: torch.device
    precision: Precision
    """That the run was trained in."""
    weights: str = "model"
    """Which of them: `model`, or `ema/` and the name of a profile."""
    memory: Memory = field(default_factory=Memory)
    """What has been found to fit the memory."""
    prompts: dict[str, Conditioning] = field(default_factory=dict)
    """What the text encoder has made of each prompt, on the CPU."""

    def sample(
        self,
        requests: Sequence[Request],
        settings: SamplingSection,
        bucket: Bucket,
        on_step: Callable[[int], None] | None = None,
        *,
        guidance: str = "auto",
        decoding: str = "auto",
    ) -> NDArray[np.uint8]:
        """Videos, [N, F, H, W, 3], each of its own seed alone, whatever stands beside it.

        Bitwise the same when repeated in the same batches. In others (or in two passes) a few
        values differ by one grey level: matrix products with a row for each video, as those that
        tell the model its sigma, are computed by another kernel where there is only one.

        Args:
            requests: what the videos show.
            settings: of the solver.
            bucket: the videos' size.
            on_step: told the number of steps done after each.
            guidance: `batched`, `two_passes`, or `auto`: what fits the memory.
            decoding: `whole`, `tiles`, or `auto`: what fits the memory.

        Raises:
            RecipeError: the codec or the model cannot divide the bucket.
            ModelError: the model is built for another shape.
            DataError: a request lacks a picture that the model goes by, or it cannot be read.
            PlanError: not even one video fits the memory.
            SamplingError: latents or decoded pixels are NaN or infinite.
        """
        shape = fitting_shape(self.components, self.recipe, bucket)
        noise = torch.stack([_noise(request.seed, shape) for request in requests]).to(self.device)
        steps, count = self.num_steps(settings), len(requests)
        sigmas = build_sigmas(steps, self.shift(settings, bucket))
        guide = self._guidance(requests, bucket, self._guidance_scale(settings))

        def denoise(part: slice, two_passes: bool) -> Tensor:
            def told(step: int) -> None:
                if on_step is not None:
                    on_step((part.start * steps + (part.stop - part.start) * step) // count)

            velocity = guide.velocity(part, two_passes=two_passes)
            return integrate(velocity, noise[part], sigmas, settings.solver, told)

        self.components.bring("model", self.device)
        with torch.inference_mode():
            latents = self.memory.denoise(
                denoise, count, bucket, guidance=guidance, has_two_halves=guide.has_two_halves
            )
            self._refuse_non_finite(latents)
            self.components.bring("codec", self.device)
            videos = [self._decode(each[None], bucket, decoding) for each in latents]
        return np.concatenate(videos)

    def shift(self, settings: SamplingSection, bucket: Bucket) -> float:
        """The shift of the sigmas that a bucket's videos are sampled with."""
        return self.components.shift(settings.shift or self.components.defaults.shift, bucket)

    def num_steps(self, settings: SamplingSection) -> int:
        """Steps of the solver."""
        return settings.num_inference_steps or self.components.defaults.num_inference_steps

    def unknown_words(self, prompt: str) -> list[str]:
        """Words of a prompt that the text encoder has never seen."""
        return self.components.text.unknown_words(prompt)

    def _refuse_non_finite(self, latents: Tensor) -> None:
        """Raise instead of decoding what would become a black video."""
        bad = int((~torch.isfinite(latents.flatten(1)).all(dim=1)).sum())
        if not bad:
            return
        weights = self.components.model.parameters()
        if all(torch.isfinite(each).all() for each in weights):
            why = "The weights are finite: lower the guidance scale, or sample in fp32."
        else:
            why = "The weights hold NaN or inf: sample an earlier checkpoint (--step)."
        raise SamplingError(
            f"{bad} of {len(latents)} videos of step {self.step} ({self.weights}) have NaN or "
            f"infinite latents; none was written. {why}"
        )

    def _of_decoding(self, latents: Tensor, error: SamplingError) -> str:
        """What is wrong with a video whose latents are finite, and what helps."""
        modules = self.components.codec.modules()
        weights = [each for module in modules for each in module.parameters()]
        largest = latents.abs().max().item()
        if not all(torch.isfinite(each).all() for each in weights):
            why = "The codec's weights hold NaN or inf: load them from another copy."
        elif any(each.dtype != torch.float32 for each in weights):
            why = f'The codec decodes in {self.recipe.codec.dtype}: set codec.dtype = "fp32".'
        else:
            why = "Sample another checkpoint (--step), or lower the guidance scale."
        return (
            f"Decoding a video of step {self.step} ({self.weights}) failed: {error} Its latents "
            f"are finite, at most {largest:.3g} (1 is usual). None was written. {why}"
        )

    def _decode(self, latents: Tensor, bucket: Bucket, decoding: str) -> NDArray[np.uint8]:
        """One video, [1, F, H, W, 3], so that no more than one is in pixels on the device."""

        def decode(tiles: bool) -> NDArray[np.uint8]:
            try:
                video = self.components.codec.decode(latents, tiles=tiles)
            except SamplingError as error:
                raise SamplingError(self._of_decoding(latents, error)) from None
            return video.permute(0, 2, 3, 4, 1).cpu().numpy()

        return self.memory.decode(decode, bucket, decoding=decoding)

    def _guidance(self, requests: Sequence[Request], bucket: Bucket, scale: float) -> Guidance:
        """One pass if the model is given the scale or the scale is at most 1, as in diffusers.

        Else classifier-free guidance.
        """
        parts, pictures = self.components, self._encode_pictures(requests, bucket)
        prompts = [request.prompt for request in requests]
        told = self._encode_text(prompts) | pictures
        is_distilled = parts.family.distils_guidance(parts.model)
        if is_distilled:
            told |= guidance_of(told, scale)
        if is_distilled or scale <= 1:
            return Guidance(self._predict, told, None, scale)
        untold = self._encode_text([NO_CAPTION] * len(requests)) | pictures
        return Guidance(self._predict, told, untold, scale)

    def _guidance_scale(self, settings: SamplingSection) -> float:
        scale = settings.guidance_scale
        return self.components.defaults.guidance_scale if scale is None else scale

    def _encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Each different prompt alone: what one says does not depend, to a bit, on the others."""
        for prompt in dict.fromkeys(prompts):
            if prompt not in self.prompts:
                self.components.bring("text", self.device)
                told = self.components.text.encode([prompt])
                self.prompts[prompt] = {name: each.cpu() for name, each in told.items()}
        encoded = [self.prompts[each] for each in prompts]
        return {
            name: torch.cat([each[name] for each in encoded]).to(self.device) for name in encoded[0]
        }

    def _encode_pictures(self, requests: Sequence[Request], bucket: Bucket) -> Conditioning:
        """`<name>_latents` [N, C, 1, h, w] of each picture that the recipe names."""
        found = read_pictures(requests, list(self.recipe.data.references), bucket)
        if found:
            self.components.bring("codec", self.device)
        encode = self.components.codec.encode
        return {
            f"{name}_latents": torch.cat(
                [encode(torch.from_numpy(each)[None].to(self.device)) for each in pictures]
            )
            for name, pictures in found.items()
        }

    def _predict(self, latents: Tensor, sigmas: Tensor, conditioning: Conditioning) -> Tensor:
        with autocast(self._autocast_precision(), self.device):
            return self.components.predict_velocity(latents, sigmas, conditioning).float()

    def _autocast_precision(self) -> Precision:
        """A model whose weights are in bf16 computes in bf16 without autocast, as in training."""
        return "fp32" if self.recipe.model.dtype == "bf16" else self.precision


def fitting_shape(components: Components, recipe: Recipe, bucket: Bucket) -> LatentShape:
    """The shape of a video's latents, which the model can take.

    Raises:
        RecipeError: the codec or the model cannot divide the bucket; names the nearest that fits.
    """
    shape = latent_shape(components.codec, bucket, components.family.patch(recipe.model))
    components.family.check(recipe.model, [shape])
    return shape


def _noise(seed: int, shape: LatentShape) -> Tensor:
    """One sample's noise, drawn on the CPU so that every device makes the same video."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
