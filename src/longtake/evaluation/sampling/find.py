"""Finds the run and the checkpoint that a path on the command line means."""

from pathlib import Path

from longtake.checkpoint import files
from longtake.errors import CheckpointError
from longtake.run_dir import RunDirectory


def find_run(path: Path) -> RunDirectory:
    """The run directory that a path is, or that has it as one of its checkpoints."""
    run = RunDirectory(path)
    if path.absolute().parent.name == "checkpoints" and not run.exists():
        return RunDirectory(path.absolute().parents[1])
    return run


def find_checkpoint(
    path: Path, step: int | None = None, part: str = ""
) -> tuple[RunDirectory, Path]:
    """The run and the checkpoint that a path means.

    Args:
        path: a run directory or one of its checkpoint folders.
        step: which checkpoint of a run; its newest by default.
        part: what of it has to be there; all of it by default.

    Raises:
        RunError: there is no run.
        CheckpointError: there is none, or not of that step.
    """
    run = find_run(path)
    if run.path != path:
        _refuse_checkpoint(path, run, step)
        return run, path
    run.recipe()  # refuses what is no run directory
    steps = run.checkpoint_steps()
    if step is not None and step not in steps:
        known = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise CheckpointError(
            f"{path} has no whole checkpoint of step {step}. Its checkpoints: {known}."
        )
    found = run.checkpoint_path(step) if step is not None else files.newest_whole(run, part)
    if found is None:
        raise CheckpointError(
            f"{path} has no whole checkpoint yet. Train on with {run.command_to_go_on()}, or wait "
            "for checkpoint.every steps or checkpoint.minutes."
        )
    return run, found


def _refuse_checkpoint(checkpoint: Path, run: RunDirectory, step: int | None) -> None:
    """Refuse one that is not there, or that a step is asked of."""
    if step is not None:
        raise CheckpointError(
            f"{checkpoint} is one checkpoint already. Leave --step {step} out, or name the run: "
            f"{run.path}."
        )
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"There is no checkpoint {checkpoint}. The run has those of the steps: "
            f"{run.checkpoint_steps() or 'none'}."
        )
