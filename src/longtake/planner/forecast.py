"""Forecasts before the first step whether a training fits the memory and reaches all parameters.

No weights are read.
"""

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import longtake
from longtake import config, errors
from longtake.formatting import first_line, format_size
from longtake.models.codec import Codec
from longtake.models.components import Kinds
from longtake.models.lora_files import read_lora
from longtake.models.trainable import adapter_layers
from longtake.planner import encoding, memory, solver
from longtake.planner.activation_checkpointing import options_of
from longtake.planner.attention_check import KernelChooser
from longtake.planner.devices import SHARE_OF_HOST_MEMORY, DeviceBudget
from longtake.planner.record import (
    BlockWeights,
    Options,
    PolicyForecast,
    StaticMemory,
)
from longtake.planner.trace import StepTrace
from longtake.planner.traps import Trap, costly_policies, flow_traps, idle_recompute

_NOT_TRACED = ("optimizer.", "data.cache", "data.windows", "parallel.")
"""Prefixes of recipe keys that leave a rank's operations in forward and backward pass unchanged, so
that a change of theirs needs no new trace."""
_PIXELS = 32
"""Multiple to which heights and widths of suggested clips are rounded; codecs and patches of the
shipped models divide it."""
_LEAST_PIXELS = 64


@dataclass(frozen=True)
class GradientFlow:
    """Names of the trainable parameters that the backward pass reaches, and of the others."""

    reached: Sequence[str]
    unreached: Sequence[str]
    traps: Sequence[Trap]

    @property
    def fatal(self) -> list[Trap]:
        return [trap for trap in self.traps if trap.stops]

    def refuse_fatal(self) -> None:
        if self.fatal:
            raise errors.PlanError(
                "\n".join(["Not everything would train.", *map(str, self.fatal)])
            )


@dataclass(frozen=True, kw_only=True)
class ForecastFacts:
    """What traces of a training step show: its memory, time and gradients."""

    static: StaticMemory
    gradients: GradientFlow
    traces: Mapping[str, StepTrace] = field(default_factory=dict)
    """Traces of the step by named recompute policy; empty if it cannot be traced. If nothing fits
    and weights can be streamed, `all+stream` (or `all+stream-nf4` ...) takes the least memory that
    is possible."""
    policies: Sequence[PolicyForecast] = ()
    best: solver.BestOptions | None = None  # fastest that fits; without a budget, all kept
    best_policy: PolicyForecast | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast(ForecastFacts):
    """Everything that is predicted about a training step before it runs."""

    step: memory.MetaStep

    @property
    def device(self) -> DeviceBudget:
        return self.step.device

    @property
    def precision(self) -> str:
        """Number type in which the model computes."""
        return "bf16" if self.step.recipe.model.dtype == "bf16" else self.step.precision

    @property
    def misses(self) -> bool:
        return bool(self.policies) and self.best is None

    @property
    def least(self) -> PolicyForecast:
        return min(self.policies, key=lambda row: row.step_peak_bytes)

    @property
    def best_or_least(self) -> PolicyForecast | None:
        """Forecast of the best recompute policy; if none fits, of the one that takes least memory.

        None if nothing is traced.
        """
        return self.best_policy or (self.least if self.policies else None)

    @property
    def chosen(self) -> tuple[Options, StepTrace] | None:
        """Options and trace of the best mixture of blocks, or of the policy with least memory.

        None if nothing is traced.
        """
        if self.best is not None:
            return self.best.options, self.best.traced
        if not self.policies:
            return None
        name = self.least.name
        policy, _, weights = name.partition("+")
        named = (each for each in get_args(BlockWeights) if each == weights)
        base: BlockWeights = next(named, self.step.base_weights)
        options = options_of(policy, self.step.block_names, base)
        return options, self.traces[name]

    @property
    def pinned_host_bytes(self) -> int:
        """Page-locked host bytes of a rank, under the best (or least demanding) policy."""
        row = self.best_or_least
        return 0 if row is None else row.host_bytes

    @property
    def needed_host_bytes(self) -> int:
        """Host RAM that a node needs, in bytes; only a share of a node's RAM may be page-locked."""
        pinned = self.pinned_host_bytes + self.static.pinned_beside
        ranks = self.step.per_node or self.step.world_size
        unpinned = 2 * self.static.optimizer.host  # a checkpoint is written from copies
        return int(ranks * (pinned / SHARE_OF_HOST_MEMORY + unpinned))

    def policy(self, name: str) -> PolicyForecast:
        rows = [*self.policies, self.best_policy]
        return next(row for row in rows if row is not None and row.name == name)

    @property
    def foreach_bytes(self) -> int:
        section = self.step.recipe.optimizer
        is_plain = section.kind == "adamw" and not section.offload
        return self.step.trainable_bytes if is_plain else 0  # as `memory.foreach_bytes`


