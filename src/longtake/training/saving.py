"""Saves checkpoints of a training: when to save, which states, and what trainer.json holds.

No random state is saved, because all random numbers follow from the recipe's seed.
"""

import hashlib
from typing import NotRequired

from torch.distributed.checkpoint import state_dict

from longtake import config, errors, fsio, heartbeat
from longtake.checkpoint import files, store
from longtake.data.ledger import Ledger
from longtake.data.plan_history import LoaderState
from longtake.guard.history import HistoryColumns
from longtake.models.trainable import trained_state
from longtake.parallel import fsdp
from longtake.parallel.collectives import sum_over_ranks
from longtake.training.exports import export_lora
from longtake.training.parts import Training
from longtake.training.session import TrainingState
from longtake.training.statistics import StepSummary, replicated_tensors
from longtake.training.threads import SavedThreads

# Flat names, so that the states of several optimizers are saved together and can be resharded.
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
EMA = "ema"
_LAST_UPDATE_LOST = (
    "The update of step {step} has left numbers in the weights that are not finite, so they were "
    "not saved. Start the same command again: it resumes from the newest checkpoint. If that ends "
    "here again, lower optimizer.learning_rate in a run of its own (--fresh)."
)
_LAST_STATE_UNLIKE = (
    "This state was not saved. Start the same command again: it resumes from the newest checkpoint."
)


class SavedTrainer(files.SampledTrainer):
    """Contents of a checkpoint's trainer.json: all state but weights, EMA and optimizers."""

    data: LoaderState
    guard: HistoryColumns
    last_update: dict[str, float]
    num_rollbacks: fsio.Count
    threads: NotRequired[SavedThreads]


def save_if_due(
    training: Training, ledger: Ledger, summary: StepSummary, *, is_last: bool, is_sampled: bool
) -> None:
    """Save a checkpoint if one is due: by the recipe, for samples, at a stop, or at the end.

    Saves that have completed since are recorded. Only a state is saved whose weights are finite and
    equal in all replicas. Otherwise a later step's verdict reports it, or, if there is no later
    step, this function raises.

    Raises:
        CheckpointError: two checkpoints in a row could not be written.
        DivergedError: there is no next step, and this state cannot be saved.
    """
    state, saver, replicas = training.state, training.saver, training.replicas
    training.recorder.saved(saver.finished())
    if summary.save_failed:
        failure = saver.take_failure()
        training.recorder.save_failed(failure)
        if failure is not None and saver.failures_in_a_row > 1:
            raise failure  # a full disk may be transient: one failed save is only recorded
    ends = is_last or summary.stop is not None
    section = training.session.recipe.checkpoint
    by_recipe = state.global_step % section.every == 0
    if section.every_epochs is not None and not is_last:
        by_recipe = _ends_epoch(training, summary.statistics.batch, section.every_epochs)
    if not (ends or summary.save_due or by_recipe or is_sampled):
        return
    # Before the checkpoint: no saved step may lack its batches in the ledger.
    ledger.flush()
    tensors, step = replicated_tensors(state), state.global_step
    is_finite = training.norms.all_finite(training.session.world)
    if is_finite and not (unlike := replicas.compare(tensors, step)):
        save_checkpoint(training)
        export_lora(training)
    elif ends and is_finite:
        reason = replicas.explain(unlike, tensors, step)
        raise errors.DivergedError(f"{reason} {_LAST_STATE_UNLIKE}")
    elif ends:
        raise errors.DivergedError(_LAST_UPDATE_LOST.format(step=step))


def is_sampled_after(training: Training, batch: int, *, is_last: bool) -> bool:
    """Return True if the recipe samples its presets after a batch, the newest that was trained.

    At step 0 no batch was trained.
    """
    section, step = training.session.recipe.sampling, training.state.global_step
    if not section.in_training or step == 0:
        return section.at_start
    if section.every is not None:
        return is_last or step % section.every == 0
    return is_last or _ends_epoch(training, batch, section.every_epochs or 1)


def _ends_epoch(training: Training, batch: int, every: int) -> bool:
    """Return True if a batch is the last of every n-th epoch of its stage, or of the stage.

    Called after the batch, when the loader is at the next one: batches between are skipped.
    """
    loader = training.loader
    if (end := loader.plan_history.end_step) is not None and loader.step >= end:
        return True
    (stage, epochs), (next_stage, next_epochs) = (
        loader.plan_history.epochs_before(step, loader.data.repeats)
        for step in (batch, loader.step)
    )
    return stage != next_stage or epochs // every != next_epochs // every


def save_checkpoint(training: Training) -> None:
    """Start to save a checkpoint: everything that the next step and its verdict depend on.

    Only the check for weights without gradient, in a run's first steps, counts anew after resuming.

    Returns when the state may change again; the saver reports later how the save ended. Frozen
    weights are not saved. All ranks must call it.
    """
    session, state = training.session, training.state
    kept_recipe = config.dump(config.kept(session.recipe))
    trainer = {
        "global_step": state.global_step,
        "precision": session.precision,
        "world_size": session.world.size,
        "data": training.loader.state_dict(),
        "guard": training.guard.history.as_json(),
        "last_update": sum_over_ranks(training.norms.last_update(), session.world),
        # A later rollback to an earlier step abandons this checkpoint: see `_rolled_back_to`.
        "num_rollbacks": len(session.run.rollbacks()),
        "threads": training.threads.state(),
        "recipe": hashlib.sha256(kept_recipe.encode()).hexdigest(),
    }
    training.saver.save(state.global_step, state_parts(state), trainer)


def state_parts(state: TrainingState) -> dict[str, store.State]:
    """Return a checkpoint's tensors by folder; they share memory with the training state."""
    model = state.components.model
    averages = {f"{EMA}/{name}": each for name, each in state.ema.states().items()}
    with fsdp.gradients_of_any_dtype(model):
        optimizer = state_dict.get_optimizer_state_dict(model, state.optimizers, options=FLAT)
    return {"model": trained_state(model), **averages, "optimizer": optimizer}


def sample_presets(training: Training) -> None:
    """Sample presets from this step's checkpoint, once it is complete; all ranks must call it."""
    if training.sampler is not None:
        with training.recorder.between_steps():
            # The key of a result is made from COMMITTED, which is written last.
            training.saver.wait()
            heartbeat.set_phase("sampling")
            training.sampler.sample(training.state, training.recorder, training.stop)
