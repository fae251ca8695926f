"""Predicts the cost of a run: time, GPU-hours and bytes by part, and losses by failures.

A save stops training while each rank's shard is copied to the computer's memory, and is whole when
it was written. A failure loses what was trained since the newest whole save, and a restart.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longtake.config import Bucket, Recipe, Stage
from longtake.errors import PlanError
from longtake.planner import activation_checkpointing, memory, mesh
from longtake.planner.devices import DeviceBudget
from longtake.planner.forecast import Forecast, PhaseForecast
from longtake.planner.trace import StepTrace

DAY_SECONDS = 86_400.0
STORAGE_BYTES_PER_SECOND = 5e9
"""Writing speed of a shared file system, all ranks together, unless the user states it."""
_MOST_LOST = 3.0  # mean times between failures that a save and a restart may take together
RESTART_SECONDS = 60.0
"""From a failure until ranks read the newest save: assumed, unless the user states it."""


# --- What failures take -----------------------------------------------------------------------


@dataclass(frozen=True)
class FailureModel:
    """Saves at regular intervals, and failures at random, at any time alike (Poisson)."""

    interval: float  # seconds of training between two saves
    stall: float  # seconds for which a save stops training
    write: float  # seconds from then until it is whole
    restart: float  # seconds from a failure until training continues
    failures_per_day: float

    @property
    def cycle(self) -> float:
        """Seconds from one save to the next, which waits until the one before is whole."""
        return max(self.interval, self.write) + self.stall

    @property
    def lost_per_failure(self) -> float:
        """Seconds, on average; where failures are rare: cycle / 2 + write + restart.

        Exactly, for failures of rate r: 1 / r minus what was whole, cycle e^(-r write) / (e^(r
        cycle) - 1); and a restart that may itself be interrupted.
        """
        rate = self.failures_per_day / DAY_SECONDS
        if not rate:
            return self.cycle / 2 + self.write + self.restart
        whole = self.cycle * math.exp(-rate * self.write) / math.expm1(rate * self.cycle)
        restarts = math.expm1(rate * self.restart) / rate
        return (1 / rate - whole + restarts) / math.exp(rate * self.restart)

    @property
    def lost_share(self) -> float:
        """Share of all time that failures take; saves are not counted."""
        return self.failures_per_day / DAY_SECONDS * self.lost_per_failure

    def wall_seconds(self, work: float) -> float:
        """Mean duration of `work` seconds of training, with saves and failures."""
        return work / self.interval * self.cycle / (1 - self.lost_share)

    @property
    def goodput(self) -> float:
        """Training that is kept, as a share of all time."""
        return 1 / self.wall_seconds(1.0)

    def with_best_interval(self) -> "FailureModel":
        """Return the model with the interval at which saves and failures together take least.

        sqrt(2 stall / rate) to first order (J. W. Young, "A first order approximation to the
        optimum checkpoint interval", CACM 17(9), 1974), here to higher order (J. T. Daly, "A higher
        order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006).
        Never shorter than a save takes to be written.
        """
        if not self.failures_per_day:
            return replace(self, interval=math.inf)
        between = DAY_SECONDS / self.failures_per_day
        part = self.stall / (2 * between)
        best = between
        if part < 1:
            first_order = math.sqrt(2 * self.stall * between)
            best = first_order * (1 + math.sqrt(part) / 3 + part / 9) - self.stall
        return replace(self, interval=max(best, self.write))


# --- What a run costs -------------------------------------------------------------------------


@dataclass(frozen=True)
class StageCost:
    """One stage, each step at its longest shape: shorter clips and images take less."""

    name: str
    steps: int
    compute_seconds: float  # of a step, each
    exposed_seconds: float  # in which it waits for other ranks
    encoder_seconds: float  # codec and text encoders in the step; 0 with data.cache
    sampling_seconds: float  # of a step's share of the samples between steps
    network_bytes: int  # that all ranks send in a step
    failures: FailureModel  # at the recipe's interval

    @property
    def wall_seconds(self) -> float:
        return self.failures.wall_seconds(self.steps * self.step_seconds)

    @property
    def step_seconds(self) -> float:
        parts = self.compute_seconds, self.exposed_seconds, self.encoder_seconds
        return sum(parts) + self.sampling_seconds


@dataclass(frozen=True)
class RunCost:
    """The whole run; seconds are of all ranks together, from its first step to its last."""

    stages: Sequence[StageCost]
    save_bytes: int
    num_kept: int  # saves that stay on the disk, those for good included
    num_ranks: int

    @property
    def saving(self) -> FailureModel:
        """The saves and failures of the last stage; only the interval differs between stages."""
        return self.stages[-1].failures

    @property
    def work_seconds(self) -> float:
        return sum(stage.steps * stage.step_seconds for stage in self.stages)

    @property
    def num_saves(self) -> float:
        """Saves of work that is kept."""
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
        """Return the cost with the interval at which least is lost, of a step at least."""
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
) -> RunCost | None:
    """Predict the cost of a recipe's whole run; None where a step cannot be traced.

    Args:
        known: of the largest shape, at whose options all stages are run.
        phases: of the same.
        links: between ranks.
        failures_per_day: that end a launch, over all nodes.
        restart_seconds: None: assumed, and what reading the newest save takes.
        storage: bytes a second that all ranks together write, or read.
    """
    if known.chosen is None:
        return None
    step, recipe = known.step, known.step.recipe
    trained = [p for p in step.components.model.parameters() if p.requires_grad]
    of_rank = known.static.optimizer.device + known.static.optimizer.host + known.static.ema
    save_bytes = sum(p.nbytes for p in trained) + of_rank * step.num_shards
    if restart_seconds is None:
        restart_seconds = RESTART_SECONDS + step.num_copies * save_bytes / storage
    saving = FailureModel(
        interval=0.0,
        stall=save_bytes / step.num_shards / step.device.link,
        write=save_bytes / storage,
        restart=restart_seconds,
        failures_per_day=failures_per_day,
    )
    stages = [_stage_cost(known, phases, links, *each, saving) for each in _stages(known)]
    for stage in stages:
        refuse_no_progress(stage)
    section = recipe.checkpoint
    for_good = recipe.training.steps // section.keep_every if section.keep_every else 0
    return RunCost(stages, save_bytes, section.keep + for_good, step.world_size)


def refuse_no_progress(stage: StageCost) -> None:
    """Refuse failures so often that hardly any save becomes whole.

    Raises:
        PlanError: the closed forms would say years.
    """
    model = stage.failures
    needed = model.cycle + model.write + model.restart
    if model.failures_per_day / DAY_SECONDS * needed > _MOST_LOST:
        raise PlanError(
            f"With {model.failures_per_day:g} failures a day stage {stage.name} makes next to no "
            f"progress: there is one every {DAY_SECONDS / model.failures_per_day:.0f} s, and from "
            f"one save to the next, with a restart, it takes {needed:.0f} s. Save more often "
            "(checkpoint.minutes), or expect fewer failures."
        )


def _stages(known: Forecast) -> Iterator[tuple[Stage, int]]:
    """Each stage with its steps; one that is measured in epochs takes the rest."""
    data, left = known.step.recipe.data, known.step.recipe.training.steps
    for stage in data.curriculum():
        steps = left if stage.steps is None else min(stage.steps, left)
        if steps:
            yield stage, steps
        left -= steps


def _stage_cost(
    known: Forecast,
    phases: Sequence[PhaseForecast],
    links: mesh.Links,
    stage: Stage,
    steps: int,
    saving: FailureModel,
) -> StageCost:
    step, trace = _step_of(known, stage)
    compute, exposed, sent = step.num_micro_batches * trace.seconds, 0.0, 0
    if step.world_size > 1:
        found = mesh.without_advice(step, trace, links)
        compute, sent = found.compute_seconds, found.num_bytes * step.world_size
        exposed = found.step_seconds - compute
    seconds = {each.name: each.seconds for each in phases}
    encoders = 0.0
    if "step" in seconds:  # by the pixels of a clip, as convolutions take
        share = _pixels(step) / _pixels(known.step)
        clips = step.micro_batch_size * step.num_micro_batches
        encoders = clips * (seconds.get("text", 0.0) + share * seconds.get("encode", 0.0))
    every = step.recipe.sampling.every
    sampling = seconds.get("sampling", 0.0) / every if every else 0.0
    cost = StageCost(stage.name, steps, compute, exposed, encoders, sampling, sent, saving)
    section = step.recipe.checkpoint
    interval = section.every * cost.step_seconds
    if section.minutes is not None:  # after the first step that ends later
        whole_steps = math.ceil(60 * section.minutes / cost.step_seconds)
        interval = min(interval, whole_steps * cost.step_seconds)
    return replace(cost, failures=replace(saving, interval=interval))


def _step_of(known: Forecast, stage: Stage) -> tuple[memory.MetaStep, StepTrace]:
    """A step of a stage at its longest shape, with the options of the whole run's largest one."""
    assert known.chosen is not None
    options, trace = known.chosen
    step = known.step
    batch = next(each for each in step.stages if each.name == stage.name)
    if (batch.bucket, batch.micro_batch_size) == (step.bucket, step.micro_batch_size):
        counts = batch.num_micro_batches, batch.global_batch_size
        return replace(step, num_micro_batches=counts[0], global_batch_size=counts[1]), trace
    own = step.recipe.in_stage(stage.name)
    alone = {"buckets": stage.buckets or own.data.buckets, "stages": ()}
    own = own.model_copy(update={"data": own.data.model_copy(update=alone)})
    step = memory.outline_step(own, known.device, step.world_size, step.per_node)
    return step, step.tracer.trace(options)


