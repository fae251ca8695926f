"""Samples videos from the weights of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake import config
from longtake.checkpoint import store
from longtake.config import Bucket, Recipe, SamplingSection
from longtake.data.clip import Media
from longtake.data.crop import Crop
from longtake.data.references import Reference, read
from longtake.errors import CheckpointError, ClipError, DataError, RecipeError
from longtake.flow.solver import guided, integrate
from longtake.flow.timesteps import build_sigmas
from longtake.models.assemble import Components, assemble, guidance_of, latent_shape
from longtake.models.family import Conditioning, LatentShape
from longtake.models.precision import Precision, autocast
from longtake.models.text import NO_CAPTION
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel.mesh import Device, pick_device
from longtake.run_dir import RunDirectory


@dataclass(frozen=True)
class Request:
    """One video that someone wants."""

    prompt: str
    seed: int
    references: Mapping[str, Path] = field(default_factory=dict)
    """Pictures that it goes by, for a model that was trained with such: images or videos, of which
    the first frame counts, by their names in `data.references`."""


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

    def sample(
        self,
        requests: Sequence[Request],
        settings: SamplingSection,
        bucket: Bucket,
        on_step: Callable[[int], None] | None = None,
    ) -> NDArray[np.uint8]:
        """Videos, [N, F, H, W, 3], each of its own seed alone, whatever stands beside it.

        Raises:
            RecipeError: the codec or the model cannot divide the bucket.
            ModelError: the model is built for another shape.
            DataError: a request lacks a picture that the model goes by, or it cannot be read.
        """
        shape = self._shape(bucket)
        pictures = self._encode_references(requests, bucket)
        noise = torch.stack([_noise(request.seed, shape) for request in requests]).to(self.device)
        prompts = [request.prompt for request in requests]
        velocity = self._guided_velocity(prompts, pictures, settings.guidance_scale)
        sigmas = build_sigmas(settings.num_inference_steps, self.shift(settings, bucket))
        with torch.inference_mode():
            latents = integrate(velocity, noise, sigmas, settings.solver, on_step)
            videos = self.components.codec.decode(latents)
        return videos.permute(0, 2, 3, 4, 1).cpu().numpy()

    def shift(self, settings: SamplingSection, bucket: Bucket) -> float:
        """The shift of the sigmas that a bucket's videos are sampled with."""
        return self.components.shift(settings.shift, bucket)

    def unknown_words(self, prompt: str) -> list[str]:
        """Words of a prompt that the text encoder has never seen."""
        return self.components.text.unknown_words(prompt)

    def _shape(self, bucket: Bucket) -> LatentShape:
        patch = self.components.family.patch(self.recipe.model)
        shape = latent_shape(self.components.codec, bucket, patch)
        self.components.family.check(self.recipe.model, [shape])
        return shape

    def _encode_references(self, requests: Sequence[Request], bucket: Bucket) -> Conditioning:
        """`<name>_latents` [N, C, 1, h, w] of each picture that the recipe names."""
        names = self.recipe.data.references
        for request in requests:
            if request.references.keys() != names.keys():
                raise DataError(
                    f"This run goes by the pictures named: {', '.join(names) or 'none'}; the "
                    f"request names: {', '.join(request.references) or 'none'}. Give each that it "
                    "goes by with --reference NAME=FILE, and no other."
                )
        pictures = {
            name: np.stack([_read(request.references[name], bucket) for request in requests])
            for name in names
        }
        return {
            f"{name}_latents": self.components.codec.encode(torch.from_numpy(each).to(self.device))
            for name, each in pictures.items()
        }

    def _guided_velocity(
        self, prompts: list[str], pictures: Conditioning, scale: float
    ) -> Callable[[Tensor, float], Tensor]:
        """One pass where the model is told the scale, or where it is 1: that needs no guidance.

        Else classifier-free guidance, both halves in one batch.
        """
        parts = self.components
        is_distilled = parts.family.distils_guidance(parts.model)
        is_guided = scale != 1 and not is_distilled
        captions = prompts + [NO_CAPTION] * len(prompts) if is_guided else prompts
        conditioning = parts.text.encode(captions)
        for name, latents in pictures.items():
            conditioning[name] = torch.cat([latents] * 2) if is_guided else latents
        if is_distilled:
            conditioning |= guidance_of(conditioning, scale)

        def velocity(noisy_latents: Tensor, sigma: float) -> Tensor:
            doubled = torch.cat([noisy_latents] * 2) if is_guided else noisy_latents
            sigmas = torch.full((len(doubled),), sigma, device=self.device)
            with autocast(self._autocast_precision(), self.device):
                predicted = parts.predict_velocity(doubled, sigmas, conditioning)
            if not is_guided:
                return predicted.float()
            conditional, unconditional = predicted.float().chunk(2)
            return guided(conditional, unconditional, scale)

        return velocity

    def _autocast_precision(self) -> Precision:
        """A model whose weights are in bf16 computes in bf16 without autocast, as in training."""
        return "fp32" if self.recipe.model.dtype == "bf16" else self.precision


