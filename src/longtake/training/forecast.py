"""Will it fit, and will everything train: the answer before the first step, without weights."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import longtake
from longtake.config import Bucket, Recipe
from longtake.errors import PlanError
from longtake.recompute.devices import Device
from longtake.recompute.plan import Best, Survey, find_best, survey
from longtake.recompute.policies import POLICIES, options_of
from longtake.recompute.trace import CUDA_ROUNDS_TO, StepTrace
from longtake.recompute.traps import Trap, costly_policies, flow_traps, idle_recompute
from longtake.training.optimizer_memory import OptimizerBytes, foreach_bytes, optimizer_bytes
from longtake.training.outlined import OutlinedStep, outlined_step, sequence_length


@dataclass(frozen=True)
class Fixed:
    """What is in the device's memory whatever is recomputed, in bytes."""

    weights: int
    """Of the transformer, frozen ones included."""
    gradients: int
    optimizer: int
    """Its states; what is offloaded to the computer's memory does not count."""
    inputs: int
    """Latents, noise and conditioning of one micro-batch."""
    ema: int
    """The running average, in fp32."""
    encoders: int
    """Codec and text encoders; none where data.cache keeps what they give."""

    @property
    def resident(self) -> int:
        """What is there in every step but the first, beside what a traced step counts."""
        return self.optimizer + self.ema + self.encoders


@dataclass(frozen=True)
class PolicyForecast:
    """One policy's memory and time."""

    name: str
    forward_end_bytes: int
    """When the backward pass begins: weights, inputs and activations."""
    peak_bytes: int
    """The most in forward and backward pass of the first step."""
    step_peak_bytes: int
    """The most in any later step, with optimizer states, EMA and encoders there."""
    overhead: float | None
    """Share of a step without recompute that it takes longer; None where nobody asked."""
    fits: bool | None
    """None without a budget."""


@dataclass(frozen=True)
class Gradients:
    """Which trainable parameters a backward pass reaches, by name."""

    reached: Sequence[str]
    unreached: Sequence[str]
    traps: Sequence[Trap]


@dataclass(frozen=True)
class Forecast:
    """All that is known about a step before there is one."""

    device: Device
    memory_bytes: int | None
    budget_bytes: int | None
    bucket: Bucket
    """The shape of clips that takes the most; the others fit if it does."""
    micro_batch_size: int
    num_micro_batches: int
    num_parameters: int
    num_trainable: int
    num_tokens: int
    """Of one sample, that attend to each other; those of text and references included."""
    fixed: Fixed
    optimizer: OptimizerBytes
    foreach_bytes: int
    """What torch's own default, AdamW by foreach, would take at each update beside the fused one
    that longtake uses."""
    policies: Sequence[PolicyForecast]
    best: Best | None
    best_policy: PolicyForecast | None
    gradients: Gradients
    seconds: float
    """That it took to find out."""

    def policy(self, name: str) -> PolicyForecast:
        """One policy's forecast; `best` where something fits."""
        rows = [*self.policies, self.best_policy]
        return next(row for row in rows if row is not None and row.name == name)


def forecast(
    recipe: Recipe,
    device: Device,
    memory_bytes: int | None = None,
    budget_bytes: int | None = None,
    *,
    world_size: int = 1,
) -> Forecast:
    """Trace a recipe's step under every policy, find the best that fits, and look for traps.

    Args:
        recipe: neither its catalog nor its weights are needed.
        device: whose memory and speed are predicted.
        memory_bytes: of the device.
        budget_bytes: what tensors may take of it; without it no best policy is looked for.
        world_size: processes that share a batch.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        PlanError: the model cannot be run on tensors without values, or its weights alone are
            above the budget.
    """
    begun = time.perf_counter()
    step = outlined_step(recipe, device, world_size)
    gradients = check_gradients(step)
    if budget_bytes is not None:
        _refuse_below_weights(step, budget_bytes)
    surveyed = survey(step.tracer)
    fixed, optimizer = _fixed(step, surveyed.traces["none"])

    def row(name: str, trace: StepTrace) -> PolicyForecast:
        return memory_of(name, trace, step, surveyed.overhead(trace), budget_bytes)

    best = None
    if budget_bytes is not None and _update_peak(fixed, optimizer) <= budget_bytes:
        best = find_best(step.tracer, surveyed, budget_bytes - fixed.resident)
    peaks = {name: trace.peak_bytes for name, trace in surveyed.traces.items()}
    traps = [*gradients.traps, *_idle(step, surveyed), *costly_policies(peaks)]
    parameters = list(step.parts.model.parameters())
    return Forecast(
        device=device,
        memory_bytes=memory_bytes,
        budget_bytes=budget_bytes,
        bucket=step.bucket,
        micro_batch_size=step.micro_batch_size,
        num_micro_batches=step.num_micro_batches,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        num_tokens=sequence_length(step.parts, recipe, step.bucket),
        fixed=fixed,
        optimizer=optimizer,
        foreach_bytes=foreach_bytes(step.parts.model),
        policies=[row(name, surveyed.traces[name]) for name in POLICIES],
        best=best,
        best_policy=None if best is None else row("best", best.traced),
        gradients=Gradients(gradients.reached, gradients.unreached, traps),
        seconds=time.perf_counter() - begun,
    )


