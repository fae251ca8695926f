"""Deletes checkpoints that nobody needs: each is renamed away as a whole, then deleted.

What evaluation servers need stands in their heartbeats; see `needed_steps`.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from longtake.evaluation_dir import all_servers
from longtake.fsio import remove_tree
from longtake.run_dir import RunDirectory

STALE_SECONDS = 900.0
"""The heartbeat of a dead server counts until it is so much older than the newest COMMITTED."""


def needed_steps(run: RunDirectory) -> set[int]:
    """Steps that evaluation servers need: `needs` in their heartbeats, if these are fresh.

    Freshness compares two times of the same file system: that of a heartbeat and that of the newest
    COMMITTED. A heartbeat that cannot be read needs nothing.
    """
    oldest = _newest_commit_seconds(run) - STALE_SECONDS
    needed: set[int] = set()
    with suppress(OSError):
        for server in all_servers(run):
            with suppress(OSError):
                is_fresh = server.heartbeat_path.stat().st_mtime > oldest
                heartbeat = server.read_heartbeat() if is_fresh else None
                needed |= set(heartbeat["needs"]) if heartbeat else set()
    return needed


def delete(paths: Iterable[Path]) -> None:
    """Delete checkpoints; readers see each whole or not at all."""
    for path in paths:
        with suppress(OSError):
            remove_tree(take_away(path))


def delete_unless_needed(run: RunDirectory, step: int) -> bool:
    """Delete a checkpoint unless a server needs it or it cannot be deleted; whether it is gone."""
    try:
        return take_away_unless_needed(run, step)
    except OSError:
        return False


def take_away_unless_needed(run: RunDirectory, step: int) -> bool:
    """Delete a checkpoint unless a server needs it; whether it is gone.

    A server first writes that it needs a checkpoint, then looks whether it is there. So this looks
    at the needs again after it has renamed the checkpoint, and renames it back if it is needed now.
    A server that writes later finds it gone.

    Raises:
        OSError: it cannot be renamed.
    """
    if step in needed_steps(run):
        return False
    path = run.checkpoint_path(step)
    try:
        hidden = take_away(path)
    except FileNotFoundError:  # another process deleted it
        return True
    if step in needed_steps(run):
        hidden.rename(path)
        return False
    remove_tree(hidden)
    return True


def take_away(path: Path) -> Path:
    """Rename a checkpoint to a name that no reader looks at, and return that.

    Raises:
        OSError: it cannot be renamed.
    """
    hidden = path.with_name(f".{path.name}.deleted")
    remove_tree(hidden)  # left by a deletion that was interrupted
    return path.rename(hidden)


def _newest_commit_seconds(run: RunDirectory) -> float:
    """When the newest checkpoint was committed, by the files' times; 0 if there is none."""
    times = []
    for path in run.checkpoints_path.glob("step_*/COMMITTED"):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)
