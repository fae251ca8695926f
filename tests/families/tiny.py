"""A tiny release of a row, what longtake makes of it, and its own pipeline."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tests.build import fill_lora
from tests.families.row import Asked, Row
from tests.models.tiny import make_recipe
from tests.sampling.build import make_sampler, sample_latents
from torch import Tensor

from longtake import config
from longtake.config import Quantization, Recipe, TrainableSection
from longtake.data.encode import Sound, write_video
from longtake.models.audio import Streams
from longtake.models.base import Conditioning, latent_shape
from longtake.models.components import Components
from longtake.models.objective import FlowBatch, flow_losses
from longtake.models.quantized import quantize_linears
from longtake.models.trainable import make_trainable
from longtake.sampling.other_expert import load_other
from longtake.sampling.presets import Request
from longtake.sampling.sampler import Sampler

SHORT = "a red circle"
LONG = "a \u201cred\u201d  circle, moving &amp; it\u2019s up, a blue square moving left"
NUM_CLIPS = 4


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm; 1e-5 is the rounding of fp32."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).norm() / theirs.norm())


def loss_and_gradients(parts: Components, batch: FlowBatch) -> dict[str, Tensor]:
    """The loss, named "", and the gradient of each parameter that has one."""
    parts.model.zero_grad(set_to_none=True)
    loss = flow_losses(parts, batch, "fp32", torch.device("cpu")).sum()
    torch.autograd.backward(loss)
    named = parts.model.named_parameters()
    found = {name: each.grad for name, each in named if each.grad is not None}
    return {"": loss.detach(), **found}


class Step(NamedTuple):
    """One call of a pipeline's scheduler, or of that of video and that of sound joined."""

    velocity: Tensor
    sigma: Tensor  # [1]
    noisy: Tensor
    after: Tensor


