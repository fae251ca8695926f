"""The training loop, and a step from top to bottom: one wait for the device in each step."""

from dataclasses import dataclass

from longtake import errors, heartbeat
from longtake.data.ledger import Ledger
from longtake.data.loader import Loader
from longtake.guard import detectors, history
from longtake.training.inputs import clips_not_encoded
from longtake.training.samples import samples_at
from longtake.training.session import Session, TrainingState
from longtake.training.state import Monitors, sample_presets, save_checkpoint
from longtake.training.statistics import local_facts, reduce_statistics, replicated_tensors
from longtake.training.step import (
    apply_update,
    compute_gradients,
    drop_undecodable,
    encode_ahead,
    seed_step,
    skip_update,
)

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
        ledger.record(batch.consumed)
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
