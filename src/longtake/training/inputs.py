"""What a micro-batch consists of, from a loader's batch to tensors on the device.

All that is random about a sample comes from the sample's own seed, drawn on the CPU: the same
noise on any device, any number of ranks and any micro-batch size.

For a GPU, noise and sigmas are drawn, and all tensors cast and page-locked, in a thread. They are
copied on a stream of their own while the micro-batch before is computed, so that no micro-batch
waits for the device. What still waits: the first batch of each shape, for which page-locked memory
is allocated, and without a cache the captions of a micro-batch, which are tokenised and copied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.config import Recipe
from longtake.data.loader import Batch, Loader
from longtake.flow.timesteps import sample_sigmas
from longtake.models.build import Components, FlowBatch, latent_shape, training_conditioning
from longtake.models.conditioning import condition_on, encode_videos, loss_weights
from longtake.models.text import NO_CAPTION, TextEncoder


class MicroBatch(NamedTuple):
    """A part of a batch, ready for the forward pass."""

    examples: FlowBatch
    weights: Tensor  # [B] on the device
    sigmas: tuple[float, ...]  # [B] those of the examples


@dataclass(frozen=True)
class _Inputs:
    """Tensors of a micro-batch before they are encoded, and captions after dropout."""

    tensors: Mapping[str, Tensor]
    conditioning: Mapping[str, Tensor]  # of a cache; else empty
    further: Mapping[str, Tensor]  # inputs of the clips, and the loss's mask
    captions: Sequence[str]
    sigmas: tuple[float, ...]


class _Drawn(NamedTuple):
    noise: Tensor
    uniform: Tensor  # [2] for the sigma and for the dropout of the caption


class InputQueue:
    """Makes the micro-batches of each batch of a run, in its own thread if they go to a GPU."""

    def __init__(self, parts: Components, recipe: Recipe, device: torch.device) -> None:
        self._parts, self._recipe, self._device = parts, recipe, device
        on_cpu = device.type == "cpu"
        self._thread = None if on_cpu else ThreadPoolExecutor(1, "inputs")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._ahead: dict[int, Future[_Drawn]] = {}

    def micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        """Its micro-batches, each moved to the device while the one before is computed."""
        parts = list(split(batch, self._recipe.training.micro_batch_size))
        if self._thread is None:
            for part in parts:
                yield self._ready(self._drawn(part))
            return
        drawn = [self._thread.submit(self._drawn, part) for part in parts]
        moved: list[tuple[_Inputs, torch.cuda.Event | None]] = []
        for _ in parts:
            if not moved:
                moved.append(self._moved(drawn.pop(0).result()))
            inputs, copied = moved.pop(0)
            if drawn and drawn[0].done():
                moved.append(self._moved(drawn.pop(0).result()))
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                for tensor in _tensors(inputs):
                    tensor.record_stream(stream)
            yield self._ready(inputs)

    def draw_ahead(self, loader: Loader) -> None:
        """Draw in the thread what the next batch will most likely need, while this one computes."""
        upcoming = None if self._thread is None else loader.upcoming()
        if self._thread is None or upcoming is None:
            return
        shape = latent_shape(self._parts.codec, upcoming.bucket)
        self._ahead = {
            seed: self._thread.submit(_draw, seed, tuple(shape)) for seed in upcoming.seeds
        }

    def _drawn(self, batch: Batch) -> _Inputs:
        """All that a micro-batch needs of the host, in fp32 and page-locked for a GPU."""
        parts, recipe = self._parts, self._recipe
        shape = tuple(latent_shape(parts.codec, batch.bucket))
        if batch.latents is not None:
            shape = tuple(batch.latents.shape[1:])
        draws = [self._draw(seed, shape) for seed in batch.seeds]
        uniform = torch.stack([each.uniform for each in draws])  # [B, 2]
        flow = recipe.flow
        sigmas = sample_sigmas(
            uniform[:, 0],
            flow.timestep_sampling,
            mean=flow.logit_mean,
            std=flow.logit_std,
            scale=flow.mode_scale,
            shift=parts.shift(flow.shift, batch.bucket),
            sigma_range=flow.sigma_range,
        ).float()
        dropout = recipe.data.caption_dropout
        dropout = parts.defaults.caption_dropout if dropout is None else dropout
        is_dropped = uniform[:, 1] < dropout
        tensors = {
            "noise": torch.stack([each.noise for each in draws]),
            "sigmas": sigmas,
            "weights": batch.weights,
        }
        pairs = zip(batch.captions, is_dropped.tolist(), strict=True)
        captions = [NO_CAPTION if drop else caption for caption, drop in pairs]
        conditioning: Mapping[str, Tensor] = {}
        if batch.latents is None:
            tensors["videos"] = batch.videos
        else:
            tensors["latents"] = batch.latents
            conditioning = _with_dropped(batch, is_dropped)
        used = {*recipe.model_inputs(), flow.loss_mask}
        further = {name: each for name, each in batch.inputs.items() if name in used}
        known = tuple(sigmas.tolist())
        inputs = _Inputs(tensors, conditioning, further, captions, known)
        return inputs if self._stream is None else _each(inputs, Tensor.pin_memory)

    def _draw(self, seed: int, shape: Sequence[int]) -> _Drawn:
        ahead = self._ahead.pop(seed, None)
        if ahead is not None and ahead.done():  # others would wait for this thread
            drawn = ahead.result()
            if drawn.noise.shape == torch.Size(shape):
                return drawn
        return _draw(seed, shape)

    def _moved(self, inputs: _Inputs) -> tuple[_Inputs, torch.cuda.Event | None]:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        if self._stream is None:
            return _each(inputs, move), None
        with torch.cuda.stream(self._stream):
            return _each(inputs, move), self._stream.record_event()

    def _ready(self, inputs: _Inputs) -> MicroBatch:
        """Encode what is not encoded yet: the same bits as those of a cache."""
        parts, tensors = self._parts, inputs.tensors
        latents, conditioning = tensors.get("latents"), dict(inputs.conditioning)
        if latents is None:
            latents = encode_videos(parts.codec, tensors["videos"])
            conditioning = encode_captions(parts.text, inputs.captions)
        sections, flow = self._recipe.model_inputs(), self._recipe.flow
        for name in (each for each in inputs.further if each in sections):
            section, given = sections[name], inputs.further[name]
            conditioning |= condition_on(parts.codec, name, section, given)
        conditioned = training_conditioning(parts, self._recipe, conditioning)
        weights = None
        if flow.loss_mask is not None:
            mask = inputs.further[flow.loss_mask]
            weights = loss_weights(parts.codec, mask, flow.loss_mask_floor)
        examples = FlowBatch(latents, tensors["noise"], tensors["sigmas"], conditioned, weights)
        return MicroBatch(examples, tensors["weights"], inputs.sigmas)


def prepare(batch: Batch, parts: Components, recipe: Recipe, device: torch.device) -> FlowBatch:
    """Latents, noise, sigmas and conditioning of a batch, in fp32, as one micro-batch."""
    whole = recipe.training.model_copy(update={"micro_batch_size": None})
    queue = InputQueue(parts, recipe.model_copy(update={"training": whole}), device)
    return next(queue.micro_batches(batch)).examples


def split(batch: Batch, size: int | None) -> Iterator[Batch]:
    """The batch in parts of `size` samples, the last perhaps smaller."""
    total = len(batch.captions)
    size = size or total
    for start in range(0, total, size):
        part = slice(start, start + size)
        yield replace(
            batch,
            videos=batch.videos[part],
            captions=batch.captions[part],
            seeds=batch.seeds[part],
            identities=batch.identities[part],
            epochs=batch.epochs[part],
            weights=batch.weights[part],
            inputs={name: each[part] for name, each in batch.inputs.items()},
            latents=None if batch.latents is None else batch.latents[part],
            conditioning={name: each[part] for name, each in batch.conditioning.items()},
        )


def encode_captions(text: TextEncoder, captions: Sequence[str]) -> dict[str, Tensor]:
    each = [text.encode([caption]) for caption in captions]
    return {name: torch.cat([tensors[name] for tensors in each]) for name in each[0]}


def _each(inputs: _Inputs, change: Callable[[Tensor], Tensor]) -> _Inputs:
    """The same with each tensor changed."""
    groups = (inputs.tensors, inputs.conditioning, inputs.further)
    tensors, conditioning, further = (
        {name: change(tensor) for name, tensor in group.items()} for group in groups
    )
    return replace(inputs, tensors=tensors, conditioning=conditioning, further=further)


def _tensors(inputs: _Inputs) -> list[Tensor]:
    groups = (inputs.tensors, inputs.conditioning, inputs.further)
    return [tensor for group in groups for tensor in group.values()]


def _with_dropped(batch: Batch, is_dropped: Tensor) -> dict[str, Tensor]:
    """Conditioning of a cache, that of no caption in the place of dropped ones."""
    encoded = dict(batch.conditioning)
    for name, none in batch.no_caption.items():
        where = is_dropped.reshape(-1, *[1] * (none.ndim - 1))
        encoded[name] = torch.where(where, none, encoded[name])
    return encoded


def _draw(seed: int, shape: Sequence[int]) -> _Drawn:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(2, generator=generator, dtype=torch.float64)
    return _Drawn(torch.randn(tuple(shape), generator=generator), uniform)