class Tiny:
    """A tiny release, what longtake makes of it, and its own pipeline."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row, self.folder = row, folder
        torch.manual_seed(0)
        row.make(folder / "release")
        random = np.random.default_rng(0)
        for number in range(2):
            pixels = random.integers(0, 256, (*row.bucket[1:], 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")

    @cached_property
    def sampler(self) -> Sampler:
        """Of the release as it is."""
        return self.made()

    def recipe(self, **sections: Any) -> Recipe:
        picture = {"kind": "picture", "path": "../{stem}.png"}
        merged: dict[str, Any] = {
            "data": {"conditioning": dict.fromkeys(self.row.pictures, picture)}
        }
        for name, keys in (*self.row.keys.items(), *sections.items()):
            merged[name] = merged.get(name, {}) | keys
        return make_recipe(self.row.family, self.row.bucket, self.folder / "release", **merged)

    def made(self, **sections: Any) -> Sampler:
        recipe = self.recipe(**sections)
        sampler = make_sampler(recipe)
        if not sampler.components.has_other:
            return sampler
        parts = load_other(recipe, sampler.components, torch.device("cpu"))
        return dataclasses.replace(sampler, components=parts)

    def training(
        self, trainable: TrainableSection, quantize: Quantization | None = None
    ) -> Components:
        """What is trained of the release, in a model of its own; no new weight is zero."""
        parts = self.sampler.components
        model = copy.deepcopy(parts.model)
        if quantize is not None:
            model.requires_grad_(False)
            for block in parts.family.blocks(model):
                quantize_linears(block, quantize)
        make_trainable(model, parts.family, trainable, parts.codec.channels)
        fill_lora(model)
        return dataclasses.replace(parts, model=model)

    def batch(self) -> FlowBatch:
        """Two samples, whose captions are of unlike length; of their sound a half is there."""
        latents, noise = (torch.cat([self.noise(n), self.noise(n + 1)]) for n in (1, 3))
        told, sigmas = self.told(self.sampler, [SHORT, LONG]), torch.tensor([0.3, 0.8])
        if self.streams is None:
            return FlowBatch(latents, noise, sigmas, told)
        (latents, clean), (noise, noisy) = map(self.streams.split, (latents, noise))
        weights = (torch.arange(clean.shape[1]) % 2).float().expand(2, -1)
        sound = {"latents": clean, "noise": noisy, "weights": weights}
        return FlowBatch(latents, noise, sigmas, told, audio=sound)

    @cached_property
    def released(self) -> Any:
        """The release's pipeline, for all tests that do not change it."""
        return self.pipeline()

    def pipeline(self, folder: Path | None = None) -> Any:
        pipeline = self.row.load(folder or self.folder / "release")
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def scale(self) -> float:
        """At which a pipeline makes one pass: of a distilled model any, of others 1."""
        parts = self.sampler.components
        return self.row.guidance if parts.family.distils_guidance(parts.model) else 1.0

    def pictures(self, number: int) -> dict[str, Path]:
        return dict.fromkeys(self.row.pictures, self.folder / f"{number}.png")

    def told(self, sampler: Sampler, prompts: Sequence[str], number: int = 0) -> Conditioning:
        """What the model is told in sampling."""
        bucket = sampler.recipe.data.buckets[0]
        requests = [Request(prompt, 3, self.pictures(number)) for prompt in prompts]
        return sampler._guidance(requests, bucket, self.scale, "").conditional

    @cached_property
    def streams(self) -> Streams | None:
        return self.sampler.streams(self.recipe().data.buckets[0])

    def noise(self, seed: int) -> Tensor:
        """Of a video; with the sound's, if there is any, as a solver has both."""
        generator = torch.Generator().manual_seed(seed)
        shape = latent_shape(self.sampler.components.codec, self.recipe().data.buckets[0])
        video = torch.randn(tuple(shape), generator=generator)[None]
        if self.streams is None:
            return video
        sound = torch.randn(self.streams.audio, generator=generator)[None]
        return self.streams.join(video, sound)

    def predict(
        self, parts: Components, noisy: Tensor, sigmas: Tensor, told: Conditioning
    ) -> Tensor:
        """Predict the velocity of what `noise` has noise of."""
        if self.streams is None:
            return parts.predict_velocity(noisy, sigmas, told)
        video, sound = self.streams.split(noisy)
        return self.streams.join(*parts.predict_streams(video, sound, sigmas, told))

    def steps(self, pipeline: Any, num_steps: int, scale: float, prompt: str) -> list[Step]:
        """What the pipeline's own call hands to its scheduler, and gets."""
        frames, height, width = self.row.bucket
        pictures = {
            name: Image.open(path).convert("RGB") for name, path in self.pictures(0).items()
        }
        noise, sound = self.noise(3), None
        if self.streams is not None:
            noise, sound = self.streams.split(noise)
        asked = Asked(pipeline, prompt, noise, frames, height, width, scale, pictures, sound)
        with ExitStack() as stack:
            found = stack.enter_context(self.recorded(asked, pipeline.scheduler, self.row.unpack))
            if self.row.sound_scheduler is not None:
                scheduler = self.row.sound_scheduler(pipeline)
                heard = stack.enter_context(self.recorded(asked, scheduler, self.row.unpack_sound))
            count = num_steps + self.row.further_sigmas
            given = {"num_inference_steps": count, "output_type": "latent"}
            result = pipeline(**given, **self.row.call(asked))[0]
        if self.row.returns_latents:
            found[-1] = found[-1]._replace(after=result)
        if self.streams is None:
            return found
        join = self.streams.join
        return [
            Step(
                join(a.velocity, b.velocity),
                a.sigma,
                join(a.noisy, b.noisy),
                join(a.after, b.after),
            )
            for a, b in zip(found, heard, strict=True)
        ]

    @contextmanager
    def recorded(
        self, asked: Asked, scheduler: Any, unpack: Callable[[Asked, Tensor], Tensor]
    ) -> Iterator[list[Step]]:
        """Record the steps of a scheduler."""
        own, found = scheduler.step, list[Step]()

        def step(velocity: Tensor, time: Tensor, noisy: Tensor, *args: Any, **options: Any) -> Any:
            result = own(velocity, time, noisy, *args, **options)
            tensors = (unpack(asked, each.clone()) for each in (velocity, noisy, result[0]))
            mine, before, after = tensors
            mine = -mine if self.row.negates else mine
            sigma = self.row.sigma(float(time))
            found.append(Step(mine, torch.tensor([sigma]), before, after))
            return result

        scheduler.step = step
        try:
            yield found
        finally:
            scheduler.step = own

    def sampled(self, sampler: Sampler, num_steps: int) -> Tensor:
        """Latents, by the scheduler of the release's pipeline and at its guidance."""
        latents = sample_latents(
            sampler,
            Request(LONG, 3, self.pictures(0)),
            num_inference_steps=num_steps,
            solver=self.row.solver,
            guidance_scale=self.row.guidance,
            guidance_scale_2=self.row.guidance_2,
        )
        return self.made_of(latents)

    @torch.no_grad()
    def velocity(self, sampler: Sampler, step: Step, prompt: str) -> Tensor:
        parts, told = sampler.components, self.told(sampler, [prompt])
        if parts.experts is not None and self.is_low(step) != (parts.experts.trained == "low"):
            parts = parts.with_other()
        return self.made_of(self.predict(parts, step.noisy, step.sigma, told))

    def made_of(self, frames: Tensor) -> Tensor:
        """Frames that reach the pipeline's scheduler, and zeros for the others."""
        if not self.row.given_frames:
            return frames
        made = frames.clone()
        made[:, :, : self.row.given_frames] = 0
        return made

    def is_low(self, step: Step) -> bool:
        """Whether it is the second transformer's, of a release with two."""
        experts = self.sampler.components.experts
        return experts is not None and float(step.sigma) < experts.boundary

    def first_trained(self, steps: Sequence[Step]) -> Step:
        """The first step by the transformer that is trained."""
        experts = self.sampler.components.experts
        trains_low = experts is not None and experts.trained == "low"
        return next(step for step in steps if self.is_low(step) == trains_low)


