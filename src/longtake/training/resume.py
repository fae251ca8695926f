"""Restores a run from its checkpoints, to resume or roll it back: weights, EMA, data and guard."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict

from longtake import config, errors, fsio, heartbeat, process
from longtake.checkpoint import files, store
from longtake.data.ledger import damage as ledger_damage
from longtake.data.loader import Loader
from longtake.guard.rollback import RollBack, plan_rollback
from longtake.models.trainable import load_trained
from longtake.parallel import fsdp, mesh
from longtake.parallel.collectives import first_does, from_first
from longtake.run_dir import RolledBack, RunDirectory
from longtake.training.build import missing_vocabulary
from longtake.training.guard_runner import Decision, GuardRunner
from longtake.training.parts import Training
from longtake.training.saving import EMA, FLAT, SavedTrainer, state_parts
from longtake.training.session import Session, TrainingState
from longtake.training.statistics import NormStats

_NO_CHECKPOINT_SINCE_CHANGE = (
    "There is no checkpoint between the last change of the data and the beginning of the trouble, "
    "and it cannot go back beyond that change. Start a run of its own (--fresh), or make "
    "checkpoint.every smaller."
)


# --- Resume -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a launch resumes its run, or the run's beginning."""

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
    """Find the run's newest whole checkpoint, and set the loader to its step.

    Compares file sizes only; `restore` reads the files and checks checksums. All ranks must call
    it.

    Args:
        run: the run to resume; it need not exist.
        recipe: the run's recipe.
        loader: a loader at the first step; it is set to the checkpoint's step.
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

        def find_losses() -> None:
            # Missing files that training can do without.
            if (reason := ledger_damage(run.ledger_path)) is not None:
                run.append_event("ledger_damaged", step=step, reason=reason)
                warnings.append(f"{reason} Training resumes; `longtake data audit` proves nothing")
            warnings.extend(missing_vocabulary(run, recipe, loader))

        first_does(find_losses, world)
    return ResumePoint(path, trainer, tuple(warnings))


def _latest_not_rolled_back(
    run: RunDirectory, world: mesh.World, known: Mapping[Path, str]
) -> files.LatestCheckpoint:
    """Find a run's newest whole checkpoint, except those that a rollback has abandoned.

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
    """Return the step to which the run rolled back after this checkpoint was saved; None if not."""
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
    """Set a loader to a checkpoint's step; batches that rollbacks exclude are skipped."""
    # From the run and not from the checkpoint, which may be older than a rollback.
    for rolled_back in from_first(run.rollbacks(), world):
        loader.skip(*rolled_back["skipped"])
    if trainer is not None:
        loader.load_state_dict(trainer["data"])


# --- Roll back --------------------------------------------------------------------------------


def roll_back(training: Training, decision: Decision) -> None:
    """Roll a run back to a checkpoint from before a divergence, and exclude its batches.

    The rollback is recorded on disk before anything else changes, so that a run that is killed
    during it and resumed reaches the same state.

    Raises:
        DivergedError: the verdict is `stop`, or no rollback can help.
    """
    session, state, loader = training.session, training.state, training.loader
    verdict = decision.verdict
    run, world, from_step = session.run, session.world, state.global_step
    chosen: RollBack | str = ""
    if verdict.kind == "roll_back":
        chosen = _choose_checkpoint(training, decision)
    if isinstance(chosen, str):
        # The run cannot repair itself.
        facts: dict[str, Any] = {"reason": verdict.reason, "message": verdict.message}
        if world.is_first:
            run.append_event("diverged", step=from_step, **facts, why=chosen)
        look = f"Look at it: {process.command()} show {shlex.quote(str(run.path))}"
        sentences = filter(None, [verdict.message, chosen, f"{look} --around {from_step}"])
        raise errors.DivergedError(" ".join(sentences))
    heartbeat.set_phase("rollback")
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
    restore(session, path, state, training.guard, training.norms)
    training.recorder.rolled_back(verdict, chosen, from_step)


def _choose_checkpoint(training: Training, decision: Decision) -> RollBack | str:
    """Choose the checkpoint to roll back to, or return the reason why the run must stop.

    Every rank returns the same. A damaged checkpoint is replaced by an older one, but none from
    before the last change of the data can be used, since batches had other numbers then.
    """
    run, world = training.session.run, training.session.world
    version, verdict = training.loader.plan_history.plan.version, decision.verdict

    def plan() -> RollBack | str:
        steps = [step for step in run.checkpoint_steps() if _plan_version(run, step) == version]
        # Version 0 is the data that the run began with. There a missing checkpoint is reported by
        # `plan_rollback`.
        if version and not any(step <= verdict.began for step in steps):
            return _NO_CHECKPOINT_SINCE_CHANGE
        guard, before = training.guard, run.rollbacks()
        now = decision.statistics
        return plan_rollback(verdict, guard.history, now, steps, before, guard.settings)

    # Rank 0 decides: the other nodes' view of a shared disk may be older.
    chosen = from_first(plan() if world.is_first else "", world)
    if isinstance(chosen, str):
        return chosen
    found, damaged = store.latest_checkpoint(run, world, at_most=chosen.step)
    training.recorder.damaged(damaged, chosen.step)
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
