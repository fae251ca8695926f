"""The training loop: read it from top to bottom, that is all there is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.ledger import Ledger
from longtake.data.loader import Loader
from longtake.errors import DivergedError
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.diverged import lost_gradients
from longtake.training.interrupt import Interrupt, catch_interrupts
from longtake.training.peak import PeakCheck
from longtake.training.record import Record
from longtake.training.resume import save_checkpoint
from longtake.training.step import (
    TrainingState,
    apply_update,
    compute_gradients,
    finish_gradients,
    skip_update,
)


@dataclass(frozen=True)
class Statistics:
    """What all ranks know about a step, the same on each."""

    loss: float
    """Mean over the samples of the global batch."""
    num_samples: int
    """Samples that were trained, over all ranks: fewer than the batch size where clips could not
    be decoded, and in the last batch of a bucket."""
    num_troubles: int
    """Clips that could not be decoded and decoders that were replaced, over all ranks."""
    stop: bool
    """Whether any rank was asked to stop."""


def train_steps(
    state: TrainingState,
    loader: Loader,
    ledger: Ledger,
    recipe: Recipe,
    run: RunDirectory,
    world: World,
    record: Record,
    peak: PeakCheck,
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
        for batch in record.timed(loader.batches(total)):
            with peak.of_step(batch):
                loss_sum = compute_gradients(state, batch, recipe, world)
            if peak.comparison is not None:
                record.peak_measured(batch, peak.comparison)
            statistics = _reduce(loss_sum, batch, loader, interrupt, world)
            if statistics.num_troubles:
                record.data_troubles(batch, loader)
            if statistics.num_samples:
                scale = recipe.training.batch_size / statistics.num_samples
                grad_norm = finish_gradients(state, recipe, scale)
                _refuse_divergence(state, statistics, grad_norm, batch)
                learning_rate = apply_update(state, recipe)
                record.step_done(batch, statistics.loss, grad_norm, learning_rate)
            else:  # not one of its clips could be decoded: there is nothing to learn from it
                skip_update(state)
            ledger.record(batch)
            is_last = statistics.stop or state.global_step == total
            if is_last or state.global_step % recipe.checkpoint.every == 0:
                ledger.flush()
                save_checkpoint(state, loader.state_dict(), recipe, run, world)
            if statistics.stop:
                return interrupt.signal_name or "a signal to another rank"
    return None


def _reduce(
    loss_sum: float,
    batch: Batch,
    loader: Loader,
    interrupt: Interrupt,
    world: World,
) -> Statistics:
    """One collective a step: whatever ranks must agree on is decided from its result."""
    local: Mapping[str, float] = {
        "loss": loss_sum,
        "samples": float(batch.weights.sum()),
        "troubles": len(loader.failures) + len(loader.incidents),
        "stop": interrupt.wanted,
    }
    sums = sum_over_ranks(local, world)
    num_samples = int(sums["samples"])
    mean = sums["loss"] / max(num_samples, 1)
    return Statistics(mean, num_samples, int(sums["troubles"]), bool(sums["stop"]))


def _refuse_divergence(
    state: TrainingState, statistics: Statistics, grad_norm: float, batch: Batch
) -> None:
    if math.isfinite(statistics.loss) and math.isfinite(grad_norm):
        return
    clips = ", ".join(batch.identities[:4])
    raise DivergedError(
        f"Step {batch.step + 1}: loss {statistics.loss}, gradient norm {grad_norm}; "
        f"both must be finite numbers. The update was not made. The batch began with "
        f"clips {clips}. {_where(state, statistics, grad_norm)}"
        "The same recipe would come here again: start a run with a lower optimizer.learning_rate "
        "or optimizer.max_grad_norm in a new folder (--set out=FOLDER)."
    )


def _where(state: TrainingState, statistics: Statistics, grad_norm: float) -> str:
    """Whose gradients they are; all ranks know both numbers, so all come here or none."""
    if math.isfinite(grad_norm):
        return ""
    parts = state.components
    lost = lost_gradients(parts.model, parts.family.blocks(parts.model))
    if math.isfinite(statistics.loss):
        return f"{lost} "
    return f"{lost} The loss is no number either: it was lost before, in the forward pass. "