def name_optional_pictures(row: Row, path: Path) -> None:
    """Those of the row that a recipe of `longtake init` has as comments are no comments then."""
    given, text = config.load(path).data.conditioning, path.read_text()
    names = [f"{name} = " for name in row.pictures if name not in given]
    for begin in (*names, *(["[data.conditioning]\n"] if names and not given else [])):
        assert f"# {begin}" in text
        text = text.replace(f"# {begin}", begin, 1)
    path.write_text(text)


def write_clips(
    folder: Path,
    row: Row,
    fps: float,
    *,
    seed: int = 0,
    pictures: bool = False,
    alpha: bool = False,
    further_caption: str = "",
) -> None:
    """Write `NUM_CLIPS` clips of a row's size into a new folder, with captions beside them.

    Videos have sound but for the last, in whose place silence stands. `pictures` writes pictures of
    rows that have videos; pictures have an `alpha` channel on demand.
    """
    frames, height, width = row.bucket
    random = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(NUM_CLIPS):
        pixels = random.integers(0, 256, (frames, height, width, 3 + alpha), np.uint8)
        if frames == 1 or pictures:
            Image.fromarray(pixels[0]).save(folder / f"{number}.png")
        else:
            noise = 0.1 * random.standard_normal((2, round(frames / fps * 16000)))
            is_silent = number == NUM_CLIPS - 1
            sound = None if is_silent else Sound(noise.astype(np.float32), 16000)
            write_video(folder / f"{number}.mp4", pixels[..., :3], fps, sound=sound)
        captions = [f"a red circle, {number}", *filter(None, [further_caption])]
        (folder / f"{number}.txt").write_text("\n".join(captions))
