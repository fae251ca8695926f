"""Turns a loader's batch into micro-batches on the device, with noise and encoded captions.

    Batch -> draw_on_host -> RawInputs -> copy_to_device -> CopiedInputs -> encode -> EncodedInputs

EncodedInputs hold a MicroBatch, as `assemble` makes it, and the event after which it is ready.

Every random number of a sample is drawn on the CPU from the sample's own seed, so that noise does
not depend on the device, the number of ranks or the micro-batch size. The seed (`Batch.seeds`) is
derived from the run's seed, the stage, the catalog's name, the epoch and the clip, so that each
epoch has new noise.

For a GPU, a thread draws noise and sigmas, and casts and page-locks all tensors. They are copied on
a separate stream while the micro-batch before is computed, so that no micro-batch waits for the
device; encoders may run on that stream too (`training.encode_ahead`). The first batch of each shape
still waits, while its page-locked memory is allocated.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.config import Bucket, Recipe
from longtake.data.batch import Batch
from longtake.data.loader import Loader
from longtake.models.audio import audio_shape, take_audio, training_audio
from longtake.models.base import latent_shape
from longtake.models.codec import encode_videos
from longtake.models.components import Components
from longtake.models.conditioning import encode_inputs, training_conditioning
from longtake.models.objective import FlowBatch
from longtake.models.text import NO_CAPTION, TextEncoder
from longtake.parallel import collectives, context_parallel


class MicroBatch(NamedTuple):
    """A part of a batch, with latents, noise and conditioning on the device."""

    examples: FlowBatch
    weights: Tensor  # [B] on the device; 0 for stand-ins
    sigmas: tuple[float, ...]  # [B] noise levels of the samples, on the host
    captioned: tuple[bool, ...]  # [B] true where the sample is trained with its caption

    def tensors(self) -> Iterator[Tensor]:
        """Yield all device tensors of the micro-batch."""
        batch = self.examples
        tensors = (batch.latents, batch.noise, batch.sigmas, batch.loss_weights, self.weights)
        yield from (tensor for tensor in tensors if tensor is not None)
        groups = batch.conditioning, batch.no_caption, batch.audio
        yield from (tensor for group in groups for tensor in group.values())


@dataclass(frozen=True)
class RawInputs:
    """Tensors and captions of a micro-batch on the host, before encoding, after caption dropout."""

    tensors: Mapping[str, Tensor]  # noise, sigmas, weights, and videos or latents
    conditioning: Mapping[str, Tensor]  # embeddings from a cache; empty without one
    further: Mapping[str, Tensor]  # reference inputs of the clips, and the loss mask
    no_caption: Mapping[str, Tensor]  # the empty caption's embeddings from a cache, if wanted
    captions: Sequence[str]  # [B] the empty caption where it is dropped
    sigmas: tuple[float, ...]  # [B] noise levels, as in `tensors`
    bucket: Bucket
    source: str  # name of the catalog

    @property
    def groups(self) -> tuple[Mapping[str, Tensor], ...]:
        return self.tensors, self.conditioning, self.further, self.no_caption

    def map(self, change: Callable[[Tensor], Tensor]) -> "RawInputs":
        """Return a copy of these inputs with `change` applied to every tensor."""
        tensors, conditioning, further, no_caption = (
            {name: change(tensor) for name, tensor in group.items()} for group in self.groups
        )
        return replace(
            self,
            tensors=tensors,
            conditioning=conditioning,
            further=further,
            no_caption=no_caption,
        )


class CopiedInputs(NamedTuple):
    """Inputs of a micro-batch whose tensors are on the device, or are being copied to it."""

    inputs: RawInputs
    copied: Any  # event of the side stream after the copies; None without a side stream


class EncodedInputs(NamedTuple):
    """A micro-batch whose encoding by codec and text encoder is queued on the device, or done."""

    micro_batch: MicroBatch
    encoded: Any  # event of the side stream after encoding; None if the current stream encodes


class Draw(NamedTuple):
    """Random numbers of one training sample, drawn from the sample's seed."""

    noise: Tensor  # [C, F, H, W] fp32, as the latents
    uniform: Tensor  # [2] fp64 in [0, 1): for the sigma, and for caption dropout
    audio: Tensor | None  # noise [L, D] of the audio, if the model gets any


