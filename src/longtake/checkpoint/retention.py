"""Which checkpoints may go; pure."""

from collections.abc import Collection, Iterable


def doomed(
    steps: Collection[int],
    *,
    keep: int,
    keep_every: int | None,
    needed: Iterable[int],
    reach: int,
) -> list[int]:
    """Steps whose checkpoints nobody needs any more, ascending.

    Args:
        steps: those of all whole checkpoints.
        keep: how many of the newest stay.
        keep_every: every multiple of it stays.
        needed: steps that evaluation servers need.
        reach: how many steps before the newest one a rollback must be able to go; 0 for none. The
            newest checkpoint that is that old stays, and so does the one that will take its place.
    """
    ascending = sorted(steps)
    kept = {*ascending[-keep:], *needed, *_rollback_targets(ascending, reach)}
    if keep_every is not None:
        kept |= {step for step in ascending if step % keep_every == 0}
    return [step for step in ascending if step not in kept]


def _rollback_targets(ascending: list[int], reach: int) -> list[int]:
    """The newest that is old enough, and the oldest that is not.

    Without the second the first would have no successor: few of the newest are kept long enough
    to become old, and the run could only go back to where it began.
    """
    if not reach or not ascending:
        return []
    border = ascending[-1] - reach
    old = [step for step in ascending if step <= border]
    young = [step for step in ascending if step > border]
    return [*old[-1:], *young[:1]]
