"""Forgets checkpoints of a mirror that are evaluated."""

from collections.abc import Collection

from longtake.checkpoint.deletion import take_away_unless_needed
from longtake.run_dir import RunDirectory


def no_longer_needed(steps: Collection[int], needed: Collection[int]) -> list[int]:
    """Which checkpoints of a mirror may go: neither needed nor the newest; pure."""
    return sorted({*steps} - {*needed} - {max(steps, default=0)})


def prune(mirror: RunDirectory, needed: Collection[int]) -> list[int]:
    """Delete the checkpoints of a mirror that may go, but for those that a server needs.

    Args:
        mirror: of a run.
        needed: steps that are still to be evaluated.

    Returns:
        The steps that are gone.

    Raises:
        OSError: one cannot be renamed.
    """
    going = no_longer_needed(mirror.checkpoint_steps(), needed)
    return [step for step in going if take_away_unless_needed(mirror, step)]