class SideStream:
    """A second CUDA stream for copies and encoders, beside the one on which the model computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # weights arrive on it

    def running(self) -> AbstractContextManager[Any]:
        """Return a context in which operations are queued on this CUDA stream."""
        return torch.cuda.stream(self._stream)

    def record(self) -> torch.cuda.Event:
        """Return a CUDA event that fires when everything queued on this stream so far is done."""
        return self._stream.record_event()

    def hand_over(self, done: torch.cuda.Event, tensors: Iterable[Tensor]) -> None:
        """Let the current CUDA stream use this stream's tensors, once the event `done` has fired.

        The allocator does not reuse their memory on this stream before the current one is done with
        it.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a page-locked copy of a tensor, from which copies to the GPU are asynchronous."""
        return tensor.pin_memory()


class InputQueue:
    """Makes the micro-batches of each batch of a training; for a GPU, with a thread of its own.

    Args:
        parts: codec and text encoder, on the device.
        recipe: the run's recipe.
        device: device of the micro-batches' tensors.
        group: ranks that have the same clips; each clip is then encoded by one of them.
        encodes_ahead: true to encode on a separate stream of a GPU, one micro-batch ahead.
        with_no_caption: true to give each micro-batch the embeddings of the empty caption, too.
    """

    def __init__(
        self,
        parts: Components,
        recipe: Recipe,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        encodes_ahead: bool = False,
        with_no_caption: bool = False,
    ) -> None:
        self._parts, self._recipe, self._device = parts, recipe, device
        self._with_no_caption = with_no_caption
        self._empty: dict[str, Tensor] | None = None  # embeddings without pictures, once encoded
        self._group = group
        on_cpu = device.type == "cpu"
        self._thread = None if on_cpu else ThreadPoolExecutor(1, "inputs")
        self._side = SideStream(device) if device.type == "cuda" else None
        self.encodes_ahead = encodes_ahead and self._side is not None
        self._draws: dict[int, Future[Draw]] = {}  # drawn by `draw_ahead`, by sample seed
        self._next: tuple[Batch, EncodedInputs] | None = None  # set by `encode_ahead`

    def micro_batches(self, batch: Batch, size: int | None = None) -> Iterator[MicroBatch]:
        """Yield a batch in micro-batches of `size` samples; each is copied while the last computes.

        With `encodes_ahead` they are encoded on the side stream, so the computing stream only ever
        waits for the micro-batch that it computes next.
        """
        parts = list(split(batch, size))
        if self._thread is None:
            for part in parts:
                yield self.assemble(self.draw_on_host(part))
            return
        ahead = None
        if self._next is not None and _samples(self._next[0]) == _samples(parts[0]):
            ahead = self._next[1]
        self._next = None
        to_draw = parts if ahead is None else parts[1:]
        drawn = deque(self._thread.submit(self.draw_on_host, part) for part in to_draw)
        copied = deque[CopiedInputs]()
        for _ in parts:
            if ahead is not None:
                encoded, ahead = ahead, None
            else:
                if not copied:
                    copied.append(self.copy_to_device(drawn.popleft().result()))
                encoded = self.encode(copied.popleft())
            # Copy the next part if it is drawn; waiting for it would keep this one from the GPU.
            if drawn and drawn[0].done():
                copied.append(self.copy_to_device(drawn.popleft().result()))
            if self._side is not None and encoded.encoded is not None:
                self._side.hand_over(encoded.encoded, encoded.micro_batch.tensors())
            yield encoded.micro_batch

    def encode_ahead(self, batch: Batch | None, size: int) -> None:
        """Encode the first micro-batch of the next batch while the present batch is computed.

        `micro_batches` uses the result if it gets that batch next, with the same samples; else it
        is dropped. All ranks that share clips must call it; they encode only if each of them has
        the batch.

        Args:
            batch: result of `Loader.decoded_next`; None if it is not decoded yet.
            size: number of samples of a micro-batch.
        """
        self._next = None
        if self._group is not None:
            # The group encodes together, so a rank whose loader is late keeps the others from it.
            mine = None if batch is None else (batch.step, batch.seeds)
            found = collectives.gather_in_group(mine, self._group)  # over the CPU
            batch = batch if found == [mine] * len(found) else None
        if batch is not None and self.encodes_ahead:
            assert self._thread is not None
            part = next(split(batch, size))
            drawn = self._thread.submit(self.draw_on_host, part).result()
            self._next = part, self.encode(self.copy_to_device(drawn))

    def draw_ahead(self, loader: Loader) -> None:
        """Draw the next batch's noise in the thread, while the device computes this batch."""
        upcoming = None if self._thread is None else loader.upcoming()
        if self._thread is None or upcoming is None:
            return
        codec = self._parts.codec
        shape = tuple(latent_shape(codec, upcoming.bucket))
        audio = audio_shape(self._recipe, codec.audio, upcoming.bucket)
        # These samples were drawn when `encode_ahead` encoded them.
        drawn = () if self._next is None else self._next[0].seeds
        seeds = [seed for seed in upcoming.seeds if seed not in drawn]
        self._draws = {seed: self._thread.submit(draw_sample, seed, shape, audio) for seed in seeds}

    def draw_on_host(self, batch: Batch) -> RawInputs:
        """Draw noise, sigmas and caption dropout of a micro-batch, page-locked for a GPU."""
        parts, recipe = self._parts, self._recipe.in_stage(batch.stage)
        shape = tuple(latent_shape(parts.codec, batch.bucket))
        if batch.latents is not None:
            shape = tuple(batch.latents.shape[1:])
        audio = audio_shape(recipe, parts.codec.audio, batch.bucket)
        draws = [self._draw(seed, shape, audio) for seed in batch.seeds]
        uniform = torch.stack([each.uniform for each in draws])  # [B, 2]
        flow = recipe.flow
        sigmas = parts.sample_sigmas(uniform[:, 0], flow, batch.bucket).float()
        dropout = recipe.data.caption_dropout
        dropout = parts.defaults.caption_dropout if dropout is None else dropout
        # Dropout's number is drawn even where nothing is dropped, so noise does not depend on the
        # share.
        is_dropped = uniform[:, 1] < dropout
        tensors = {
            "noise": torch.stack([each.noise for each in draws]),
            "sigmas": sigmas,
            "weights": batch.weights,
        }
        if audio is not None:
            of_audio = [each.audio for each in draws if each.audio is not None]
            tensors["audio_noise"] = torch.stack(of_audio)
        pairs = zip(batch.captions, is_dropped.tolist(), strict=True)
        captions = [NO_CAPTION if drop else caption for caption, drop in pairs]
        conditioning: dict[str, Tensor] = {}
        if batch.latents is None:
            tensors["videos"] = batch.videos
        else:
            tensors["latents"] = batch.latents
            conditioning |= batch.conditioning
            # The empty caption's where captions are dropped.
            for name, none in batch.no_caption.items():
                where = is_dropped.reshape(-1, *[1] * (none.ndim - 1))
                conditioning[name] = torch.where(where, none, conditioning[name])
        inputs = RawInputs(
            tensors,
            conditioning,
            further=batch.inputs,
            no_caption=batch.no_caption if self._with_no_caption else {},
            captions=captions,
            sigmas=tuple(sigmas.tolist()),
            bucket=batch.bucket,
            source=batch.source,
        )
        return inputs if self._side is None else inputs.map(self._side.pin)

    def _draw(self, seed: int, shape: Sequence[int], audio: Sequence[int] | None) -> Draw:
        ahead = self._draws.pop(seed, None)
        if ahead is not None and ahead.done():  # else queued behind this task
            drawn = ahead.result()
            # Drawn for the shape that the codec states; the entries of a cache decide.
            if drawn.noise.shape == torch.Size(shape):
                return drawn
        return draw_sample(seed, shape, audio)

    def copy_to_device(self, inputs: RawInputs) -> CopiedInputs:
        """Copy a micro-batch's tensors to the device, on the side stream if there is one."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        if self._side is None:
            return CopiedInputs(inputs.map(copy), None)
        with self._side.running():
            return CopiedInputs(inputs.map(copy), self._side.record())

    def encode(self, copied: CopiedInputs) -> EncodedInputs:
        """Encode a micro-batch's clips and captions, on the side stream with `encodes_ahead`."""
        if self._side is None:
            return EncodedInputs(self.assemble(copied.inputs), None)
        if self.encodes_ahead:
            with self._side.running():
                return EncodedInputs(self.assemble(copied.inputs), self._side.record())
        # The encoders run on the current stream, which must wait for the copies.
        tensors = (tensor for group in copied.inputs.groups for tensor in group.values())
        self._side.hand_over(copied.copied, tensors)
        return EncodedInputs(self.assemble(copied.inputs), None)

    def assemble(self, inputs: RawInputs) -> MicroBatch:
        """Make a micro-batch from inputs on the device, encoding its clips and captions.

        The results equal those of a latent cache to the bit.
        """
        parts, tensors = self._parts, inputs.tensors
        latents, conditioning = tensors.get("latents"), dict(inputs.conditioning)
        further = dict(inputs.further)
        conditioning |= take_audio(self._recipe, parts.codec.audio, further, inputs.bucket)
        audio = training_audio(self._recipe, conditioning, tensors.get("audio_noise"))
        pictures = parts.family.text.seen_pictures(further)
        no_caption = dict(inputs.no_caption)
        if latents is None and self._with_no_caption:
            # With each sample's own pictures, if the text encoder reads any; else once for all.
            if pictures:
                empty = [NO_CAPTION] * len(inputs.captions)
                no_caption = encode_captions(parts.text, empty, pictures)
            else:
                self._empty = self._empty or encode_captions(parts.text, [NO_CAPTION])
                no_caption = self._empty
        # Ranks with the same clips split the encoding, and exchange the results.
        if latents is None and self._group is not None:
            conditioning = self._encode_once(inputs, further)
            latents = conditioning.pop("")
        elif latents is None:
            # Captions first: where a text encoder waits for the device, it waits for no video.
            conditioning = encode_captions(parts.text, inputs.captions, pictures)
            latents = encode_videos(parts.codec, tensors["videos"])
        encoded, weights = encode_inputs(parts, self._recipe, further, inputs.bucket)
        conditioned = training_conditioning(parts, self._recipe, conditioning | encoded)
        examples = FlowBatch(
            latents,
            tensors["noise"],
            tensors["sigmas"],
            conditioned,
            weights,
            no_caption,
            inputs.source,
            audio,
        )
        captioned = tuple(caption != NO_CAPTION for caption in inputs.captions)
        return MicroBatch(examples, tensors["weights"], inputs.sigmas, captioned)

    def _encode_once(self, inputs: RawInputs, further: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encode each clip on only one of the ranks that share the clips; return all results.

        The key "" holds the clips' latents. Inputs that the codec encodes are removed from
        `further`.
        """
        parts, sections = self._parts, self._recipe.step_inputs()
        with_text = parts.family.text.seen_pictures(further)
        names = [name for name in further if name in sections and sections[name].is_encoded]
        given = {name: further.pop(name) for name in names}

        def encode(place: int) -> dict[str, Tensor]:
            row = slice(place, place + 1)
            pictures = {name: each[row] for name, each in with_text.items()}
            encoded = encode_captions(parts.text, inputs.captions[row], pictures)
            encoded[""] = encode_videos(parts.codec, inputs.tensors["videos"][row])
            mine = {name: each[row] for name, each in given.items()}
            if mine:
                encoded |= parts.family.inputs.encode(parts.codec, parts.text, mine, inputs.bucket)
            return encoded

        assert self._group is not None
        count = len(inputs.captions)
        return context_parallel.compute_once(count, encode, self._group, self._device)


def prepare(batch: Batch, parts: Components, recipe: Recipe, device: torch.device) -> FlowBatch:
    """Return latents, noise, sigmas and conditioning of a whole training batch, in fp32."""
    return next(InputQueue(parts, recipe, device).micro_batches(batch)).examples


def clips_not_encoded(
    batch: Batch,
    losses: Sequence[float],
    parts: Components,
    recipe: Recipe,
    device: torch.device,
) -> Iterator[tuple[str, str]]:
    """Find clips whose loss is NaN or inf because the codec's or text encoder's output is.

    Yields each clip's identity with the names of those outputs: its latents, its caption's
    embeddings or its reference inputs.
    """
    if batch.latents is not None:  # a cache is never filled with NaN or inf
        return
    recipe = recipe.in_stage(batch.stage)
    for place, part in enumerate(split(batch, 1)):
        if batch.weights[place] and not math.isfinite(losses[place]):
            further = {name: each.to(device) for name, each in part.inputs.items()}
            pictures = parts.family.text.seen_pictures(further)
            given = {"latents": encode_videos(parts.codec, part.videos.to(device))}
            given |= encode_captions(parts.text, part.captions, pictures)
            given |= encode_inputs(parts, recipe, further, part.bucket)[0]
            given |= take_audio(recipe, parts.codec.audio, further, part.bucket)
            names = [name for name, each in given.items() if not bool(each.isfinite().all())]
            if names:
                yield batch.identities[place], ", ".join(names)


def split(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Yield a batch in parts of at most `size` samples; in one part if `size` is None."""
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
            no_caption={
                # A single row serves all samples, unless pictures are encoded with it.
                name: each if len(each) == 1 else each[part]
                for name, each in batch.no_caption.items()
            },
        )


