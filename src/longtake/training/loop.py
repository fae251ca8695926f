"""The training loop: read it from top to bottom, that is all there is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from longtake.config import Recipe
from longtake.data.loader import Batch, Loader
from longtake.errors import DivergedError
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.interrupt import Interrupt, catch_interrupts
from longtake.training.record import Record
from longtake.training.resume import save_checkpoint
from longtake.training.step import TrainingState, apply_update, compute_gradients


@dataclass(frozen=True)
class Statistics:
    """What all ranks know about a step, the same on each."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Of the mean loss over the global batch, before clipping."""
    num_failures: int
    """Clips that could not be decoded, over all ranks."""
    stop: bool
    """Whether any rank was asked to stop."""


def train_steps(
    state: TrainingState,
    loader: Loader,
    recipe: Recipe,
    run: RunDirectory,
    world: World,
    record: Record,
) -> str | None:
    """Train until the recipe's last step, or until someone asks to stop.

    Returns:
        The signal that asked for the stop, or None where the last step was reached.

    Raises:
        DivergedError: the loss or the gradient stopped being finite; the update was not made.
        DataError: too many clips failed to decode.
        CheckpointError: a checkpoint could not be written.
    """
    total = recipe.training.steps
    with catch_interrupts() as interrupt:
        for batch in record.timed(loader.batches(state.global_step, total)):
            loss_sum, grad_norm = compute_gradients(state, batch, recipe, world)
            statistics = _reduce(loss_sum, grad_norm, batch, loader, interrupt, world)
            _refuse_divergence(statistics, batch)
            learning_rate = apply_update(state, recipe)
            record.step_done(batch, statistics.loss, statistics.grad_norm, learning_rate)
            record.clips_failed(batch, loader.failures, statistics.num_failures)
            is_last = statistics.stop or state.global_step == total
            if is_last or state.global_step % recipe.checkpoint.every == 0:
                save_checkpoint(state, recipe, run, world)
            if statistics.stop:
                return interrupt.signal_name or "a signal to another rank"
    return None


def _reduce(
    loss_sum: float,
    grad_norm: float,
    batch: Batch,
    loader: Loader,
    interrupt: Interrupt,
    world: World,
) -> Statistics:
    """One collective a step: whatever ranks must agree on is decided from its result."""
    local: Mapping[str, float] = {
        "loss": loss_sum,
        "samples": len(batch.captions),
        "failures": len(loader.failures),
        "stop": interrupt.wanted,
    }
    sums = sum_over_ranks(local, world)
    mean = sums["loss"] / sums["samples"]
    return Statistics(mean, grad_norm, int(sums["failures"]), bool(sums["stop"]))


def _refuse_divergence(statistics: Statistics, batch: Batch) -> None:
    if math.isfinite(statistics.loss) and math.isfinite(statistics.grad_norm):
        return
    clips = ", ".join(batch.identities[:4])
    raise DivergedError(
        f"Step {batch.step + 1}: loss {statistics.loss}, gradient norm {statistics.grad_norm}; "
        f"both must be finite numbers. The update was not made. The batch began with "
        f"clips {clips}. "
        "The same recipe would come here again: start a run with a lower optimizer.learning_rate "
        "or optimizer.max_grad_norm in a new folder (--set out=FOLDER)."
    )