def forecast(
    recipe: config.Recipe,
    device: DeviceBudget,
    *,
    world_size: int = 1,
    per_node: int | None = None,
    quantized: Kinds | None = None,
    kernels: KernelChooser | None = None,
    tries_more: bool = False,
) -> Forecast:
    """Trace a recipe's step under every recompute policy, find the best that fits, and find traps.

    The arguments are those of `outline_step` and `solver.find_best`; `kernels` chooses attention
    kernels.

    Raises:
        RecipeError: the recipe's parts do not fit together.
        PlanError: the model cannot run on tensors without values.
    """
    step = memory.outline_step(recipe, device, world_size, per_node, quantized)
    gradients = check_gradients(step)
    untraced = Forecast(step=step, static=memory.static_memory(step), gradients=gradients)
    if gradients.fatal:  # torch may fail in such a step
        return untraced
    if kernels is not None:
        # Before the traces, as kernels differ in what they save.
        kernels.choose(step.tracer.attentions)
    try:
        sweep = solver.sweep_policies(step.tracer)
    except errors.CannotBePlannedError as error:
        # Nothing depends on the plan here, so that such a model still trains.
        if recipe.recompute.chosen() == "none" and recipe.recompute.memory is None:
            gradients = replace(gradients, traps=[*gradients.traps, _UNPLANNED])
            return replace(untraced, gradients=gradients)
        raise errors.CannotBePlannedError(
            "\n".join([str(error), *map(str, gradients.traps)])
        ) from error
    traces = dict(sweep.traces)
    traps = [*gradients.traps, *policy_traps(step, traces)]
    best = _find_best(step, sweep, tries_more=tries_more)
    # Nothing fits: show the least that streamed and rounded weights make possible, too.
    if best is None and len(step.tracer.subject.weights) > 1:
        last = step.tracer.subject.weights[-1]
        least = options_of("all", step.block_names, last)
        traces[f"all+{last}"] = step.tracer.trace(least)

    def row(name: str, trace: StepTrace) -> PolicyForecast:
        return memory.policy_forecast(name, trace, step, sweep.overhead(trace))

    return replace(
        untraced,
        static=memory.static_memory(step, traces["none"].input_bytes, traces["none"].weight_bytes),
        gradients=replace(gradients, traps=traps),
        traces=traces,
        policies=[row(name, trace) for name, trace in traces.items()],
        best=best,
        best_policy=None if best is None else row("best", best.traced),
    )


_UNPLANNED = Trap(
    "model",
    "Its blocks do not run once each in their order, so the memory of a step cannot be planned. It "
    "trains all the same, as the recipe wants no recompute and names no memory.",
    "Call every block once, outside of checkpoint calls, and its memory is planned.",
    stops=False,
)


def check_gradients(step: memory.MetaStep) -> GradientFlow:
    """Find the trainable parameters that gradients of a step reach, and traps that cut others off.

    Raises:
        PlanError: the step fails on tensors without values, or altogether.
    """
    try:
        with _torch_is_quiet():
            watch = step.tracer.watch_gradients()
    # Their messages name the cause already.
    except errors.LongtakeError:
        raise
    except DataDependentOutputException as error:
        raise errors.CannotBePlannedError(
            f"The model cannot be planned{_where(error)}: a tensor's value is asked for. A plan "
            "runs the model on tensors that have a shape but no values, so it can follow no "
            ".item() and no `if` on a tensor. Compute with tensors there, such as by torch.where."
        ) from error
    except Exception as error:  # a user's module may raise anything
        if _NUMPY_REFUSED in str(error):
            raise errors.CannotBePlannedError(
                f"The model cannot be planned{_where(error)}: numpy is to compute with a tensor. A "
                "plan runs the model on tensors that have a shape but no values, which numpy "
                "cannot read. In training numpy keeps no gradient and waits for the device: "
                "compute with torch there."
            ) from error
        reason = first_line(error)
        raise errors.PlanError(
            f"The model cannot be run{_where(error)}: {type(error).__name__}: {reason}. A training "
            "step would fail in the same way."
        ) from error
    return GradientFlow(watch.reached(), watch.unreached(), flow_traps(watch))


