"""Saves, resumes, restores and rolls back a run: weights, optimizers, EMA, data and guard.

No random state is saved, because all random numbers follow from the recipe's seed.
"""

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired

from torch.distributed.checkpoint import state_dict

from longtake import config, errors, fsio, heartbeat, process
from longtake.checkpoint import files, store
from longtake.data.ledger import Ledger
from longtake.data.ledger import damage as ledger_damage
from longtake.data.loader import Loader
from longtake.data.plan_history import LoaderState
from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import HistoryColumns, StepStatistics
from longtake.guard.rollback import RollBack, plan_rollback
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel import fsdp, mesh
from longtake.parallel.collectives import first_does, from_first, sum_over_ranks
from longtake.parallel.replicas import ReplicaCheck
from longtake.run_dir import RolledBack, RunDirectory
from longtake.training.build import missing_vocabulary
from longtake.training.guard_runner import GuardRunner
from longtake.training.record import Recorder
from longtake.training.samples import TrainingSampler
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats, StepSummary, replicated_tensors
from longtake.training.threads import CpuThreads, SavedThreads

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
_NO_CHECKPOINT_SINCE_CHANGE = (
    "There is no checkpoint between the last change of the data and the beginning of the trouble, "
    "and it cannot go back beyond that change. Start a run of its own (--fresh), or make "
    "checkpoint.every smaller."
)


@dataclass(frozen=True)
class Monitors:
    """Objects that accompany the steps of a launch, such as guard, saver and recorder."""

    guard: GuardRunner
    norms: NormStats
    replicas: ReplicaCheck
    saver: store.Saver
    recorder: Recorder
    stop: process.StopSignal
    threads: CpuThreads
    sampler: TrainingSampler | None = None  # None unless `sampling.every` is set


class SavedTrainer(files.SampledTrainer):
    """Contents of trainer.json: everything to resume from except weights, EMA and optimizers."""

    data: LoaderState
    guard: HistoryColumns
    last_update: dict[str, float]
    num_rollbacks: fsio.Count
    threads: NotRequired[SavedThreads]


# --- Save -------------------------------------------------------------------------------------


def save_if_due(
    session: Session,
    state: TrainingState,
    loader: Loader,
    ledger: Ledger,
    monitors: Monitors,
    summary: StepSummary,
    is_last: bool,
    is_sampled: bool,
) -> None:
    """Save after the last step, on request and where the recipe says so; record earlier saves.

    Only a state is saved whose weights are finite and equal in all replicas. Otherwise the next
    step's verdict reports it, or, if there is no next step, this function raises.

    Raises:
        CheckpointError: two checkpoints in a row could not be written.
        DivergedError: there is no next step, and this state cannot be saved.
    """
    monitors.recorder.saved(monitors.saver.finished())
    if summary.save_failed:
        failure = monitors.saver.take_failure()
        monitors.recorder.save_failed(failure)
        if failure is not None and monitors.saver.failures_in_a_row > 1:
            raise failure  # a full disk may be transient: one failed save is only recorded
    ends = is_last or summary.stop is not None
    is_due = summary.save_due or state.global_step % session.recipe.checkpoint.every == 0
    if not (ends or is_due or is_sampled):
        return
    # Before the checkpoint: no saved step may lack its batches in the ledger.
    ledger.flush()
    tensors, step = replicated_tensors(state), state.global_step
    is_finite = monitors.norms.all_finite(session.world)
    if is_finite and not (unlike := monitors.replicas.compare(tensors, step)):
        save_checkpoint(session, state, loader, monitors)
    elif ends and is_finite:
        reason = monitors.replicas.explain(unlike, tensors, step)
        raise errors.DivergedError(f"{reason} {_LAST_STATE_UNLIKE}")
    elif ends:
        raise errors.DivergedError(_LAST_UPDATE_LOST.format(step=step))


def save_checkpoint(
    session: Session, state: TrainingState, loader: Loader, monitors: Monitors
) -> None:
    """Start to save everything that the next step and its verdict depend on.

    Returns when the state may change again; the saver reports later how the save ended. Frozen
    weights are not saved. All ranks must call it.
    """
    trainer = {
        "global_step": state.global_step,
        "precision": session.precision,
        "world_size": session.world.size,
        "data": loader.state_dict(),
        "guard": monitors.guard.history.as_json(),
        "last_update": sum_over_ranks(monitors.norms.last_update(), session.world),
        # A later rollback to an earlier step abandons this checkpoint: see `_rolled_back_to`.
        "num_rollbacks": len(session.run.rollbacks()),
        "threads": monitors.threads.state(),
        "recipe": recipe_fingerprint(session.recipe),
    }
    monitors.saver.save(state.global_step, state_parts(state), trainer)


def state_parts(state: TrainingState) -> dict[str, store.State]:
    """Return the tensors to save, by folder of the checkpoint; they share memory with the state."""
    model = state.components.model
    averages = {f"{EMA}/{name}": each for name, each in state.ema.states().items()}
    with fsdp.gradients_of_any_dtype(model):
        optimizer = state_dict.get_optimizer_state_dict(model, state.optimizers, options=FLAT)
    return {"model": trained_state(model), **averages, "optimizer": optimizer}


