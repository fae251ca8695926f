"""One collective a step: whatever ranks must agree on is decided from its result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longtake import heartbeat
from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.data.loader import Loader
from longtake.guard.history import StepStatistics
from longtake.optim.build import schedule_factor
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.mesh import World
from longtake.process import EXIT_CODES
from longtake.training.gauge import Gauge
from longtake.training.step import SampleLosses, TrainingState

_QUARTERS = 4
_NO_LOSSES = {f"{what}.{quarter}": 0.0 for what in ("loss", "samples") for quarter in range(4)}


@dataclass(frozen=True)
class Facts:
    """What all ranks know about a step, the same on each."""

    statistics: StepStatistics
    """What the guard judges by; of no use where not one sample was trained."""
    scale: float
    """Global batch size over the number of samples that were trained."""
    num_troubles: int
    """Clips that could not be decoded and decoders that were replaced, over all ranks."""
    stop: str | None
    """The signal that asked a rank to stop, if one did; of several, the most pressing."""
    save_failed: bool
    """Whether a checkpoint could not be written, on any rank."""
    save_due: bool
    """Whether `checkpoint.minutes` have passed, by the clock of rank 0."""


def reduce_facts(
    samples: SampleLosses,
    batch: Batch,
    state: TrainingState,
    gauge: Gauge,
    local: Mapping[str, float],
    recipe: Recipe,
    world: World,
) -> Facts:
    """Add up what each rank has measured; all ranks call it once a step.

    `local` are this rank's `local_facts`.
    """
    heartbeat.set_phase("collective")
    losses = _losses(samples, batch) if world.speaks_for_data else _NO_LOSSES
    sums = sum_over_ranks({**losses, **gauge.sums(), **local}, world)
    num_samples = int(sum(sums[f"samples.{quarter}"] for quarter in range(_QUARTERS)))
    scale = recipe.training.batch_size / max(1, num_samples)
    return Facts(
        statistics=_statistics(sums, num_samples, scale, batch, state, gauge, recipe),
        scale=scale,
        num_troubles=int(sums["troubles"]),
        stop=next((name for name in EXIT_CODES if sums[f"stop.{name}"]), None),
        save_failed=bool(sums["save_failed"]),
        save_due=bool(sums["save_due"]),
    )


def local_facts(
    loader: Loader, *, stop: str | None, save_failed: bool, save_due: bool = False
) -> dict[str, float]:
    """What this rank has to say besides numbers of the model; `stop`: the signal that it got."""
    troubles = len(loader.failures) + len(loader.incidents)
    signals = {f"stop.{name}": float(name == stop) for name in EXIT_CODES}
    return {"troubles": troubles, **signals, "save_failed": save_failed, "save_due": save_due}


def _losses(samples: SampleLosses, batch: Batch) -> dict[str, float]:
    """Sums of losses, and numbers of samples, by quarter of the sigmas; without stand-ins."""
    sums = [0.0] * _QUARTERS
    counts = [0.0] * _QUARTERS
    for loss, sigma, weight in zip(
        samples.losses, samples.sigmas, batch.weights.tolist(), strict=True
    ):
        quarter = min(_QUARTERS - 1, int(_QUARTERS * sigma))
        sums[quarter] += weight * loss if weight else 0.0
        counts[quarter] += weight
    by_quarter = range(_QUARTERS)
    return {f"loss.{quarter}": sums[quarter] for quarter in by_quarter} | {
        f"samples.{quarter}": counts[quarter] for quarter in by_quarter
    }


def _statistics(
    sums: Mapping[str, float],
    num_samples: int,
    scale: float,
    batch: Batch,
    state: TrainingState,
    gauge: Gauge,
    recipe: Recipe,
) -> StepStatistics:
    norms = gauge.norms(sums, scale)
    step, losses = state.global_step, [sums[f"loss.{quarter}"] for quarter in range(_QUARTERS)]
    factor = schedule_factor(max(0, step - 1), recipe.training.steps, recipe.optimizer)
    return StepStatistics(
        step=step,
        batch=batch.step,
        stage=batch.stage,
        edge=edge_of(batch),
        bucket=str(batch.bucket),
        loss=sum(losses) / max(1, num_samples),
        num_samples=num_samples,
        loss_by_sigma=_means(losses, [sums[f"samples.{each}"] for each in range(_QUARTERS)]),
        grad_norm=norms.grad_norm,
        nonfinite_share=norms.nonfinite_share,
        weight_norm=norms.weight_norm,
        update_ratio=norms.update_ratio,
        learning_rate_factor=factor if norms.update_ratio else 0.0,
        group_grad_norms=norms.group_grad_norms,
        group_weight_norms=norms.group_weight_norms,
        group_update_ratios=norms.group_update_ratios,
    )


def _means(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float, float]:
    first, second, third, fourth = (
        total / count if count else math.nan for total, count in zip(sums, counts, strict=True)
    )
    return first, second, third, fourth


def edge_of(batch: Batch) -> str | None:
    """What begins with a batch, for people; None in the middle of an epoch, and at the run's."""
    if not batch.begins_epoch or batch.step == 0:
        return None
    source = "" if batch.source == "catalog" else f" (catalog {batch.source})"
    if batch.epoch == 0:
        return f"stage {batch.stage}{source} begins"
    return f"epoch {batch.epoch} of stage {batch.stage}{source} begins"
