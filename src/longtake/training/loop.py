"""The training loop: read it from top to bottom, that is all there is."""

from dataclasses import dataclass

from longtake import heartbeat
from longtake.checkpoint.store import Saver
from longtake.config import Recipe
from longtake.data.ledger import Ledger
from longtake.data.loader import Loader
from longtake.errors import DivergedError
from longtake.guard.detectors import OK, GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.parallel.mesh import World
from longtake.process import StopSignal
from longtake.training.agree import agreed
from longtake.training.diverged import explained
from longtake.training.gauge import Gauge
from longtake.training.guarding import Guard
from longtake.training.peak import PeakCheck
from longtake.training.randomness import seed_step
from longtake.training.record import Record
from longtake.training.resume import save_checkpoint
from longtake.training.run_lease import RunLease
from longtake.training.saved import facts_to_save
from longtake.training.statistics import local_facts, reduce_facts
from longtake.training.step import TrainingState, apply_update, compute_gradients, skip_update

_LOST_AT_THE_END = (
    "The update of step {step} has left numbers in the weights that are not finite, so they were "
    "not saved. Start the same command again: it goes on from the newest checkpoint. If that ends "
    "here again, lower optimizer.learning_rate in a run of its own (--fresh)."
)


@dataclass(frozen=True)
class Ending:
    """Why the loop was left."""

    signal: str | None = None
    """By it someone asked a rank to stop, and all is saved."""
    verdict: GuardVerdict = OK
    """`roll_back` or `stop`: the guard found that it cannot go on from here."""
    statistics: StepStatistics | None = None
    """Those of the step that was judged so."""


@dataclass(frozen=True)
class Watch:
    """What looks after a run's steps."""

    guard: Guard
    gauge: Gauge
    saver: Saver
    record: Record
    peak: PeakCheck
    stop: StopSignal
    lease: RunLease


def train_steps(
    state: TrainingState,
    loader: Loader,
    ledger: Ledger,
    watch: Watch,
    recipe: Recipe,
    world: World,
) -> Ending:
    """Train until the recipe's last step, the end of the data, or until someone asks to stop.

    Raises:
        DataError: too many clips failed to decode.
        CheckpointError: checkpoints cannot be written.
        RunError: another launch has taken the run over.
    """
    guard, gauge, saver, record = watch.guard, watch.gauge, watch.saver, watch.record
    end = loader.end_after(recipe.training.steps - state.global_step)
    for own_batch in record.timed(loader.batches(end)):
        watch.lease.refuse_loss()
        heartbeat.begin_step(state.global_step, str(own_batch.bucket))
        batch = agreed(own_batch, world)
        seed_step(recipe.seed, state.global_step, world.rank)
        with watch.peak.of_step(batch):
            samples = compute_gradients(state, batch, recipe, world)
        record.memory(batch, watch.peak.comparison)
        local = local_facts(
            loader,
            stop=watch.stop.reason,
            save_failed=saver.failed,
            save_due=saver.is_due,
        )
        facts = reduce_facts(samples, batch, state, gauge, local, recipe, world)
        if facts.num_troubles:
            record.data_troubles(batch, loader)
        verdict, learning_rate = OK, 0.0
        if facts.statistics.num_samples:  # else there is nothing to learn from, or to judge
            verdict = guard.judge(facts.statistics, samples, batch)
        is_allowed = guard.allows(verdict)
        if verdict.kind != "ok":
            saver.wait()  # so that the report names the newest checkpoint
            verdict = explained(verdict, facts.statistics, samples, state, world)
            report = guard.report(verdict, facts.statistics)
            record.verdict(verdict, facts.statistics, report, acts=not is_allowed)
        if is_allowed and facts.statistics.num_samples:
            with gauge.of_update():
                learning_rate = apply_update(state, recipe, facts.statistics.grad_norm, facts.scale)
        else:
            skip_update(state)
        if facts.statistics.num_samples:
            left_out = None if is_allowed else verdict
            record.step_done(batch, facts.statistics, left_out, learning_rate)
        ledger.record(batch)
        if verdict.kind in ("roll_back", "stop") and not is_allowed:
            return Ending(verdict=verdict, statistics=facts.statistics)
        record.checkpoints(saver.finished())
        if facts.save_failed:
            _bear_a_failed_save(saver, record)
        is_last = facts.stop is not None or loader.step == end
        if is_last or facts.save_due or state.global_step % recipe.checkpoint.every == 0:
            ledger.flush()
            if gauge.is_sound(world):  # else the next step's verdict says so
                save_checkpoint(saver, state, facts_to_save(loader, guard, gauge, recipe, world))
            elif is_last:
                raise DivergedError(_LOST_AT_THE_END.format(step=state.global_step))
        heartbeat.end_step(samples.work_seconds)
        if facts.stop is not None:
            return Ending(signal=facts.stop)
    return Ending()


def _bear_a_failed_save(saver: Saver, record: Record) -> None:
    """Say that a checkpoint could not be written, and try again with the next; a second ends it."""
    failure = saver.take_failure()
    record.save_failed(failure)
    if failure is not None and saver.failures_in_a_row > 1:
        raise failure