def recipe_fingerprint(recipe: config.Recipe) -> str:
    return hashlib.sha256(config.dump(config.kept(recipe)).encode()).hexdigest()


def sample_presets(state: TrainingState, monitors: Monitors) -> None:
    """Sample presets from this step's checkpoint, once it is complete; all ranks must call it."""
    if monitors.sampler is not None:
        with monitors.recorder.between_steps():
            monitors.saver.wait()
            heartbeat.set_phase("sampling")
            monitors.sampler.sample(state, monitors.recorder, monitors.stop)


# --- Resume -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a launch resumes from, or the run's beginning."""

    path: Path | None  # whole checkpoint; None: the first step
    trainer: SavedTrainer | None  # contents of its trainer.json
    warnings: tuple[str, ...]

    @property
    def step(self) -> int:
        return 0 if self.trainer is None else int(self.trainer["global_step"])


def find_resume_point(
    run: RunDirectory,
    recipe: config.Recipe,
    loader: Loader,
    world: mesh.World,
    known: Mapping[Path, str] = files.NOTHING_KNOWN,
) -> ResumePoint:
    """Find the run's newest whole checkpoint and set the loader to its step.

    Compares file sizes only; `restore` reads the files and checks checksums. All ranks must call
    it.

    Args:
        run: to resume; it need not exist.
        recipe: of the run.
        loader: at the first step; it is set to the checkpoint's.
        world: the ranks.
        known: damage that `restore` found, by checkpoint.

    Raises:
        CheckpointError: the run has checkpoints, and all are damaged.
    """
    path, damaged = _latest_not_rolled_back(run, world, known)
    if path is None and damaged:
        newest, reason = damaged[0]
        raise errors.CheckpointError(
            f"{run.path} has {len(damaged)} checkpoints, and not one of them is whole; of the "
            f"newest, {newest.name}, {reason}. Restore one, or start anew beside this run with "
            "--fresh."
        )
    trainer = None if path is None else files.load_trainer(path, SavedTrainer)
    _restore_data(loader, trainer, run, world)
    step = 0 if trainer is None else trainer["global_step"]
    first_does(lambda: files.refuse_dangling_links(run, step), world)
    if world.is_first:
        for each, reason in damaged:
            run.append_event("checkpoint_damaged", step=step, path=each.name, reason=reason)
    warnings = [
        f"{files.describe_damage(each, reason)}; training resumes from step {step}"
        for each, reason in damaged
    ]
    if trainer is not None:
        first_does(lambda: warnings.extend(_find_losses(run, recipe, loader, step)), world)
    return ResumePoint(path, trainer, tuple(warnings))


def _find_losses(run: RunDirectory, recipe: config.Recipe, loader: Loader, step: int) -> list[str]:
    """Record and describe missing files that training can do without (rank 0)."""
    lost: list[str] = []
    if (reason := ledger_damage(run.ledger_path)) is not None:
        run.append_event("ledger_damaged", step=step, reason=reason)
        lost.append(f"{reason} Training resumes; `longtake data audit` proves nothing")
    return [*lost, *missing_vocabulary(run, recipe, loader)]


def _latest_not_rolled_back(
    run: RunDirectory, world: mesh.World, known: Mapping[Path, str]
) -> files.LatestCheckpoint:
    """Find the newest whole checkpoint of a state that no rollback has abandoned.

    Deletes abandoned checkpoints, which exist if a run was killed while it rolled back. All ranks
    must call it.
    """
    found = store.latest_checkpoint(run, world, checksums=False, known=known)
    while (back_to := _rolled_back_to(found.path, run, world)) is not None:
        abandoned = found.path
        first_does(partial(files.delete_after, run, back_to), world)
        found = store.latest_checkpoint(run, world, checksums=False, known=known)
        if found.path == abandoned:  # deleting it failed without an error
            raise errors.CheckpointError(
                f"{abandoned} was given up when the run went back to step {back_to}, and cannot be "
                f"deleted. Make {run.checkpoints_path} writable and start the same command again."
            )
    return found


def _rolled_back_to(path: Path | None, run: RunDirectory, world: mesh.World) -> int | None:
    """Return the step to which the run rolled back after a checkpoint was saved; None if not."""
    if path is None:
        return None
    known = files.load_trainer(path, SavedTrainer)["num_rollbacks"]
    # Later rollbacks than those that the checkpoint knows of.
    since = from_first(run.rollbacks(), world)[known:]
    steps = (rolled_back["to_step"] for rolled_back in since)
    return next((step for step in steps if step < run.step_of(path)), None)


# --- Restore ----------------------------------------------------------------------------------


