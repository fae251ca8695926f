"""The flow-matching loss on clips that are not trained on, at fixed sigmas and with fixed noise.

Each clip has one window, its middle, and one noise, which is seeded by its identity: results of two
checkpoints differ by their weights only. No caption is dropped, and no clip is mirrored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow.compute as pc
import torch
from torch import Tensor

from longtake.config import AUDIO, Bucket, DataSection, Recipe
from longtake.data.audio import audio_of
from longtake.data.buckets import choose, sample_window
from longtake.data.catalog import Catalog
from longtake.data.checks import refuse_without_conditioning
from longtake.data.clip import Clip
from longtake.data.conditioning import as_values, conditioning_of, read
from longtake.data.order import derive
from longtake.data.stages import captioned_rows
from longtake.data.training_captions import sample_caption
from longtake.data.window import Window
from longtake.errors import DataError, PlanError
from longtake.models.audio import audio_format, take_audio, training_audio
from longtake.models.base import Conditioning
from longtake.models.conditioning import encode_inputs, training_conditioning
from longtake.models.objective import FlowBatch, flow_losses
from longtake.run_dir import RunDirectory
from longtake.sampling.memory_strategy import try_within_memory
from longtake.sampling.sampler import Sampler

NUM_CLIPS = 32
# The middles of five equal parts of [0, 1].
SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)
_STEADY = {"windows": 1, "random_crop": False, "flip": 0.0}  # the same window each time


class Encoded(NamedTuple):
    """Model inputs of one held-out clip, on the CPU; each tensor is [1, ...]."""

    latents: Tensor
    noise: Tensor
    conditioning: Conditioning
    loss_weights: Tensor | None
    audio: dict[str, Tensor]  # as `FlowBatch.audio`


@dataclass
class HeldOut:
    """Held-out clips whose loss is measured. They are encoded once, as encoders are not trained."""

    recipe: Recipe
    clips: Sequence[tuple[Clip, Bucket]]
    encoded: list[Encoded] = field(default_factory=list)

    @classmethod
    def open(
        cls, recipe: Recipe, run: RunDirectory, num_clips: int = NUM_CLIPS
    ) -> "HeldOut | None":
        """Open the recipe's held-out clips; return None if it names no catalog for them.

        Raises:
            DataError: the catalog cannot be read, or has clips that are trained on, or none to use.
        """
        path = recipe.evaluation.held_out
        if path is None:
            return None
        # The loss is flow matching's, whatever the run learns.
        recipe = recipe.without_inputs_of_objective()
        catalog = Catalog.load(path)
        refuse_without_conditioning(catalog, recipe.data.conditioning)
        _refuse_trained(catalog, recipe, run)
        data, rows = recipe.data, captioned_rows(catalog, recipe.data)
        shapes = data.shapes()
        how: Any = {"stills": data.stills_from_videos, "fps": data.fps, "upscale": data.upscale}
        buckets = choose(catalog, rows, shapes, data.frame_stride, **how)
        usable = [(row, shapes[at]) for row, at in zip(rows, buckets, strict=True) if at >= 0]
        # In the order of identities; as these are hashes, the first ones are a random choice.
        found = [(catalog.clip(int(row)), bucket) for row, bucket in usable[:num_clips]]
        if not found:
            names = ", ".join(map(str, shapes))
            raise DataError(
                f"Of the {len(catalog)} held-out clips of {path} none has a caption and is long "
                f"enough for a bucket of the recipe: {names}. Name another catalog as "
                "evaluation.held_out."
            )
        return cls(recipe, found)

    def loss(
        self, sampler: Sampler, batch_size: int = 4, on_batch: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Return the mean loss over the held-out clips at each of `SIGMAS`, and their `mean`.

        With `flow.sigma_range`, or an expert of two, the sigmas are spread over the trained range.
        """
        if not self.encoded:
            self.encoded += _encode(self.clips, self.recipe.data, sampler, on_batch)
        # Clips of a batch have one shape.
        by_bucket: dict[Bucket, list[Encoded]] = {}
        for (_, bucket), encoded in zip(self.clips, self.encoded, strict=True):
            by_bucket.setdefault(bucket, []).append(encoded)
        found: dict[str, float] = {}
        low, high = sampler.components.sigma_range(self.recipe.flow)
        for sigma in (low + each * (high - low) for each in SIGMAS):
            losses = [
                loss
                for same in by_bucket.values()
                for place in range(0, len(same), batch_size)
                for loss in _losses(sampler, same[place : place + batch_size], sigma, on_batch)
            ]
            found[f"{sigma:g}"] = sum(losses) / len(losses)
        return {**found, "mean": sum(found.values()) / len(found)}


def _refuse_trained(catalog: Catalog, recipe: Recipe, run: RunDirectory) -> None:
    """Refuse held-out clips that are trained on: their loss says nothing about other clips."""
    # The run's copies: they include catalogs that the recipe no longer names.
    for path in sorted(run.catalogs_path.glob("*.parquet")):
        is_trained = pc.is_in(catalog.identities, value_set=Catalog.load(path).identities)
        rows = [row for row, known in enumerate(is_trained.to_pylist()) if known]
        if rows:
            raise DataError(
                f"{len(rows)} of the {len(catalog)} held-out clips of {recipe.evaluation.held_out} "
                f"are trained on, such as {catalog.clip(rows[0]).path}. Their loss would say "
                "nothing of clips that the model has not seen: take them out of one of the "
                "catalogs."
            )


