"""The training loop, and a step from top to bottom: one wait for the device in each step."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from longtake import errors, heartbeat
from longtake.data.ledger import Ledger
from longtake.data.loader import Batch, Loader
from longtake.data.order import derive
from longtake.data.stages import StagePosition
from longtake.guard import detectors, history
from longtake.models.build import flow_losses, losses_of_zero
from longtake.optim.update import learning_rate_factor, masters_of, set_learning_rates
from longtake.parallel import collectives, fsdp, mesh
from longtake.training.inputs import clips_not_encoded
from longtake.training.samples import samples_at
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.state import Monitors, sample_presets, save_checkpoint
from longtake.training.statistics import local_facts, reduce_statistics, replicated_tensors

_LAST_UPDATE_LOST = (
    "The update of step {step} has left numbers in the weights that are not finite, so they were "
    "not saved. Start the same command again: it resumes from the newest checkpoint. If that ends "
    "here again, lower optimizer.learning_rate in a run of its own (--fresh)."
)
_NOT_ENCODED = (
    "is encoded to {names} that are NaN or infinite; if other clips are too, the weights of the "
    "codec or text encoder are damaged, or their precision (codec.dtype, text.dtype) is too low"
)
_LAST_STATE_UNLIKE = (
    "This state was not saved. Start the same command again: it resumes from the newest checkpoint."
)


@dataclass(frozen=True)
class LoopExit:
    """Why the loop was left."""

    signal: str | None = None  # the signal by which a rank was asked to stop; all is saved
    verdict: detectors.GuardVerdict = detectors.OK
    """`roll_back` or `stop`: the guard found that training cannot continue from here."""
    statistics: history.StepStatistics | None = None  # those of the step with that verdict


def train_steps(
    session: Session, state: TrainingState, loader: Loader, ledger: Ledger, monitors: Monitors
) -> LoopExit:
    """Train until the recipe's last step, the end of the data, or a request to stop.

    Raises:
        DataError: too many clips failed to decode.
        CheckpointError: two checkpoints in a row could not be written.
        DivergedError: the last update left NaN or inf in the weights, or replicas unlike.
        RunError: another launch has taken the run over.
    """
    recipe, world = session.recipe, session.world
    guard, norms, saver = monitors.guard, monitors.norms, monitors.saver
    threads = monitors.threads
    recorder, replicas = monitors.recorder, monitors.replicas
    end = loader.end_after(recipe.training.steps - state.global_step)
    for local_batch in recorder.timed(loader.batches(end)):
        recorder.refuse_lost_lease()
        heartbeat.begin_step(state.global_step, str(local_batch.bucket))
        batch = drop_undecodable(local_batch, world)
        seed_step(recipe.seed, state.global_step, world.rank)
        with recorder.measured(batch), threads.measured(batch):
            losses = compute_gradients(session, state, batch)  # forward, backward, accumulate
            encode_ahead(session, state, loader)
            state.inputs.draw_ahead(loader)
        recorder.threads_chosen(state.global_step, threads.choice)

        local = local_facts(loader, monitors.stop.reason, saver.failed, saver.is_due)
        summary = reduce_statistics(  # one all-reduce
            session, losses, batch, state, norms, local, replicas
        )
        statistics = summary.statistics
        if summary.num_troubles:
            recorder.data_troubles(batch, loader)

        has_samples = bool(statistics.num_samples)  # else there is nothing to learn or to judge
        verdict, unlike = detectors.OK, ""
        if summary.unlike:
            unlike = replicas.explain(summary.unlike, replicated_tensors(state), statistics.step)
        if has_samples or unlike:
            verdict = guard.judge(statistics, losses, batch, unlike)  # on every rank
        if has_samples and verdict.kind == "ok":
            verdict = guard.judge_gradients(norms, batch, statistics)
        is_allowed = guard.allows(verdict)
        if verdict.kind != "ok":
            if verdict.reason == "non_finite":
                parts = state.components
                found = clips_not_encoded(batch, losses.losses, parts, recipe, world.device)
                for identity, names in found:  # the next step's summary tells all ranks
                    loader.fail(identity, _NOT_ENCODED.format(names=names))
            saver.wait()  # so that the report names the newest checkpoint
            verdict, report = guard.report(verdict, statistics, losses, state)
            recorder.verdict(verdict, statistics, report, acts=not is_allowed)

        learning_rate = 0.0
        if is_allowed and has_samples:
            with norms.track_update(state.optimizers):  # clip, optimizer, EMA
                learning_rate = apply_update(
                    session, state, statistics.grad_norm, summary.scale, batch.position
                )
        else:
            skip_update(state)
        if has_samples:
            recorder.step_done(batch, statistics, None if is_allowed else verdict, learning_rate)
        if losses.of_zero is not None:
            recorder.compare_with_zero(losses, batch)
        ledger.record(batch)
        if verdict.kind in ("roll_back", "stop") and not is_allowed:
            return LoopExit(verdict=verdict, statistics=statistics)

        recorder.saved(saver.finished())
        if summary.save_failed:
            failure = saver.take_failure()
            recorder.save_failed(failure)
            if failure is not None and saver.failures_in_a_row > 1:
                raise failure
        is_last = summary.stop is not None or loader.step == end
        is_sampled = samples_at(recipe.sampling, state.global_step, is_last=loader.step == end)
        is_due = summary.save_due or state.global_step % recipe.checkpoint.every == 0
        if is_last or is_due or is_sampled:
            ledger.flush()
            # Otherwise the next step's verdict reports it.
            tensors, step = replicated_tensors(state), state.global_step
            is_finite = norms.all_finite(world)
            if is_finite and not (alone := replicas.compare(tensors, step)):
                save_checkpoint(session, state, loader, monitors)
            elif is_last and is_finite:
                reason = replicas.explain(alone, tensors, step)
                raise errors.DivergedError(f"{reason} {_LAST_STATE_UNLIKE}")
            elif is_last:
                raise errors.DivergedError(_LAST_UPDATE_LOST.format(step=step))
        heartbeat.end_step(losses.compute_seconds)
        if summary.stop is not None:
            return LoopExit(signal=summary.stop)
        if is_sampled:
            sample_presets(state, monitors)
    return LoopExit()


# --- The parts of a step ----------------------------------------------------------------------


def drop_undecodable(batch: Batch, world: mesh.World) -> Batch:
    """Drop clips that another rank of the same context-parallel group could not decode.

    These ranks decode the same clips independently. All ranks call it.
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
    weights = [min(of_one_place) for of_one_place in zip(*weights_of_ranks, strict=True)]
    rejected = dict.fromkeys(sample for samples in rejected_of_ranks for sample in samples)
    return replace(batch, weights=torch.tensor(weights), rejected=tuple(rejected))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators from the step, such as for dropout.

    So there is no random state to save: a resumed run draws what it would have drawn, on the same
    number of processes.
    """
    number = derive("step", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)  # an older generator, but a user's module may use it
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes ten times as long
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)


def compute_gradients(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
    """Accumulate the gradients of this rank's share of a batch.

    They are those of the sum of all ranks' weighted losses over the batch's global size; a stand-in
    for a missing clip has weight 0.
    """
    world, components = session.world, state.components
    model, blocks = components.model, components.family.blocks(components.model)
    size = _micro_batch_size(session, batch)
    count = -(-len(batch.seeds) // size)
    share = batch.global_size / world.data_size  # ranks average gradients
    timer, found, sigmas = ComputeTimer(world.device), list[Tensor](), list[float]()
    captioned, of_zero = list[bool](), list[Tensor]()
    is_compared = state.global_step == 0 and session.recipe.model.pretrained is not None
    micro_batches = state.inputs.micro_batches(batch, size)
    for number in range(1, count + 1):
        fsdp.set_gradient_sync(model, wanted=number == count)
        heartbeat.set_phase("forward")
        with timer.measure():
            part = next(micro_batches)
            losses = flow_losses(components, part.examples, session.precision, world.device)
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


def _micro_batch_size(session: Session, batch: Batch) -> int:
    stage = session.recipe.data.stage(batch.stage)
    return session.recipe.micro_batch_size(stage, batch.bucket, session.world.data_size)


def encode_ahead(session: Session, state: TrainingState, loader: Loader) -> None:
    """Begin to encode the next batch's first micro-batch, while the device computes this batch."""
    if state.inputs.encodes_ahead:
        batch = loader.decoded_next()
        size = 1 if batch is None else _micro_batch_size(session, batch)
        state.inputs.encode_ahead(batch, size)


class ComputeTimer:
    """Adds up how long this rank computes without waiting for others, to identify slow ranks.

    Only the forward pass is measured: all other parts of a step end in waiting for other ranks. If
    the model is sharded the forward pass does too, and the time tells less.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the block, as the device takes it."""
        if not self._is_cuda:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
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
    """Update weights and EMA from the gradients, and drop these; returns the learning rate.

    `scale`, the batch's global size over the number of samples that were trained, makes the
    gradients those of the mean loss; `grad_norm` is the norm of those, over all ranks.
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
