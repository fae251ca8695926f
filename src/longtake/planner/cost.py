"""Predicts the cost of a run: time, GPU-hours, network bytes, and time lost to failures.

A save of a checkpoint stops training while each rank's shard is copied to host memory, and is
complete once it is written. A failure costs the training since the newest complete save, and a
restart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from longtake.config import Bucket, Recipe, Stage
from longtake.errors import PlanError
from longtake.planner import memory, mesh
from longtake.planner.activation_checkpointing import POLICIES, options_of
from longtake.planner.devices import DeviceBudget
from longtake.planner.forecast import Forecast
from longtake.planner.phases import PhaseForecast
from longtake.planner.trace import StepTrace

DAY_SECONDS = 86_400.0
STORAGE_BYTES_PER_SECOND = 5e9
"""Assumed writing speed of a shared file system, over all ranks."""
_MOST_LOST = 3.0  # mean times between failures that a save and a restart may take together
RESTART_SECONDS = 60.0
"""Assumed time from a failure until ranks read the newest save."""


# --- What failures take -----------------------------------------------------------------------


@dataclass(frozen=True)
class FailureModel:
    """Model of the time that checkpoints, saved at regular intervals, and random failures cost.

    Failures are a Poisson process.
    """

    interval: float  # seconds of training between two saves
    stall: float  # seconds for which a save stops training
    write: float  # seconds after that until the save is complete
    restart: float  # seconds from a failure until training continues
    failures_per_day: float

    @property
    def cycle(self) -> float:
        """Seconds from one checkpoint to the next; a save waits until the one before is written."""
        return max(self.interval, self.write) + self.stall

    @property
    def lost_per_failure(self) -> float:
        """Mean seconds that one failure costs; if failures are rare, cycle / 2 + write + restart.

        The exact value for failures of rate r is 1 / r minus the completed time, cycle e^(-r write)
        / (e^(r cycle) - 1), plus a restart that may itself be interrupted.
        """
        rate = self.failures_per_day / DAY_SECONDS
        # The limit of the formula below.
        if not rate:
            return self.cycle / 2 + self.write + self.restart
        whole = self.cycle * math.exp(-rate * self.write) / math.expm1(rate * self.cycle)
        restarts = math.expm1(rate * self.restart) / rate
        return (1 / rate - whole + restarts) / math.exp(rate * self.restart)

    @property
    def lost_share(self) -> float:
        """Share of all time that failures cost, without the time in which checkpoints are saved."""
        return self.failures_per_day / DAY_SECONDS * self.lost_per_failure

    def wall_seconds(self, work: float) -> float:
        """Return the mean duration of `work` seconds of training, with saves and failures."""
        return work / self.interval * self.cycle / (1 - self.lost_share)

    @property
    def goodput(self) -> float:
        """Share of all time spent on training whose results are kept (goodput)."""
        return 1 / self.wall_seconds(1.0)

    def with_best_interval(self) -> "FailureModel":
        """Return this model with the interval between checkpoints at which time lost is least.

        To first order it is sqrt(2 stall / rate) (J. W. Young, "A first order approximation to the
        optimum checkpoint interval", CACM 17(9), 1974); here it is of higher order (J. T. Daly, "A
        higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3),
        2006). It is never shorter than a save takes to be written.
        """
        if not self.failures_per_day:
            return replace(self, interval=math.inf)
        between = DAY_SECONDS / self.failures_per_day
        part = self.stall / (2 * between)
        # Daly's estimate for saves that take longer than twice the time between failures.
        best = between
        if part < 1:
            first_order = math.sqrt(2 * self.stall * between)
            best = first_order * (1 + math.sqrt(part) / 3 + part / 9) - self.stall
        return replace(self, interval=max(best, self.write))


# --- What a run costs -------------------------------------------------------------------------


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage of the curriculum.

    Each step is counted at the stage's longest clip shape; steps with shorter clips cost less.
    """

    name: str
    steps: int
    compute_seconds: float  # of each step
    exposed_seconds: float  # of each step, waiting for other ranks
    encoder_seconds: float  # of codec and text encoders in a step; 0 with data.cache
    sampling_seconds: float  # sampling between steps, as a share of each step
    network_bytes: int  # that all ranks send in a step
    failures: FailureModel  # with the recipe's interval of saves

    @property
    def wall_seconds(self) -> float:
        return self.failures.wall_seconds(self.steps * self.step_seconds)

    @property
    def step_seconds(self) -> float:
        parts = self.compute_seconds, self.exposed_seconds, self.encoder_seconds
        return sum(parts) + self.sampling_seconds


