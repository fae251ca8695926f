"""The training loop: a step is read here from top to bottom."""

from dataclasses import dataclass

from longtake import heartbeat
from longtake.data.ledger import Ledger
from longtake.data.loader import Loader
from longtake.errors import DivergedError
from longtake.guard.detectors import OK, GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.training.session import Session, TrainingState
from longtake.training.state import Monitors, save_checkpoint
from longtake.training.statistics import local_facts, reduce_statistics
from longtake.training.step import (
    apply_update,
    compute_gradients,
    drop_undecodable,
    seed_step,
    skip_update,
)

_LAST_UPDATE_LOST = (
    "The update of step {step} has left numbers in the weights that are not finite, so they were "
    "not saved. Start the same command again: it resumes from the newest checkpoint. If that ends "
    "here again, lower optimizer.learning_rate in a run of its own (--fresh)."
)


@dataclass(frozen=True)
class LoopExit:
    """Why the loop was left."""

    signal: str | None = None
    """The signal by which a rank was asked to stop; all is saved."""
    verdict: GuardVerdict = OK
    """`roll_back` or `stop`: the guard found that training cannot continue from here."""
    statistics: StepStatistics | None = None
    """Those of the step with that verdict."""


def train_steps(
    session: Session, state: TrainingState, loader: Loader, ledger: Ledger, monitors: Monitors
) -> LoopExit:
    """Train until the recipe's last step, the end of the data, or a request to stop.

    Raises:
        DataError: too many clips failed to decode.
        CheckpointError: two checkpoints in a row could not be written.
        DivergedError: the last update left NaN or inf in the weights.
        RunError: another launch has taken the run over.
    """
    recipe, world = session.recipe, session.world
    guard, norms, saver = monitors.guard, monitors.norms, monitors.saver
    recorder = monitors.recorder
    end = loader.end_after(recipe.training.steps - state.global_step)
    for local_batch in recorder.timed(loader.batches(end)):
        monitors.lease.refuse_loss()
        heartbeat.begin_step(state.global_step, str(local_batch.bucket))
        batch = drop_undecodable(local_batch, world)
        seed_step(recipe.seed, state.global_step, world.rank)
        with monitors.peak.of_step(batch):
            losses = compute_gradients(session, state, batch)  # forward, backward, accumulate
        recorder.memory(batch, monitors.peak.comparison)

        local = local_facts(loader, monitors.stop.reason, saver.failed, saver.is_due)
        summary = reduce_statistics(session, losses, batch, state, norms, local)  # one all-reduce
        statistics = summary.statistics
        if summary.num_troubles:
            recorder.data_troubles(batch, loader)

        has_samples = bool(statistics.num_samples)  # else there is nothing to learn or to judge
        verdict = guard.judge(statistics, losses, batch) if has_samples else OK  # on every rank
        is_allowed = guard.allows(verdict)
        if verdict.kind != "ok":
            saver.wait()  # so that the report names the newest checkpoint
            verdict, report = guard.report(verdict, statistics, losses, state)
            recorder.verdict(verdict, statistics, report, acts=not is_allowed)

        learning_rate = 0.0
        if is_allowed and has_samples:
            with norms.track_update():  # clip, optimizer, EMA
                learning_rate = apply_update(session, state, statistics.grad_norm, summary.scale)
        else:
            skip_update(state)
        if has_samples:
            recorder.step_done(batch, statistics, None if is_allowed else verdict, learning_rate)
        ledger.record(batch)
        if verdict.kind in ("roll_back", "stop") and not is_allowed:
            return LoopExit(verdict=verdict, statistics=statistics)

        recorder.saved(saver.finished())
        if summary.save_failed:
            _tolerate_one_failed_save(monitors)
        is_last = summary.stop is not None or loader.step == end
        if is_last or summary.save_due or state.global_step % recipe.checkpoint.every == 0:
            ledger.flush()
            if norms.all_finite(world):  # else the next step's verdict reports it
                save_checkpoint(session, state, loader, monitors)
            elif is_last:
                raise DivergedError(_LAST_UPDATE_LOST.format(step=state.global_step))
        heartbeat.end_step(losses.compute_seconds)
        if summary.stop is not None:
            return LoopExit(signal=summary.stop)
    return LoopExit()


def _tolerate_one_failed_save(monitors: Monitors) -> None:
    """Record a failed save and retry at the next checkpoint; raise at the second in a row."""
    failure = monitors.saver.take_failure()
    monitors.recorder.save_failed(failure)
    if failure is not None and monitors.saver.failures_in_a_row > 1:
        raise failure