def memory_of(
    policy: str,
    trace: StepTrace,
    step: OutlinedStep,
    overhead: float | None = None,
    budget_bytes: int | None = None,
) -> PolicyForecast:
    """What a traced step takes of the device, with all that is there beside it.

    The update has a peak of its own: weights and gradients, and what it needs in passing.
    """
    fixed, optimizer = _fixed(step, trace)
    step_peak = fixed.resident + max(trace.peak_bytes, trace.end_bytes + optimizer.step)
    return PolicyForecast(
        name=policy,
        forward_end_bytes=trace.forward_end_bytes,
        peak_bytes=trace.peak_bytes,
        step_peak_bytes=step_peak,
        overhead=overhead,
        fits=None if budget_bytes is None else step_peak <= budget_bytes,
    )


def check_gradients(step: OutlinedStep) -> Gradients:
    """Which trainable parameters a step reaches, and what keeps it from the others.

    Raises:
        PlanError: the model cannot be run on tensors without values.
    """
    try:
        watch = step.tracer.watch()
    except DataDependentOutputException as error:
        raise PlanError(
            f"The model cannot be planned{_where(error)}: a tensor's value is asked for. A plan "
            "runs the model on tensors that have a shape but no values, so it can follow no "
            ".item() and no `if` on a tensor. Compute with tensors there, such as by torch.where."
        ) from error
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(f"The model cannot be run{_where(error)}: {reason}") from error
    return Gradients(watch.reached(), watch.unreached(), flow_traps(watch))


def _where(error: Exception) -> str:
    """The innermost line that is neither torch's nor longtake's."""
    known = (*torch.__path__, *longtake.__path__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(known)]
    if not places:
        return ""
    return f" ({places[-1].filename}, line {places[-1].lineno}: {places[-1].line})"


def _fixed(step: OutlinedStep, trace: StepTrace) -> tuple[Fixed, OptimizerBytes]:
    recipe, parts = step.recipe, step.parts
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    optimizer = optimizer_bytes(
        parts.model,
        parts.family.blocks(parts.model),
        recipe.optimizer,
        step.precision,
        step.tracer.device.target,
        CUDA_ROUNDS_TO if step.tracer.device.target == "cuda" else 1,
    )
    frozen = [*parts.codec.modules(), *parts.text.modules()]
    is_cached = recipe.data.cache is not None
    return Fixed(
        weights=trace.weight_bytes,
        gradients=sum(p.numel() * p.itemsize for p in trained),
        optimizer=optimizer.device,
        inputs=trace.input_bytes,
        ema=sum(4 * p.numel() for p in trained),
        encoders=0 if is_cached else sum(_size(module) for module in frozen),
    ), optimizer


def _size(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.itemsize for p in (*module.parameters(), *module.buffers()))


def _update_peak(fixed: Fixed, optimizer: OptimizerBytes) -> int:
    return fixed.weights + fixed.gradients + fixed.resident + optimizer.step


def _refuse_below_weights(step: OutlinedStep, budget_bytes: int) -> None:
    weights = _size(step.parts.model)
    if weights < budget_bytes:
        return
    names = tuple(step.tracer.subject.blocks)
    least = memory_of("all", step.tracer.trace(options_of("all", names)), step)
    raise PlanError(
        f"The model's weights alone take {weights / 2**30:.2f} GiB, but the budget for all tensors "
        f"is {budget_bytes / 2**30:.2f} GiB. With every block recomputed this recipe takes "
        f"{least.step_peak_bytes / 2**30:.2f} GiB: take a card with more than that, a smaller "
        "model" + (', or model.dtype = "bf16".' if step.recipe.model.dtype == "fp32" else ".")
    )


def _idle(step: OutlinedStep, surveyed: Survey) -> list[Trap]:
    """What is said about the recipe's own policy, where it recomputes in vain."""
    policy = step.recipe.recompute.chosen()
    if policy not in POLICIES:
        return []
    costs, blocks = surveyed.costs, surveyed.traces["none"].blocks
    saved = {
        name: int(keep - recompute)
        for name, (keep, _, recompute) in zip(costs.names, costs.saved, strict=True)
    }
    options = options_of(policy, costs.names)
    upstream = {name: options[name] for name in costs.names if blocks[name].backward is None}
    return idle_recompute(upstream, saved)