@dataclass(frozen=True)
class RunCost:
    """Cost of a whole run; seconds are wall-clock time from its first to its last step."""

    stages: Sequence[StageCost]
    save_bytes: int
    num_kept: int  # saves that stay on the disk, including permanent ones
    num_ranks: int

    @property
    def saving(self) -> FailureModel:
        """Model of checkpoints and failures in the last stage; only intervals differ by stage."""
        return self.stages[-1].failures

    @property
    def work_seconds(self) -> float:
        return sum(stage.steps * stage.step_seconds for stage in self.stages)

    @property
    def num_saves(self) -> float:
        """Number of checkpoints saved in training whose results are kept; lost steps have none."""
        return sum(s.steps * s.step_seconds / s.failures.interval for s in self.stages)

    @property
    def wall_seconds(self) -> float:
        return sum(stage.wall_seconds for stage in self.stages)

    @property
    def lost_seconds(self) -> float:
        return sum(stage.wall_seconds * stage.failures.lost_share for stage in self.stages)

    @property
    def stalled_seconds(self) -> float:
        return self.wall_seconds - self.lost_seconds - self.work_seconds

    @property
    def num_failures(self) -> float:
        return self.wall_seconds * self.saving.failures_per_day / DAY_SECONDS

    @property
    def goodput(self) -> float:
        return self.work_seconds / self.wall_seconds

    def at_best(self) -> "RunCost":
        """Return the run's cost with the best interval of checkpoints, of at least one step."""
        stages = []
        for stage in self.stages:
            best = stage.failures.with_best_interval()
            best = replace(best, interval=max(best.interval, stage.step_seconds))
            stages.append(replace(stage, failures=best))
        return replace(self, stages=stages)


def run_cost(
    known: Forecast,
    phases: Sequence[PhaseForecast],
    links: mesh.Links,
    *,
    failures_per_day: float,
    restart_seconds: float | None = None,
    storage: float = STORAGE_BYTES_PER_SECOND,
    epoch_steps: Mapping[str, float | None] = MappingProxyType({}),
) -> RunCost | None:
    """Predict the cost of a recipe's whole run; None if a step cannot be traced.

    Args:
        known: forecast of a step at the largest shape, whose block options all stages use.
        phases: forecasts of encoding and sampling, made from the same forecast.
        links: speeds of the links between ranks.
        failures_per_day: number of failures per day, over all nodes, that end a launch.
        restart_seconds: time of a restart; None: an assumed time, and that of reading the newest
            save.
        storage: bytes per second that all ranks together write or read.
        epoch_steps: mean steps of an epoch by stage, for intervals in epochs.

    Raises:
        PlanError: the data decide steps and are not indexed, or failures are so frequent that a
            stage makes next to no progress.
    """
    if known.chosen is None:
        return None
    step, recipe = known.step, known.step.recipe
    in_epochs = recipe.checkpoint.every_epochs or recipe.sampling.every_epochs
    if not recipe.training.steps or (
        in_epochs and None in map(epoch_steps.get, (each.name for each in recipe.data.curriculum()))
    ):
        raise PlanError(
            "The cost of the run follows from its number of steps and from those between saves and "
            "samples, which where they are set in epochs are known once the catalogs of `data` are "
            "indexed (longtake data index)."
        )
    of_rank = known.static.optimizer.device + known.static.optimizer.host + known.static.ema
    # Each rank saves its shard of optimizer and EMA, and weights are saved once.
    save_bytes = step.trainable_bytes + of_rank * step.num_shards
    if restart_seconds is None:
        restart_seconds = RESTART_SECONDS + step.num_copies * save_bytes / storage
    saving = FailureModel(
        interval=0.0,
        stall=save_bytes / step.num_shards / step.device.link,
        write=save_bytes / storage,
        restart=restart_seconds,
        failures_per_day=failures_per_day,
    )
    stages, left = list[StageCost](), recipe.training.steps
    for stage in recipe.data.curriculum():
        # A stage measured in epochs takes all remaining steps.
        steps = left if stage.steps is None else min(stage.steps, left)
        left -= steps
        if steps:
            epoch = epoch_steps.get(stage.name)
            stages.append(_stage_cost(known, phases, links, stage, steps, saving, epoch))
            refuse_no_progress(stages[-1])
    section = recipe.checkpoint
    for_good = recipe.training.steps // section.keep_every if section.keep_every else 0
    return RunCost(stages, save_bytes, section.keep + for_good, step.world_size)


def refuse_no_progress(stage: StageCost) -> None:
    """Refuse to predict a run whose failures are so frequent that hardly any save completes."""
    model = stage.failures
    needed = model.cycle + model.write + model.restart
    if model.failures_per_day / DAY_SECONDS * needed > _MOST_LOST:
        raise PlanError(
            f"With {model.failures_per_day:g} failures a day stage {stage.name} makes next to no "
            f"progress: there is one every {DAY_SECONDS / model.failures_per_day:.0f} s, and from "
            f"one save to the next, with a restart, it takes {needed:.0f} s. Save more often "
            "(checkpoint.minutes), or expect fewer failures."
        )