@torch.no_grad()
def _encode(
    clips: Sequence[tuple[Clip, Bucket]],
    data: DataSection,
    sampler: Sampler,
    on_clip: Callable[[], None] | None,
) -> list[Encoded]:
    """Encode held-out clips: all captions, then all videos, so one encoder is on the device."""
    parts, device = sampler.components, sampler.device
    parts.bring("text", device)
    captions = []
    for clip, bucket in clips:
        seen = dict[str, Tensor]()
        if parts.family.text.pictures:
            seen = parts.family.text.seen_pictures(_read_inputs(clip, bucket, data, device)[1])
        # The source "" is no catalog of the recipe: no prefix is added, and tags keep their order.
        caption = parts.text.encode([sample_caption(clip.caption, "", data, 0)], seen)
        captions.append({name: each.cpu() for name, each in caption.items()})
    parts.bring("codec", device)
    encoded = []
    for (clip, bucket), caption in zip(clips, captions, strict=True):
        encoded.append(_encode_pictures(clip, bucket, data, sampler, caption))
        if on_clip is not None:
            on_clip()
    return encoded


def _read_inputs(
    clip: Clip, bucket: Bucket, data: DataSection, device: torch.device
) -> tuple[Window, dict[str, Tensor]]:
    """Return a held-out clip's frames, the same for each checkpoint, and its further inputs."""
    window = sample_window(clip, bucket, data.model_copy(update=_STEADY), seed=0)
    return window, {
        name: torch.from_numpy(as_values(wanted, read(wanted)))[None].to(device)
        for name, wanted in conditioning_of(clip, window, data.conditioning).items()
    }


def _encode_pictures(
    clip: Clip, bucket: Bucket, data: DataSection, sampler: Sampler, caption: Conditioning
) -> Encoded:
    """Encode one held-out clip alone: in other batch sizes, convolutions round differently."""
    parts, device = sampler.components, sampler.device
    window, given = _read_inputs(clip, bucket, data, device)
    video = torch.from_numpy(read(window))[None]
    latents = parts.codec.encode(video.to(device))
    if (wanted := audio_format(sampler.recipe, parts.codec.audio)) is not None:
        sound = audio_of(clip, window, wanted)
        given[AUDIO] = torch.from_numpy(as_values(sound, read(sound)))[None].to(device)
    audio = take_audio(sampler.recipe, parts.codec.audio, given, bucket)
    encoded, weights = encode_inputs(parts, sampler.recipe, given, bucket)
    # On the CPU: with the same seed, other devices draw other numbers.
    generator = torch.Generator().manual_seed(derive("held_out", clip.identity))
    noise = torch.randn(latents.shape, generator=generator)
    of_audio = torch.randn(audio["audio_latents"].shape, generator=generator) if audio else None
    on_host = {name: each.cpu() for name, each in audio.items()}
    inputs = {name: each.cpu() for name, each in {**caption, **encoded}.items()}
    weights = None if weights is None else weights.cpu()
    streams = training_audio(sampler.recipe, on_host, of_audio)
    return Encoded(latents.cpu(), noise, inputs, weights, streams)


def _losses(
    sampler: Sampler, batch: Sequence[Encoded], sigma: float, on_batch: Callable[[], None] | None
) -> list[float]:
    """Return the loss of each clip of a batch; the batch is halved if memory does not suffice."""
    found = try_within_memory(_computed, sampler, batch, sigma)
    if found is None and len(batch) == 1:
        raise PlanError(
            f"The loss of one held-out clip (latents of {list(batch[0].latents.shape[1:])}) does "
            "not fit the memory. Take a GPU with more of it, or smaller buckets."
        )
    if found is None:
        middle = len(batch) // 2
        halves = batch[:middle], batch[middle:]
        return [loss for half in halves for loss in _losses(sampler, half, sigma, on_batch)]
    if on_batch is not None:
        on_batch()
    return found


@torch.no_grad()
def _computed(sampler: Sampler, batch: Sequence[Encoded], sigma: float) -> list[float]:
    parts, device = sampler.components, sampler.device
    parts.bring("model", device)
    latents, noise = (
        torch.cat([getattr(each, name) for each in batch]).to(device)
        for name in ("latents", "noise")
    )
    conditioning = {
        name: torch.cat([each.conditioning[name] for each in batch]).to(device)
        for name in batch[0].conditioning
    }
    audio = {
        name: torch.cat([each.audio[name] for each in batch]).to(device) for name in batch[0].audio
    }
    sigmas = torch.full((len(batch),), sigma, device=device)
    inputs = training_conditioning(parts, sampler.recipe, conditioning)
    masked = [each.loss_weights for each in batch if each.loss_weights is not None]
    weights = torch.cat(masked).to(device) if masked else None
    examples = FlowBatch(latents, noise, sigmas, inputs, weights, audio=audio)
    return flow_losses(parts, examples, sampler.precision, device).tolist()
