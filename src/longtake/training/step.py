"""One optimizer step, in the order in which it happens.

All that is random about a sample comes from the sample's own seed, drawn on the CPU: the same
noise on any device, any number of ranks and any micro-batch size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from longtake import heartbeat
from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.flow.timesteps import sample_sigmas
from longtake.models.base import Conditioning
from longtake.models.build import Components
from longtake.models.numerics import Precision
from longtake.models.objective import FlowBatch, flow_losses, training_conditioning
from longtake.models.text import NO_CAPTION
from longtake.optim.build import schedule_factor, set_learning_rates
from longtake.optim.ema import Averages, masters_of
from longtake.parallel.fsdp import clip_gradients, set_gradient_sync
from longtake.parallel.mesh import World
from longtake.training.latent_cache import encode_captions, encode_videos
from longtake.training.own_work import OwnWork


@dataclass
class TrainingState:
    """All that changes from step to step."""

    components: Components
    optimizers: list[Optimizer]
    ema: Averages
    precision: Precision
    global_step: int = 0
    """Steps done: an optimizer update each, but for those that had nothing to learn from or that
    the guard left out."""


@dataclass(frozen=True)
class SampleLosses:
    """What came of each sample of this rank's share of a batch."""

    losses: tuple[float, ...]
    """[B]; of what stands in for a clip too."""
    sigmas: tuple[float, ...]
    """[B]"""
    work_seconds: float = field(default=0.0, compare=False)
    """Of this rank's own work for them, in which it waited for no other."""


def compute_gradients(
    state: TrainingState, batch: Batch, recipe: Recipe, world: World
) -> SampleLosses:
    """Accumulate the gradients of this rank's share of a batch.

    They are those of the sum of all ranks' weighted losses over the global batch size; what stands
    in for a clip that is not there has weight 0.
    """
    model = state.components.model
    found: list[Tensor] = []
    work = OwnWork(world.device)
    share = recipe.training.batch_size / world.data_size  # gradients are averaged over ranks
    micro_batches = list(_micro_batches(batch, recipe.training.micro_batch_size))
    for number, part in enumerate(micro_batches, start=1):
        set_gradient_sync(model, wanted=number == len(micro_batches))
        heartbeat.set_phase("forward")
        with work.counted():
            examples = prepare(part, state.components, recipe, world.device)
            losses = flow_losses(state.components, examples, state.precision, world.device)
        heartbeat.set_phase("backward")
        weighted = losses * part.weights.to(world.device)
        (weighted.sum() / share).backward()  # type: ignore[no-untyped-call]
        found.append(torch.stack([losses.detach(), examples.sigmas]))
    losses, sigmas = torch.cat(found, dim=1).tolist()  # one wait for the device
    return SampleLosses(tuple(losses), tuple(sigmas), work.seconds())


def apply_update(state: TrainingState, recipe: Recipe, grad_norm: float, scale: float) -> float:
    """Update weights and EMA from the gradients, and drop these.

    Args:
        state: with the gradients of `compute_gradients`.
        recipe: the run's.
        grad_norm: of the mean loss's gradient, over all ranks.
        scale: global batch size over the number of samples that were trained, which makes the
            gradients those of the mean loss.

    Returns:
        The learning rate.
    """
    heartbeat.set_phase("optimizer")
    clip_gradients(state.components.model, grad_norm, recipe.optimizer.max_grad_norm, scale)
    factor = schedule_factor(state.global_step, recipe.training.steps, recipe.optimizer)
    set_learning_rates(state.optimizers, factor)
    for optimizer in state.optimizers:
        optimizer.step()
    state.components.model.zero_grad(set_to_none=True)
    state.global_step += 1
    state.ema.update(state.global_step, masters_of(state.optimizers))
    return recipe.optimizer.learning_rate * factor


def skip_update(state: TrainingState) -> None:
    """Count a step that makes no update."""
    state.components.model.zero_grad(set_to_none=True)
    state.global_step += 1


def prepare(batch: Batch, parts: Components, recipe: Recipe, device: torch.device) -> FlowBatch:
    """Latents, noise, sigmas and conditioning of a (micro-)batch.

    Encoded here and now, or, where the batch has them, as they come from a cache: the same to the
    bit. All is in fp32; a family casts what its model takes in bf16.
    """
    latents = _latents(batch, parts, device)
    draws = [_draw(seed, latents.shape[1:]) for seed in batch.seeds]
    noise = torch.stack([noise for noise, _ in draws]).to(device)
    uniform = torch.stack([uniform for _, uniform in draws])  # [B, 2]
    flow = recipe.flow
    sigmas = sample_sigmas(
        uniform[:, 0],
        flow.sigmas,
        mean=flow.mean,
        std=flow.std,
        scale=flow.scale,
        shift=parts.shift(flow.shift, batch.bucket),
    )
    dropout = recipe.data.caption_dropout
    is_dropped = uniform[:, 1] < (parts.defaults.caption_dropout if dropout is None else dropout)
    told = _conditioning(batch, is_dropped, parts, device)
    conditioning = training_conditioning(parts, recipe, told)
    return FlowBatch(latents, noise, sigmas.to(device, torch.float32), conditioning)


def _latents(batch: Batch, parts: Components, device: torch.device) -> Tensor:
    """[B, C, F, H, W] in fp32."""
    if batch.latents is not None:
        return batch.latents.to(device)
    return encode_videos(parts.codec, batch.videos.to(device))


def _conditioning(
    batch: Batch, is_dropped: Tensor, parts: Components, device: torch.device
) -> Conditioning:
    """What the model is told of captions, without those that are dropped, and of pictures."""
    if batch.latents is not None:
        told = dict(batch.conditioning)
        for name, none in batch.no_caption.items():
            where = is_dropped.reshape(-1, *[1] * (none.ndim - 1))
            told[name] = torch.where(where, none, told[name])
        return {name: tensor.to(device) for name, tensor in told.items()}
    pairs = zip(batch.captions, is_dropped.tolist(), strict=True)
    captions = [NO_CAPTION if drop else caption for caption, drop in pairs]
    told = encode_captions(parts.text, captions)
    for name, pictures in batch.references.items():
        told[f"{name}_latents"] = encode_videos(parts.codec, pictures.to(device))
    return told


def _draw(seed: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A sample's noise, and two uniform numbers: for its sigma and for its caption's dropout."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(2, generator=generator, dtype=torch.float64)
    return torch.randn(tuple(shape), generator=generator), uniform


def _micro_batches(batch: Batch, size: int | None) -> Iterator[Batch]:
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
            references={name: each[part] for name, each in batch.references.items()},
            latents=None if batch.latents is None else batch.latents[part],
            conditioning={name: each[part] for name, each in batch.conditioning.items()},
        )
