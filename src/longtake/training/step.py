"""The parts of a training step: seeds, gradients and update; `loop.py` calls them in order."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from longtake import errors, heartbeat
from longtake.data.batch import Batch
from longtake.data.loader import Loader
from longtake.data.order import derive
from longtake.data.stages import StagePosition
from longtake.models.objective import losses_of_zero, training_losses
from longtake.optim.fused_backward import updating_in_backward
from longtake.optim.update import learning_rate_factor, masters_of, set_learning_rates
from longtake.parallel import collectives, fsdp, mesh
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.statistics import NormStats


def begin_step(session: Session, state: TrainingState, batch: Batch) -> Batch:
    """Seed a training step, and return its batch without clips that a rank could not decode."""
    heartbeat.begin_step(state.global_step, str(batch.bucket))
    batch = drop_undecodable(batch, session.world)
    seed_step(session.recipe.seed, state.global_step, session.world.rank)
    return batch


def drop_undecodable(batch: Batch, world: mesh.World) -> Batch:
    """Drop clips that another rank of the same context-parallel group could not decode.

    The ranks of a group decode the same clips, each for itself. All ranks must call it.

    Raises:
        DataError: the ranks of a group replaced the batch by batches of different shapes.
    """
    if world.sequence_group is None:
        return batch
    everyone = collectives.gather_in_group(
        (batch.weights.tolist(), batch.rejected, str(batch.bucket)), world.sequence_group
    )
    weights_of_ranks, rejected_of_ranks, buckets = zip(*everyone, strict=True)
    if len(set(buckets)) > 1:
        raise errors.DataError(
            f"Batch {batch.step} could not be decoded on some of the ranks that share its tokens "
            f"(their shapes: {', '.join(buckets)}). Can all nodes read the same files? Start the "
            "same command again: it resumes from the newest checkpoint."
        )
    # A clip has weight 0 on all ranks of the group as soon as it has on one of them.
    weights = [min(of_one_place) for of_one_place in zip(*weights_of_ranks, strict=True)]
    rejected = dict.fromkeys(sample for samples in rejected_of_ranks for sample in samples)
    return replace(batch, weights=torch.tensor(weights), rejected=tuple(rejected))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python, numpy and torch for one step, for random operations inside the model.

    Noise, sigmas and the dropout of captions have the seeds of their samples instead (`inputs.py`).

    The seed depends on recipe seed, step and rank only, so no random state is saved: a resumed run
    draws the same numbers, provided that the number of processes is the same.
    """
    number = derive("step", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)  # an older generator, but a user's module may use it
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes ten times as long
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)