def clip_seconds(
    recipe: Recipe, device: DeviceBudget, tokens: Mapping[Bucket, int]
) -> dict[Bucket, float]:
    """GPU-seconds of a clip of each bucket in the model's forward and backward pass, predicted.

    Buckets of the fewest, the most and about half as many tokens are traced. Of the others, seconds
    lie on the parabola through these: attention grows with the square of the tokens, all else with
    them. Codec, text encoder, optimizer and waiting for other ranks are not counted, nor is what
    recompute.policy = "best" recomputes, as memory decides on that.

    Args:
        recipe: its buckets have batch sizes, or it has no `data.tokens_per_batch`.
        device: what is predicted for.
        tokens: of a clip of each bucket.
    """
    different = np.unique(list(tokens.values()))
    middle = different[np.abs(different - different[-1] / 2).argmin()]
    chosen = np.unique([different[0], middle, different[-1]])
    shapes = [next(shape for shape in tokens if tokens[shape] == number) for number in chosen]
    traced = [_traced_seconds(recipe, device, shape) for shape in shapes]
    known = np.polynomial.Polynomial.fit(chosen, traced, len(chosen) - 1)
    return {shape: float(known(number)) for shape, number in tokens.items()}


def _traced_seconds(recipe: Recipe, device: DeviceBudget, shape: Bucket) -> float:
    alone = recipe.data.model_copy(update={"buckets": (shape,), "stages": ()})
    num_ranks = recipe.parallel.context
    own = recipe.model_copy(update={"data": alone})
    step = memory.outline_step(own, device, num_ranks)
    policy = recipe.recompute.chosen()
    if policy not in activation_checkpointing.POLICIES:
        policy = "none"
    options = activation_checkpointing.options_of(
        policy, step.block_names, step.tracer.subject.weights[0]
    )
    return step.tracer.trace(options).seconds * num_ranks / step.micro_batch_size


def _pixels(step: memory.MetaStep) -> int:
    return step.bucket.num_frames * step.bucket.height * step.bucket.width