def _stage_cost(
    known: Forecast,
    phases: Sequence[PhaseForecast],
    links: mesh.Links,
    stage: Stage,
    steps: int,
    saving: FailureModel,
    epoch_steps: float | None,
) -> StageCost:
    step, trace = _step_of(known, stage)
    compute, exposed, sent = step.batch.num_micro_batches * trace.seconds, 0.0, 0
    if step.world_size > 1:
        exchange = mesh.without_advice(step, trace, links)
        compute, sent = exchange.compute_seconds, exchange.num_bytes * step.world_size
        exposed = exchange.step_seconds - compute
    seconds = {each.name: each.seconds for each in phases}
    encoders = 0.0
    if "step" in seconds:  # scaled by pixels, with which the time of convolutions grows
        share = step.batch.bucket.num_pixels / known.step.batch.bucket.num_pixels
        clips = step.batch.micro_batch_size * step.batch.num_micro_batches
        encoders = clips * (seconds.get("text", 0.0) + share * seconds.get("encode", 0.0))
    every = step.recipe.steps_between(step.recipe.sampling, epoch_steps, steps)
    sampling = seconds.get("sampling", 0.0) / every if every else 0.0
    cost = StageCost(stage.name, steps, compute, exposed, encoders, sampling, sent, saving)
    section = step.recipe.checkpoint
    between = step.recipe.steps_between(section, epoch_steps, steps)
    assert between is not None  # `run_cost` refuses it
    interval = between * cost.step_seconds
    if section.minutes is not None:  # at the end of the step in which they pass
        whole_steps = math.ceil(60 * section.minutes / cost.step_seconds)
        interval = min(interval, whole_steps * cost.step_seconds)
    return replace(cost, failures=replace(saving, interval=interval))


def _step_of(known: Forecast, stage: Stage) -> tuple[memory.MetaStep, StepTrace]:
    """Trace a stage's step at its longest shape, with the block options of the largest step."""
    assert known.chosen is not None
    options, trace = known.chosen
    step = known.step
    batch = next(each for each in step.stages if each.name == stage.name)
    # The same operations, so that the trace of the largest step serves.
    if (batch.bucket, batch.micro_batch_size) == (step.batch.bucket, step.batch.micro_batch_size):
        return replace(step, batch=batch), trace
    own = step.recipe.in_stage(stage.name)
    alone = {"buckets": stage.buckets or own.data.buckets, "stages": ()}
    own = own.model_copy(update={"data": own.data.model_copy(update=alone)})
    step = memory.outline_step(own, known.device, step.world_size, step.per_node)
    return step, step.tracer.trace(options)


def clip_seconds(
    recipe: Recipe, device: DeviceBudget, tokens: Mapping[Bucket, int]
) -> dict[Bucket, float]:
    """Predict the GPU-seconds of a clip of each bucket in the model's forward and backward pass.

    Only buckets with the fewest, the most and about half the most tokens are traced. The others'
    seconds lie on the parabola through these, since attention grows with the square of the tokens,
    and all else linearly. Codec, text encoder, optimizer and waits for other ranks are not
    included, nor is recomputation by recompute.policy = "best", on which memory decides.

    Args:
        recipe: without `data.tokens_per_batch`, or with batch sizes in all buckets.
        device: device for which the cost is predicted.
        tokens: number of tokens of a clip of each bucket.
    """
    different = np.unique(list(tokens.values()))
    middle = different[np.abs(different - different[-1] / 2).argmin()]
    chosen = np.unique([different[0], middle, different[-1]])
    num_ranks, policy, traced = recipe.parallel.context, recipe.recompute.chosen(), []
    # "best" depends on memory; its recomputation is not counted.
    if policy not in POLICIES:
        policy = "none"
    for number in chosen:
        shape = next(shape for shape in tokens if tokens[shape] == number)
        alone = recipe.data.model_copy(update={"buckets": (shape,), "stages": ()})
        own = recipe.model_copy(update={"data": alone})
        step = memory.outline_step(own, device, num_ranks)
        options = options_of(policy, step.block_names, step.base_weights)
        seconds = step.tracer.trace(options).seconds
        traced.append(seconds * num_ranks / step.batch.micro_batch_size)
    # Exact at the traced buckets, of which there is one more than the degree.
    known = np.polynomial.Polynomial.fit(chosen, traced, len(chosen) - 1)
    return {shape: float(known(number)) for shape, number in tokens.items()}