_NUMPY_REFUSED = ".numpy() is not supported for tensor subclasses"
"""torch's message when numpy asks for the values of a tensor without values."""


@contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """Silence torch's log of a wrong shape in a fake mode; the error says it in fewer lines."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _where(error: Exception) -> str:
    """Return the innermost code line of an error outside of torch and longtake, or ""."""
    known = (*torch.__path__, *longtake.__path__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(known)]
    if not places:
        return ""
    return f" ({places[-1].filename}, line {places[-1].lineno}: {places[-1].line})"


def policy_traps(step: memory.MetaStep, traces: Mapping[str, StepTrace]) -> list[Trap]:
    """Find blocks that are recomputed for nothing, and recompute policies that cost memory.

    `traces` of the step are by policy, and include `none`.
    """
    traps = costly_policies({name: trace.peak_bytes for name, trace in traces.items()})
    policy, kept = step.recipe.recompute.chosen(), traces["none"]
    if policy not in traces:
        return traps
    options = options_of(policy, step.block_names)
    # Blocks that no gradient passes save nothing, so that recomputing them is idle.
    no_gradient = {
        name: options[name].activations
        for name, block in kept.blocks.items()
        if block.backward is None
    }
    chosen = traces[policy].blocks
    saved = {
        name: (block.forward.end_bytes - block.forward.begin_bytes)
        - (chosen[name].forward.end_bytes - chosen[name].forward.begin_bytes)
        for name, block in kept.blocks.items()
    }
    return [*idle_recompute(no_gradient, saved), *traps]


def _find_best(
    step: memory.MetaStep, sweep: solver.PolicySweep, *, tries_more: bool
) -> solver.BestOptions | None:
    if step.device.budget_bytes is None:
        return solver.find_best(step.tracer, sweep, None)
    static = memory.static_memory(step, sweep.traces["none"].input_bytes)
    # The solver sees forward and backward pass only, so its budget is what the rest leaves.
    beside = static.resident - static.elsewhere
    budget = step.device.budget_bytes - beside
    update = static.update_bytes - beside
    return solver.find_best(step.tracer, sweep, budget, update, tries_more=tries_more)


@dataclass(frozen=True)
class ChangedStep:
    """The training step of a changed recipe, its blocks treated as the forecast chose."""

    step: memory.MetaStep
    trace: StepTrace
    policy: PolicyForecast


def what_if(known: Forecast, changes: Sequence[str]) -> ChangedStep | None:
    """Forecast a training step after changes of the recipe, written as for `--set`.

    None if the changed recipe is invalid.
    """
    chosen, step = known.chosen, known.step
    assert chosen is not None
    options, trace = chosen
    try:
        recipe = config.changed(step.recipe, changes)
        # The old trace is still right, and tracing takes seconds; but updates may be in it.
        updates = recipe.optimizer.fused_backward or step.recipe.optimizer.fused_backward
        if not updates and all(change.startswith(_NOT_TRACED) for change in changes):
            step = replace(step, recipe=recipe)
        else:
            step = memory.outline_step(recipe, known.device, step.world_size, step.per_node)
            offered = step.tracer.subject.weights
            options = {
                # The changed recipe may not offer streaming or quantisation.
                name: each if each.weights in offered else replace(each, weights=offered[0])
                for name, each in options.items()
            }
            trace = step.tracer.trace(options)
    except errors.LongtakeError:  # smaller shapes may not divide into the codec's or the model's
        return None
    name = "best" if known.best else known.least.name
    return ChangedStep(step, trace, memory.policy_forecast(name, trace, step))


@dataclass(frozen=True)
class Suggestion:
    """A suggested change of a recipe that does not fit, and the least memory of a step with it."""

    what: str
    changes: Sequence[str]  # in the form of `--set`
    policy: str  # recompute policy that takes least
    step_peak_bytes: int
    host_bytes: int
    short: tuple[str, ...]  # kinds of memory that would still be too small

    @property
    def fits(self) -> bool:
        return not self.short

    def __str__(self) -> str:
        settings = " ".join(f"--set '{change}'" for change in self.changes)
        needed = f"{format_size(self.step_peak_bytes)} of GPU memory"
        if self.host_bytes:
            needed += f" and {format_size(self.host_bytes)} of host RAM"
        result = f"still too much {' and '.join(self.short)}" if self.short else "fits"
        return f"{self.what}: {needed}, {result} ({settings})"


def short_memory(step: memory.MetaStep, policy: PolicyForecast) -> tuple[str, ...]:
    """Return the kinds of memory (GPU, host RAM) of which a recompute policy needs too much."""
    budget, kinds = step.device.budget_bytes, list[str]()
    if budget is not None and policy.step_peak_bytes > budget:
        kinds.append("GPU memory")
    if policy.host_bytes > step.host_room:
        kinds.append("host RAM")
    return tuple(kinds)


def suggest_changes(known: Forecast) -> list[Suggestion]:
    """Try changes of a recipe that does not fit the memory; return the most helpful first.

    If no single change is enough, the last suggestion makes all of them together.
    """
    least, helping = known.least, list[Suggestion]()
    for what, changes in _possible_changes(known):
        tried = _suggestion(known, what, changes)
        if tried and (
            tried.step_peak_bytes < least.step_peak_bytes or tried.host_bytes < least.host_bytes
        ):
            helping.append(tried)
    # Changes that fit come first, then those that need least.
    helping.sort(key=lambda each: (len(each.short), each.step_peak_bytes))
    if len(helping) < 2 or any(suggestion.fits for suggestion in helping):
        return helping
    joined: dict[str, str] = {}
    for suggestion in helping:
        keys = [change.partition("=")[0] for change in suggestion.changes]
        # Of two changes of a key the more helpful wins, which came first. 8-bit states cannot be
        # offloaded as well.
        is_offloaded = "optimizer.kind" in keys and "optimizer.offload" in joined
        if not is_offloaded and joined.keys().isdisjoint(keys):
            joined |= dict(zip(keys, suggestion.changes, strict=True))
    together = _suggestion(known, "all of these together", list(joined.values()))
    return [*helping, together] if together else helping


def _suggestion(known: Forecast, what: str, changes: Sequence[str]) -> Suggestion | None:
    changed = what_if(known, changes)
    if changed is None:
        return None
    policy, short = changed.policy, short_memory(changed.step, changed.policy)
    return Suggestion(what, changes, policy.name, policy.step_peak_bytes, policy.host_bytes, short)


def _possible_changes(known: Forecast) -> Iterator[tuple[str, list[str]]]:
    step, recipe = known.step, known.step.recipe
    host_is_short = "host RAM" in short_memory(step, known.least)
    if step.batch.micro_batch_size > 1:
        half = step.batch.micro_batch_size // 2
        if step.batch.micro_batch_size * step.batch.num_micro_batches % half == 0:
            yield f"micro-batches of {half}", [f"training.micro_batch_size={half}"]
    yield from _smaller_clips(recipe.data.buckets, step.components.codec)
    if recipe.trainable.base() == "full":
        yield "LoRA instead of all weights", ["trainable.kind=lora"]
    elif recipe.trainable.base() == "lora" and recipe.trainable.rank > 1:
        half = recipe.trainable.rank // 2
        yield f"LoRA of rank {half}", [f"trainable.rank={half}"]
    if recipe.trainable.base() != "full" and recipe.model.quantize == "none":
        yield "frozen weights in 8 bits", ["model.quantize=int8"]
        yield (
            'frozen weights in 4 bits ("auto" instead of nf4: only where the plan needs it)',
            ["model.quantize=nf4"],
        )
        if recipe.model.stream == "none" and known.device.target == "cuda" and not host_is_short:
            yield "frozen weights in host RAM", ["model.stream=all"]
    # Not beside smaller micro-batches, which it refuses.
    if recipe.trainable.base() == "full" and step.batch.micro_batch_size == 1:
        fused = ["optimizer.fused_backward=true", "optimizer.max_grad_norm=1e9"]
        yield "weights updated in the backward pass, and no clipping", fused
    if recipe.model.dtype == "fp32":
        yield "weights in bf16", ["model.dtype=bf16"]
    if not recipe.optimizer.offload and recipe.optimizer.kind == "adamw":
        if known.device.target == "cuda" and not host_is_short:
            yield "optimizer states in host RAM", ["optimizer.offload=true"]
        yield "optimizer states in 8 bits (needs torchao)", ["optimizer.kind=adamw8bit"]
    if recipe.training.encode_ahead is True:
        yield "encoders in line with the model", ["training.encode_ahead=false"]
    if known.static.encoders:
        yield "cached latents and prompts", ["data.cache=cache", "data.windows=1"]


@dataclass(frozen=True)
class EncodingAhead:
    """Decision whether to encode the next micro-batch on a CUDA stream while the model trains."""

    num_bytes: int | None  # that a step takes in addition; None: an encoder cannot be traced
    is_chosen: bool


def encoding_ahead(step: memory.MetaStep, policy: PolicyForecast | None) -> EncodingAhead | None:
    """Decide `training.encode_ahead` = "auto" by the GPU memory that a recompute policy leaves.

    Returns:
        None if no encoder works in a step, on a CPU, or if the recipe says false.
    """
    recipe, budget = step.recipe, step.device.budget_bytes
    wanted = recipe.training.encode_ahead
    if wanted is False or not recipe.encodes_in_steps() or step.device.target != "cuda":
        return None
    # The step counts the encoders' memory already: see `outline_step`.
    if wanted is True:
        return EncodingAhead(step.encoding_bytes or None, is_chosen=True)
    more = encoding.ahead_bytes(recipe, step.components, step.batch, step.device)
    if more is None or policy is None or budget is None:
        return EncodingAhead(more, is_chosen=False)
    return EncodingAhead(more, policy.step_peak_bytes + more <= budget)


def half_as_long(num_frames: int, codec: Codec) -> int:
    """Return the number of frames of a clip nearest to half of a number that the codec encodes."""
    chunks = round((num_frames / 2 - codec.shortest) / codec.chunk)
    return codec.shortest + max(0, chunks) * codec.chunk


def _smaller_clips(
    buckets: Sequence[config.Bucket], codec: Codec
) -> Iterator[tuple[str, list[str]]]:
    def less(pixels: int) -> int:
        return min(pixels, max(_LEAST_PIXELS, round(0.75 * pixels / _PIXELS) * _PIXELS))

    def change(shapes: Sequence[config.Bucket]) -> tuple[str, list[str]]:
        once = list(dict.fromkeys(shapes))
        each = ", ".join(shape.toml() for shape in once)
        return ", ".join(map(str, once)), [f"data.buckets=[{each}]"]

    yield change(
        [s.model_copy(update={"height": less(s.height), "width": less(s.width)}) for s in buckets]
    )
    if any(shape.num_frames > 1 for shape in buckets):
        halves = {shape.num_frames: half_as_long(shape.num_frames, codec) for shape in buckets}
        yield change([s.model_copy(update={"num_frames": halves[s.num_frames]}) for s in buckets])


@dataclass(frozen=True)
class StoredStart:
    """The LoRA weights of `trainable.init_from`, with which a run begins."""

    num_layers: int  # layers with LoRA in the file
    num_trained: int  # layers with LoRA in the model
    rank: int  # highest rank


def stored_start(step: memory.MetaStep) -> StoredStart | None:
    """Read sizes of the LoRA weights that `trainable.init_from` names; None if it is unset.

    Raises:
        ModelError, RecipeError: as `read_lora`, which training calls before its first step.
    """
    file = step.recipe.trainable.init_from
    if file is None:
        return None
    parts = step.components
    layers = read_lora(file, parts.model, parts.family, step.recipe.model.expert)
    rank = max(layer.rank for layer in layers.values())
    return StoredStart(len(layers), len(list(adapter_layers(parts.model))), rank)