def compute_gradients(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
    """Accumulate the gradients of this rank's share of a batch.

    The loss is the sum of all ranks' weighted sample losses divided by the batch's global size: the
    mean over the ranks that have different clips of (sum of a rank's losses / `share`). Ranks that
    share a clip's tokens each have its whole loss, so that a mean over all ranks is the same, as
    the derivatives of their exchanges are those of the sum of their losses. A stand-in (`Batch`)
    has weight 0; `fsdp.clip_gradients` multiplies the gradients by (global size / number of clips
    that were there), so that they are those of a mean.
    """
    world, components = session.world, state.components
    model, blocks = components.model, components.family.blocks(components.model)
    size = _micro_batch_size(session, batch)
    count = -(-len(batch.seeds) // size)
    # FSDP's reduce-scatter and `reduce_gradients` average over ranks, both in fp32.
    share = batch.global_size / world.data_size
    timer, found, sigmas = ComputeTimer(world.device), list[Tensor](), list[float]()
    captioned, of_zero = list[bool](), list[Tensor]()
    # At step 0 of a pretrained model, the recorder warns if predicting 0 would have a lower loss.
    recipe, is_first = session.recipe, state.global_step == 0
    is_flow = recipe.objective.kind == "flow_matching"
    is_compared = is_first and is_flow and recipe.model.pretrained is not None
    micro_batches = state.inputs.micro_batches(batch, size)
    for number in range(1, count + 1):
        # Ranks reduce the accumulated gradients once, in the backward pass of the last micro-batch.
        fsdp.set_gradient_sync(model, wanted=number == count)
        heartbeat.set_phase("forward")
        with timer.measure():
            part = next(micro_batches)
            losses = training_losses(
                state.objective, components, part.examples, session.precision, world.device
            )
        heartbeat.set_phase("backward")
        ((losses * part.weights).sum() / share).backward()  # type: ignore[no-untyped-call]
        found.append(losses.detach())
        if is_compared:
            of_zero.append(losses_of_zero(components, part.examples))
        sigmas += part.sigmas
        captioned += part.captioned
    fsdp.reduce_gradients(model, blocks, world)
    zero = torch.cat(of_zero) if is_compared else None
    return SampleLosses(torch.cat(found), tuple(sigmas), tuple(captioned), timer.seconds, zero)


@contextmanager
def updating(
    session: Session, state: TrainingState, norms: NormStats, batch: Batch
) -> Iterator[None]:
    """With `optimizer.fused_backward`, let the backward pass inside the context update the weights.

    Each weight is updated as soon as its gradient is complete, and the gradient is freed. So
    `apply_update` finds no gradients, and only moves the averages and counts the step.
    """
    if not session.recipe.optimizer.fused_backward:
        yield
        return
    norms.measure_weights()
    factor = learning_rate_factor(session.recipe, state.global_step, batch.position)
    set_learning_rates(state.optimizers, factor)
    # A single process knows before the pass how many samples are trained; without any, no weight
    # is updated, as in an ordinary step.
    num_samples = int(batch.weights.sum())
    scale = batch.global_size / num_samples if num_samples else 0.0
    scale *= session.recipe.data.loss_weight(batch.source)
    with updating_in_backward(state.optimizers, scale) as freed:
        yield
    norms.freed = freed


def _micro_batch_size(session: Session, batch: Batch) -> int:
    """Return `training.micro_batch_size`, or this rank's whole share if the recipe has none.

    A bucket with a batch size of its own is split into as many micro-batches as the others.
    """
    stage = session.recipe.data.stage(batch.stage)
    return session.recipe.micro_batch_size(stage, batch.bucket, session.world.data_size)


def prepare_next(session: Session, state: TrainingState, loader: Loader) -> None:
    """Start to encode the next batch and draw its noise, while the device computes this one."""
    if state.inputs.encodes_ahead:
        batch = loader.decoded_next()
        size = 1 if batch is None else _micro_batch_size(session, batch)
        state.inputs.encode_ahead(batch, size)
    state.inputs.draw_ahead(loader)


class ComputeTimer:
    """Measures how long this rank computes without waiting for other ranks, to find slow ranks.

    Only forward passes and the encoding before them are measured, since every other part of a step
    ends in a collective. Where these wait for collectives as well, in a sharded model and between
    ranks that share tokens, the time tells less.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time a forward pass inside the context; on a GPU, by two events on the current stream."""
        if not self._is_cuda:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        # Events on the stream, as the host runs ahead of the GPU.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._events.append((begin, end))
        begin.record()
        yield
        end.record()

    def seconds(self) -> float:
        milliseconds = sum(float(begin.elapsed_time(end)) for begin, end in self._events)
        return self._seconds + milliseconds / 1e3


def apply_update(
    session: Session,
    state: TrainingState,
    grad_norm: float,
    scale: float,
    position: StagePosition,
) -> float:
    """Clip the gradients, update weights and EMA, clear the gradients; return the learning rate.

    Where `updating` has updated the weights, no gradients are left to clip and to apply.

    Args:
        session: recipe and ranks of this launch.
        state: training state; its step is increased by 1.
        grad_norm: norm over all ranks of the gradient, after it is multiplied by `scale`.
        scale: factor that turns the accumulated gradients into those of the weighted mean loss: the
            batch's global size over the number of its samples that were trained, times the weight
            of its catalog (`data.loss_weights`).
        position: the batch's place in its stage, for learning rate schedules.
    """
    heartbeat.set_phase("optimizer")
    section, data = session.recipe.optimizer, session.recipe.data
    fsdp.clip_gradients(state.components.model, grad_norm, section.max_grad_norm, scale)
    factor = learning_rate_factor(session.recipe, state.global_step, position)
    set_learning_rates(state.optimizers, factor)
    for optimizer in state.optimizers:
        optimizer.step()
    state.components.model.zero_grad(set_to_none=True)
    state.global_step += 1
    decay = data.stage(position.name).ema_decay
    state.ema.update(state.global_step, masters_of(state.optimizers), decay)
    return section.learning_rate * factor


def skip_update(state: TrainingState) -> None:
    state.components.model.zero_grad(set_to_none=True)
    state.global_step += 1