def load_sampler(
    path: Path,
    *,
    step: int | None = None,
    ema: bool | None = None,
    profile: str | None = None,
    device: Device,
) -> Sampler:
    """Load a sampler from a run directory (its newest checkpoint) or from one checkpoint folder.

    Nothing but the weights that are sampled has to be there: not the optimizer, for one.

    Args:
        path: of the run or checkpoint.
        step: which checkpoint of a run; its newest by default.
        ema: whether averaged weights are wanted; unset, where the run keeps any.
        profile: of the averages; `ema.sample_from` by default.
        device: to sample on.

    Raises:
        RunError: there is no run.
        RecipeError: the run keeps no such average.
        CheckpointError: there is no whole checkpoint, or it is damaged.
    """
    recipe = find_run(path).recipe()
    weights = weights_to_sample(recipe, ema=ema, profile=profile)
    run, checkpoint = find_checkpoint(path, step, weights)
    trainer = store.load_trainer(checkpoint)
    place = pick_device(device)
    components = assemble(recipe, (), run.components_path)
    state = trained_state(components.model)  # the rest is as the recipe's model brings it
    store.load_parts(checkpoint, {weights: state})
    load_trained(components.model, state)
    components.model.eval().requires_grad_(False)
    components.to(place)
    step, precision = trainer["global_step"], trainer["precision"]
    return Sampler(components, recipe, step, place, precision, weights)


def weights_to_sample(
    recipe: Recipe, *, ema: bool | None = None, profile: str | None = None
) -> str:
    """The part of a checkpoint that is sampled, `model` or `ema/` and a profile's name.

    Raises:
        RecipeError: the run keeps no such average.
    """
    kept = [each.name for each in recipe.ema.averages()]
    if profile is not None and ema is False:
        raise RecipeError(
            f"--profile {profile} names an average, but --no-ema asks for the weights themselves. "
            "Leave one of them out."
        )
    if ema and not kept:
        raise RecipeError(
            "This run keeps no averages of its weights (ema.enabled = false). Leave --ema out: "
            "then the weights themselves are taken."
        )
    if profile is not None and profile not in kept:
        raise RecipeError(
            f"This run has no EMA profile {profile!r}. It keeps: {', '.join(kept) or 'none'}."
        )
    wanted = profile or recipe.ema.sampled()
    return "model" if ema is False or wanted is None else f"ema/{wanted}"


def find_run(path: Path) -> RunDirectory:
    """The run directory that a path is, or that has it as one of its checkpoints."""
    run = RunDirectory(path)
    if path.absolute().parent.name == "checkpoints" and not run.exists():
        return RunDirectory(path.absolute().parents[1])
    return run


def find_checkpoint(
    path: Path, step: int | None = None, part: str = ""
) -> tuple[RunDirectory, Path]:
    """The run and the checkpoint that a path means.

    Args:
        path: a run directory or one of its checkpoint folders.
        step: which checkpoint of a run; its newest by default.
        part: what of it has to be there; all of it by default.

    Raises:
        RunError: there is no run.
        CheckpointError: there is none, or not of that step.
    """
    run = find_run(path)
    if run.path != path:
        _refuse_checkpoint(path, run, step)
        return run, path
    run.recipe()  # refuses what is no run directory
    steps = run.checkpoint_steps()
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{path} has no whole checkpoint of step {step}. Its checkpoints: {steps or 'none'}."
        )
    found = run.checkpoint_path(step) if step is not None else store.newest(run, part)
    if found is None:
        raise CheckpointError(
            f"{path} has no whole checkpoint yet. Train on with {run.command_to_go_on()}, or wait "
            "for checkpoint.every steps."
        )
    return run, found


def _refuse_checkpoint(checkpoint: Path, run: RunDirectory, step: int | None) -> None:
    """Refuse one that is not there, or that a step is asked of."""
    if step is not None:
        raise CheckpointError(
            f"{checkpoint} is one checkpoint already. Leave --step {step} out, or name the run: "
            f"{run.path}."
        )
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {checkpoint}. The run has those of the steps: "
            f"{run.checkpoint_steps() or 'none'}."
        )


def settings_for(
    recipe: Recipe,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    **changes: object,
) -> tuple[SamplingSection, Bucket]:
    """The recipe's sampling settings and first bucket, with whatever is not None changed.

    Raises:
        RecipeError: a value is out of range.
    """
    sizes = {"num_frames": num_frames, "height": height, "width": width}
    values = recipe.model_dump(exclude_none=True)
    values["sampling"] |= _given(changes)
    values["data"]["buckets"] = [values["data"]["buckets"][0] | _given(sizes)]
    changed = config.parse(values, source="The settings of this sampling")
    return changed.sampling, changed.data.buckets[0]


def _given(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def _noise(seed: int, shape: LatentShape) -> Tensor:
    """One sample's noise, drawn on the CPU so that every device makes the same video."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _read(picture: Path, bucket: Bucket) -> NDArray[np.uint8]:
    """[3, 1, H, W]: scaled to cover the bucket and cut in the middle."""
    wanted = Reference(
        identity="",
        media=Media(str(picture)),
        clip_height=0,  # there is no clip that it would have to be cut like
        clip_width=0,
        clip_crop=Crop(0, 0, 0, 0),
        height=bucket.height,
        width=bucket.width,
        is_flipped=False,
    )
    try:
        return read(wanted)
    except ClipError as error:
        raise DataError(f"The picture {error.path} cannot be read: {error.reason}.") from error
