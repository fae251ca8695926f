"""Where a run goes back to, and what it skips then."""

from collections.abc import Sequence
from dataclasses import dataclass

from longtake.config import GuardSection
from longtake.guard.history import History
from longtake.guard.statistics import Statistics
from longtake.guard.verdict import Verdict
from longtake.run_dir import RolledBack


@dataclass(frozen=True)
class RollBack:
    """How a run goes back."""

    step: int
    """The checkpoint to load."""
    skipped: tuple[int, int]
    """[first, end): numbers of the batches that are not trained from then on."""


def plan_rollback(
    verdict: Verdict,
    history: History,
    now: Statistics,
    checkpoint_steps: Sequence[int],
    previous: Sequence[RolledBack],
    section: GuardSection,
) -> RollBack | str:
    """Where to go back to after a verdict; or why the run can only stop, for people.

    The newest checkpoint from before the trouble is taken, as that is the state to trust; and the
    batches from where it began to now are skipped with a margin, as nobody knows which of them it
    came with. Those between the checkpoint and the trouble are trained again.

    Args:
        verdict: `roll_back`.
        history: the steps before `now`; it may hold `now` as well.
        now: the step that was judged.
        checkpoint_steps: of all whole checkpoints; that of step s is what step s begins with.
        previous: the run's rollbacks before, the oldest first.
        section: of the recipe.
    """
    fruitless = _without_progress(verdict, now, previous, section)
    if fruitless >= section.max_rollbacks:
        return _gives_up(verdict, fruitless, previous, section)
    step = max((each for each in checkpoint_steps if each <= verdict.began), default=None)
    if step is None:
        return _nowhere(verdict, checkpoint_steps)
    margin = section.margin_batches
    first = max(_batch_of(step, history, now), _batch_of(verdict.began, history, now) - margin)
    return RollBack(step, (first, now.batch + margin + 1))


def _batch_of(step: int, history: History, now: Statistics) -> int:
    """Number of the batch of a step; what is not remembered is as far back in data as in steps."""
    known = history.batch_of(step)
    return now.batch - (now.step - step) if known is None else known


def _without_progress(
    verdict: Verdict, now: Statistics, previous: Sequence[RolledBack], section: GuardSection
) -> int:
    """How many rollbacks there were since the run last made progress."""
    count, furthest, reason = 0, 0, ""
    for rolled_back in previous:
        if _is_progress(rolled_back["from_step"], rolled_back["reason"], furthest, reason, section):
            count = 0
        count, reason = count + 1, rolled_back["reason"]
        furthest = max(furthest, rolled_back["from_step"])
    is_progress = _is_progress(now.step, verdict.reason, furthest, reason, section)
    return 0 if is_progress else count


def _is_progress(
    step: int, reason: str, furthest: int, reason_before: str, section: GuardSection
) -> bool:
    """Whether the run came far enough from one rollback to the next."""
    # What happens where epochs end happens again where the next one ends, however long it is.
    if reason == reason_before == "edge_step":
        return False
    return step >= furthest + section.progress_steps


def _gives_up(
    verdict: Verdict, count: int, previous: Sequence[RolledBack], section: GuardSection
) -> str:
    if not count:
        return "guard.max_rollbacks is 0, so the run does not go back but stops here."
    listed = ", ".join(
        f"from step {each['from_step']} to {each['to_step']} ({each['reason']})"
        for each in previous[-count:]
    )
    again = "at every edge" if verdict.reason == "edge_step" else "again"
    return (
        f"It has gone back {count} time{'s' * (count > 1)} without progress, {listed}, and the "
        f"trouble is there {again}: going back once more would not help. Look at the reports of "
        f"this run's guard, lower optimizer.learning_rate or leave out what these batches have in "
        "common; guard.max_rollbacks and guard.progress_steps say when it gives up."
    )


def _nowhere(verdict: Verdict, checkpoint_steps: Sequence[int]) -> str:
    there = ", ".join(map(str, sorted(checkpoint_steps)[:4])) or "none at all"
    return (
        f"The trouble began after step {verdict.began}, and there is no checkpoint from before it "
        f"(there are: {there}). Save more often (--set checkpoint.every=N, with checkpoint.keep "
        "large enough), or start with a lower optimizer.learning_rate or more "
        "optimizer.warmup_steps in a new folder (--set out=FOLDER)."
    )
