"""Deletes checkpoints, each out of sight as a whole before a file of it goes."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from longtake.checkpoint.holds import is_held
from longtake.fsio import remove_tree
from longtake.run_dir import RunDirectory


def delete(paths: Iterable[Path]) -> None:
    """Take each out of sight as a whole, so that no reader sees half of it, and delete it."""
    for path in paths:
        with suppress(OSError):
            remove_tree(take_away(path))


def delete_unless_held(run: RunDirectory, step: int) -> bool:
    """Delete a checkpoint, unless somebody needs it or it cannot be; whether it is gone."""
    try:
        return take_away_unless_held(run, step)
    except OSError:
        return False


def take_away_unless_held(run: RunDirectory, step: int) -> bool:
    """Delete a checkpoint, unless somebody needs it; whether it is gone.

    Who needs it says so first and looks then whether it is there. So the holds are looked at once
    more when it is out of sight: whoever came before that gets it back, and who comes after that
    finds it gone.

    Raises:
        OSError: it cannot be renamed.
    """
    if is_held(run, step):
        return False
    path = run.checkpoint_path(step)
    try:
        hidden = take_away(path)
    except FileNotFoundError:  # somebody else did it
        return True
    if is_held(run, step):
        hidden.rename(path)
        return False
    remove_tree(hidden)
    return True


def take_away(path: Path) -> Path:
    """Rename a checkpoint to what no reader looks at; returns where it is now.

    Raises:
        OSError: it cannot be renamed.
    """
    hidden = path.with_name(f".{path.name}.deleted")
    remove_tree(hidden)  # left by a deletion that was interrupted
    return path.rename(hidden)
