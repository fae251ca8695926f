"""Plans a rollback: which checkpoint to restore and which batches to skip."""

from collections.abc import Sequence
from dataclasses import dataclass

from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import GuardSettings, History, StepStatistics
from longtake.run_dir import RolledBack


@dataclass(frozen=True)
class RollBack:
    """A rollback: the checkpoint to restore, and the batches to skip afterwards."""

    step: int  # step of the checkpoint to restore
    skipped: tuple[int, int]  # half-open range of batch numbers to skip


def plan_rollback(
    verdict: GuardVerdict,
    history: History,
    now: StepStatistics,
    checkpoint_steps: Sequence[int],
    previous: Sequence[RolledBack],
    settings: GuardSettings,
) -> RollBack | str:
    """Choose the checkpoint to restore and the batches to skip, or explain why the run must stop.

    The checkpoint is the newest from before the divergence. The batches from the divergence to now
    are skipped, with a margin, since any of them may be the cause; batches between the checkpoint
    and the divergence are trained again. If replicas differ, no batch is skipped.

    Args:
        verdict: `roll_back`.
        history: steps before `now`, which it may include.
        now: the judged step.
        checkpoint_steps: steps of all whole checkpoints; step s is the state before step s.
        previous: earlier rollbacks of the run, oldest first.
        settings: the guard's settings.

    Returns:
        A rollback, or a message for the user.
    """
    fruitless, furthest, reason = 0, 0, ""  # fruitless: rollbacks since the run last made progress
    for each in previous:
        if _is_progress(each["from_step"], each["reason"], furthest, reason, settings):
            fruitless = 0
        fruitless, reason = fruitless + 1, each["reason"]
        furthest = max(furthest, each["from_step"])
    if _is_progress(now.step, verdict.reason, furthest, reason, settings):
        fruitless = 0
    if fruitless >= settings.max_rollbacks:
        return _explain_limit(verdict, fruitless, previous)
    step = max((each for each in checkpoint_steps if each <= verdict.began), default=None)
    if step is None:
        return _explain_no_checkpoint(verdict, checkpoint_steps)
    if verdict.reason == "replicas":  # no batch is the cause
        return RollBack(step, (now.batch, now.batch))
    margin = settings.margin_batches
    # Batches before `began` are suspect too, but not those before the restored step.
    first = max(_batch_of(step, history, now), _batch_of(verdict.began, history, now) - margin)
    return RollBack(step, (first, now.batch + margin + 1))


def _batch_of(step: int, history: History, now: StepStatistics) -> int:
    known = history.batch_of(step)
    # The history may not reach back so far. Steps and batch numbers then count in parallel, which
    # is off only by batches that were skipped in between.
    return now.batch - (now.step - step) if known is None else known


def _is_progress(
    step: int, reason: str, furthest: int, reason_before: str, settings: GuardSettings
) -> bool:
    # A jump at the end of an epoch recurs at the next end, even if epochs are long.
    if reason == reason_before == "edge_step":
        return False
    return step >= furthest + settings.progress_steps


def _explain_limit(verdict: GuardVerdict, count: int, previous: Sequence[RolledBack]) -> str:
    if not count:
        return "guard.max_rollbacks is 0, so the run does not roll back but stops here."
    listed = ", ".join(
        f"from step {each['from_step']} to {each['to_step']} ({each['reason']})"
        for each in previous[-count:]
    )
    if verdict.reason == "replicas":
        return (
            f"It has rolled back {count} time{'s' * (count > 1)} without progress, {listed}: the "
            "same GPU or node seems to compute wrongly again. Start the same command without it."
        )
    again = "at every edge" if verdict.reason == "edge_step" else "again"
    return (
        f"It has rolled back {count} time{'s' * (count > 1)} without progress, {listed}, and "
        f"diverged {again}: another rollback would not help. Read the reports in this run's guard "
        "folder, lower optimizer.learning_rate or remove what these batches have in common; "
        "guard.max_rollbacks sets when a run stops."
    )


def _explain_no_checkpoint(verdict: GuardVerdict, checkpoint_steps: Sequence[int]) -> str:
    found = ", ".join(map(str, sorted(checkpoint_steps)[:4])) or "none at all"
    return (
        f"The divergence began after step {verdict.began}, and there is no checkpoint from before "
        f"it (there are: {found}). Save more often (--set checkpoint.every=N, with checkpoint.keep "
        "large enough), or start with a lower optimizer.learning_rate or more "
        "optimizer.warmup_steps (or warmup_ratio) in a new folder (--set out=FOLDER)."
    )