def encode_captions(
    text: TextEncoder, captions: Sequence[str], pictures: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Encode each caption by itself, with its own pictures if the text encoder reads pictures."""
    encoded = []
    for row, caption in enumerate(captions):
        seen = {name: each[row : row + 1] for name, each in (pictures or {}).items()}
        encoded.append(text.encode([caption], seen))
    return {name: torch.cat([tensors[name] for tensors in encoded]) for name in encoded[0]}


def _samples(part: Batch) -> tuple[object, ...]:
    """Return the fields that determine a micro-batch's contents, for comparison with another's."""
    shape = part.stage, part.bucket, part.weights.tolist()
    return part.step, *shape, part.seeds, part.identities, part.captions


def draw_sample(seed: int, shape: Sequence[int], audio: Sequence[int] | None = None) -> Draw:
    """Draw a training sample's noise, and uniform numbers for its sigma and caption dropout."""
    generator = torch.Generator().manual_seed(seed)
    # Before the noise, so that sigma and dropout do not depend on the latents' shape.
    uniform = torch.rand(2, generator=generator, dtype=torch.float64)
    noise = torch.randn(tuple(shape), generator=generator)
    # Last, so that the video's noise is the same with and without audio.
    of_audio = None if audio is None else torch.randn(tuple(audio), generator=generator)
    return Draw(noise, uniform, of_audio)
