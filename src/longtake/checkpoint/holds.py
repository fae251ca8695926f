"""Who still needs a checkpoint: holds/step_00001000/<owner>, written by whoever reads it.

An owner writes its file again now and then. One that has not for long is dead, and its hold is
stale. How long is told by the one clock that all files of a run directory bear the times of: that
of their file system, which also says when the newest checkpoint became whole.
"""

from contextlib import suppress
from pathlib import Path

from longtake.fsio import is_linked
from longtake.run_dir import RunDirectory

STALE_SECONDS = 900.0
"""A hold that is so much older than the newest checkpoint is nobody's any more."""


def held_steps(run: RunDirectory) -> set[int]:
    """Steps whose checkpoints somebody still needs; deletes stale holds."""
    newest = _newest_seconds(run)
    return {step for step in run.held_steps() if _is_held(run, step, newest)}


def is_held(run: RunDirectory, step: int) -> bool:
    """Whether somebody still needs a checkpoint."""
    return _is_held(run, step, _newest_seconds(run))


def hold_path(run: RunDirectory, step: int, owner: str) -> Path:
    """Where the hold of an owner lies, whether there is one or not."""
    return run.holds_path / f"step_{step:08d}" / owner


def _is_held(run: RunDirectory, step: int, newest: float) -> bool:
    folder = hold_path(run, step, "*").parent
    if is_linked(folder, run.path):  # its files belong to something else: none may be deleted
        return False
    fresh = [_is_fresh(hold, newest) for hold in folder.glob("[!.]*")]
    return any(fresh)


def _is_fresh(hold: Path, newest: float) -> bool:
    try:
        if hold.lstat().st_mtime > newest - STALE_SECONDS:
            return True
    except OSError:  # given back this moment
        return False
    with suppress(OSError):
        hold.unlink()
    return False


def _newest_seconds(run: RunDirectory) -> float:
    """When the newest checkpoint became whole, by the clock of the files; 0 if none is."""
    times = []
    for path in run.checkpoints_path.glob("step_*/COMMITTED"):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)