def restore(
    session: Session, path: Path, state: TrainingState, guard: GuardRunner, norms: NormStats
) -> None:
    """Restore training state, guard and norms from a checkpoint; all ranks must call it.

    Both resuming and rolling back use it, so the present state may be of any step.

    Raises:
        DamagedCheckpointError: on every rank; the state is unusable then.
    """
    trainer = files.load_trainer(path, SavedTrainer)
    model = state.components.model
    # Gradients of the abandoned step would take memory while the checkpoint is read.
    model.zero_grad(set_to_none=True)
    parts = state_parts(state)
    store.load_parts(path, parts, session.world)
    load_trained(model, parts["model"])
    state.ema.load({name: parts[f"{EMA}/{name}"] for name in state.ema.states()})
    with fsdp.gradients_of_any_dtype(model):
        state_dict.set_optimizer_state_dict(
            model, state.optimizers, parts["optimizer"], options=FLAT
        )
    state.global_step = trainer["global_step"]
    guard.load(trainer["guard"])
    # The next step is judged by the update before it, which is not made again.
    norms.set_last_update(trainer["last_update"], session.world.size)


def _restore_data(
    loader: Loader, trainer: SavedTrainer | None, run: RunDirectory, world: mesh.World
) -> None:
    """Set a loader to a checkpoint's step, without the batches that rollbacks exclude."""
    for rolled_back in from_first(run.rollbacks(), world):
        loader.skip(*rolled_back["skipped"])
    if trainer is not None:
        loader.load_state_dict(trainer["data"])


# --- Roll back --------------------------------------------------------------------------------


def roll_back(
    session: Session,
    verdict: GuardVerdict,
    statistics: StepStatistics,
    state: TrainingState,
    loader: Loader,
    monitors: Monitors,
) -> None:
    """Return to a checkpoint from before the trouble, and exclude the batches that it came with.

    The rollback is recorded on disk before anything else changes, so that a run that is killed
    during it and resumed reaches the same state.

    Raises:
        DivergedError: the verdict is `stop`, or no rollback can help.
    """
    run, world = session.run, session.world
    chosen: RollBack | str = ""
    if verdict.kind == "roll_back":
        chosen = _choose_checkpoint(session, verdict, statistics, loader, monitors)
    if isinstance(chosen, str):
        raise _diverged(session, verdict, chosen, state.global_step)
    heartbeat.set_phase("rollback")
    from_step = state.global_step
    record = RolledBack(
        time=fsio.now(),
        from_step=from_step,
        to_step=chosen.step,
        skipped=list(chosen.skipped),
        reason=verdict.reason,
        message=verdict.message,
    )
    first_does(lambda: run.append_rollback(record), world)
    # After the record: a resumed run deletes what is left of the abandoned checkpoints.
    first_does(partial(files.delete_after, run, chosen.step), world)
    path = run.checkpoint_path(chosen.step)
    _restore_data(loader, files.load_trainer(path, SavedTrainer), run, world)
    restore(session, path, state, monitors.guard, monitors.norms)
    monitors.recorder.rolled_back(verdict, chosen, from_step)


def _choose_checkpoint(
    session: Session,
    verdict: GuardVerdict,
    statistics: StepStatistics,
    loader: Loader,
    monitors: Monitors,
) -> RollBack | str:
    """Choose the checkpoint to return to, or return the reason why the run can only stop.

    Every rank returns the same. A damaged checkpoint is replaced by an older one, but none from
    before the last change of the data can be used, since batches had other numbers then.
    """
    run, world = session.run, session.world
    version = loader.plan_history.plan.version

    def plan() -> RollBack | str:
        steps = [step for step in run.checkpoint_steps() if _plan_version(run, step) == version]
        if version and not any(step <= verdict.began for step in steps):
            return _NO_CHECKPOINT_SINCE_CHANGE
        guard, before = monitors.guard, run.rollbacks()
        return plan_rollback(verdict, guard.history, statistics, steps, before, guard.settings)

    # Rank 0 decides: the other nodes' view of a shared disk may be older.
    chosen = from_first(plan() if world.is_first else "", world)
    if isinstance(chosen, str):
        return chosen
    found, damaged = store.latest_checkpoint(run, world, at_most=chosen.step)
    monitors.recorder.damaged(damaged, chosen.step)
    if found is None or from_first(_plan_version(run, run.step_of(found)), world) != version:
        return f"Every checkpoint that it could go back to, up to {chosen.step}, is damaged."
    return replace(chosen, step=run.step_of(found))


def _plan_version(run: RunDirectory, step: int) -> int | None:
    """Return the version of the data plan in a checkpoint; None if it cannot be read."""
    try:
        trainer = files.load_trainer(run.checkpoint_path(step), SavedTrainer)
    except errors.CheckpointError:
        return None
    return trainer["data"]["plan_version"]


def _diverged(session: Session, verdict: GuardVerdict, why: str, step: int) -> errors.DivergedError:
    """Record that a run cannot repair itself, and return the error that ends it."""
    run = session.run
    if session.world.is_first:
        facts: dict[str, Any] = {"reason": verdict.reason, "message": verdict.message, "why": why}
        run.append_event("diverged", step=step, **facts)
    look = f"{process.command()} show {shlex.quote(str(run.path))} --around {step}"
    return errors.DivergedError(
        " ".join(filter(None, [verdict.message, why, f"Look at it: {look}"]))
    )
