"""Goes back to a checkpoint from before the trouble, and round the batches that it came with."""

from dataclasses import replace
from pathlib import Path

from longtake.checkpoint import files, store
from longtake.config import Recipe
from longtake.data.loader import Loader
from longtake.errors import CheckpointError
from longtake.fsio import now
from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.guard.rollback import RollBack, plan_rollback
from longtake.parallel.collectives import first_does, from_first
from longtake.parallel.mesh import World
from longtake.run_dir import RolledBack, RunDirectory
from longtake.training.gauge import Gauge
from longtake.training.guarding import Guard
from longtake.training.record import Record
from longtake.training.saved import SavedTrainer, go_on_from
from longtake.training.step import TrainingState


def choose(
    verdict: GuardVerdict,
    guard: Guard,
    statistics: StepStatistics,
    loader: Loader,
    record: Record,
    recipe: Recipe,
    run: RunDirectory,
    world: World,
) -> RollBack | str:
    """Where to go back to, the same on every rank; or why the run can only stop.

    A checkpoint that turns out to be damaged is no place to go back to; an older one may be. Nor
    is one from before the data changed: batches had other numbers then.
    """
    version = loader.course.plan.version

    def plan() -> RollBack | str:
        steps = [step for step in run.checkpoint_steps() if _plan_version(run, step) == version]
        if version and not any(step <= verdict.began for step in steps):
            return _SINCE_THE_CHANGE
        before = run.rollbacks()
        return plan_rollback(verdict, guard.history, statistics, steps, before, recipe.guard)

    chosen = from_first(plan() if world.is_first else "", world)
    if isinstance(chosen, str):
        return chosen
    found, damaged = store.latest_checkpoint(run, world, at_most=chosen.step)
    record.damaged(damaged, chosen.step)
    if found is None or from_first(_plan_version(run, run.step_of(found)), world) != version:
        return f"Every checkpoint that it could go back to, up to {chosen.step}, is damaged."
    return replace(chosen, step=run.step_of(found))


_SINCE_THE_CHANGE = (
    "There is no checkpoint between the last change of the data and the beginning of the trouble, "
    "and it cannot go back beyond that change. Start a run of its own (--fresh), or make "
    "checkpoint.every smaller."
)


def _plan_version(run: RunDirectory, step: int) -> int | None:
    """Which of the run's plans a checkpoint was trained by; None where it cannot be read."""
    try:
        trainer = files.load_trainer(run.checkpoint_path(step), SavedTrainer)
    except CheckpointError:
        return None
    return trainer["data"]["plan_version"]


def go_back(
    chosen: RollBack,
    verdict: GuardVerdict,
    state: TrainingState,
    loader: Loader,
    guard: Guard,
    gauge: Gauge,
    run: RunDirectory,
    world: World,
) -> None:
    """Put everything back to a checkpoint, and have the loader skip what is not to come again.

    That is on disk before anything is changed: a run that is killed from here on, and resumed,
    goes the same way.
    """
    record = RolledBack(
        time=now(),
        from_step=state.global_step,
        to_step=chosen.step,
        skipped=list(chosen.skipped),
        reason=verdict.reason,
        message=verdict.message,
    )
    first_does(lambda: run.append_rollback(record), world)
    _abandon(run, chosen.step, world)
    path = run.checkpoint_path(chosen.step)
    skip_batches(loader, run, world)
    loader.load_state_dict(files.load_trainer(path, SavedTrainer)["data"])
    go_on_from(path, state, guard, gauge, world)


def skip_batches(loader: Loader, run: RunDirectory, world: World) -> None:
    """Have a loader go round what rollbacks skip, wherever the run is resumed from."""
    for rolled_back in from_first(run.rollbacks(), world):
        loader.skip(*rolled_back["skipped"])


def newest_kept(run: RunDirectory, world: World) -> store.LatestCheckpoint:
    """The newest whole checkpoint of a state that no rollback gave up; all ranks call it.

    Others are deleted: they are there where a run was killed while it went back.

    Raises:
        CheckpointError: one of them cannot be deleted.
    """
    found = store.latest_checkpoint(run, world)
    while (back_to := _given_up(found.path, run, world)) is not None:
        given_up = found.path
        _abandon(run, back_to, world)
        found = store.latest_checkpoint(run, world)
        if found.path == given_up:
            raise CheckpointError(
                f"{given_up} was given up when the run went back to step {back_to}, and cannot be "
                f"deleted. Make {run.checkpoints_path} writable and start the same command again."
            )
    return found


def _given_up(path: Path | None, run: RunDirectory, world: World) -> int | None:
    """The step that the run went back to from beyond a checkpoint, after that was saved."""
    if path is None:
        return None
    known = files.load_trainer(path, SavedTrainer)["num_rollbacks"]
    since = from_first(run.rollbacks(), world)[known:]
    steps = (rolled_back["to_step"] for rolled_back in since)
    return next((step for step in steps if step < run.step_of(path)), None)


def _abandon(run: RunDirectory, after_step: int, world: World) -> None:
    first_does(lambda: files.delete_after(run, after_step), world)
