"""Predicts the device memory of a recipe's training step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config import OptimizerSection, Recipe
from longtake.data.catalog import Catalog
from longtake.data.training_captions import all_captions
from longtake.errors import PlanError
from longtake.formatting import format_size
from longtake.models import numerics
from longtake.models.components import Components, Kinds, outline
from longtake.models.frozen_adapter import attach_adapters
from longtake.models.objective import (
    FlowBatch,
    build_objective,
    outline_batch,
    training_losses,
)
from longtake.models.quantized import quantize_linears
from longtake.models.review import refuse_sharing
from longtake.models.streamed import streamed_bytes
from longtake.models.trainable import adapter_layers, layers_by_rule
from longtake.optim import master_weights, muon
from longtake.optim.build import EIGHT_BIT_BLOCK, choose_optimizers, rules_of_weights
from longtake.optim.fused_backward import refuse_fused_ranks
from longtake.optim.own import own_states, refuse_own_optimizer
from longtake.parallel import context_parallel, fsdp, mesh
from longtake.parallel.transfer import pinned_bytes
from longtake.planner.batch_sizes import StageBatch, bucket_tokens, largest_batch, refuse_idle_ranks
from longtake.planner.block_weights import can_quantize, module_bytes
from longtake.planner.devices import DeviceBudget, Target, rounded
from longtake.planner.encoding import ahead_bytes
from longtake.planner.fake_tensors import FakeTokenSharing, empty_like
from longtake.planner.record import (
    BlockWeights,
    OptimizerBytes,
    PolicyForecast,
    StaticMemory,
    quantization_of,
)
from longtake.planner.trace import StepTrace, Subject, Tracer

_EIGHT_BIT_MAP_BYTES = 256 * 4
"""Bytes of the table of 256 levels of an 8-bit optimizer state; each state has its own."""
_EIGHT_BIT_STEP_BYTES = 8
"""Bytes that an 8-bit optimizer's update takes per element of the largest parameter; measured on a
CPU."""
_GATHERED_BLOCKS = 3  # copies of blocks that FSDP2 holds at a time: see `_elsewhere_bytes`


@dataclass(frozen=True)
class StepFacts:
    """Sizes of a recipe's training step that are known once its model is outlined."""

    precision: numerics.Precision
    batch: StageBatch  # micro-batch with the most tokens of all stages; if it fits, all others do
    stages: tuple[StageBatch, ...]  # largest micro-batch of each stage
    world_size: int  # processes of the launch
    per_node: int  # processes of one node
    block_names: tuple[str, ...]  # in running order
    base_weights: BlockWeights  # treatment of frozen weights under named recompute policies
    host_room: int  # bytes of host memory that streamed weights and offloaded activations may take
    num_parameters: int
    num_trainable: int
    trainable_bytes: int
    encoding_bytes: int  # activations of encoders that run ahead (`training.encode_ahead`)
    rules: Mapping[str, int]  # trained parameters of each of the recipe's rules


Outlined = tuple[Components, Tracer]
"""The parts of a training step on the meta device, and the tracer that runs it."""


@dataclass(frozen=True)
class MetaStep(StepFacts):
    """Training step of a recipe's largest micro-batch, ready to be traced on meta tensors.

    Of a plan that is read from the cache, the model is outlined when it is first asked for.
    """

    recipe: Recipe
    device: DeviceBudget
    find_outlined: Callable[[], Outlined] = field(compare=False, repr=False)

    @property
    def components(self) -> Components:
        """The model, codec and text encoder, on the meta device."""
        return self.find_outlined()[0]

    @property
    def tracer(self) -> Tracer:
        return self.find_outlined()[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one sample that attend to each other, with text and references."""
        return self.batch.num_tokens // self.batch.micro_batch_size

    @property
    def num_shards(self) -> int:
        return mesh.shard_size(self.recipe.parallel, self.world_size, self.per_node)

    @property
    def is_accumulating(self) -> bool:
        """True if an optimizer update of some stage sums gradients of several micro-batches."""
        return any(batch.num_micro_batches > 1 for batch in self.stages)

    @property
    def num_copies(self) -> int:
        return self.world_size // self.num_shards

    @cached_property
    def static(self) -> StaticMemory:
        """Memory that stays, without inputs and with all weights on the device."""
        return _static_of(self)

    @property
    def gathers_in_bf16(self) -> bool:
        return self.recipe.parallel.param_dtype == self.precision == "bf16"


def outline_step(
    recipe: Recipe,
    device: DeviceBudget,
    world_size: int = 1,
    per_node: int | None = None,
    quantized: Kinds | None = None,
) -> MetaStep:
    """Outline a recipe's largest training step over all stages; reads neither catalog nor weights.

    Args:
        recipe: recipe of the training.
        device: device that is planned for.
        world_size: number of processes of the launch.
        per_node: number of processes of one node; None: all.
        quantized: kinds of quantisation that an earlier launch chose for model.quantize = "auto".

    Raises:
        RecipeError: the recipe's parts do not fit together, or a rank would have no clip.
        PlanError: host memory is too small for `model.stream = "all"`.
    """
    per_node = min(per_node or world_size, world_size)
    num_shards = mesh.shard_size(recipe.parallel, world_size, per_node)
    # Ranks that share the tokens of a clip count as one for batches.
    data_size = world_size // recipe.parallel.context
    refuse_idle_ranks(recipe, data_size)
    refuse_fused_ranks(recipe.optimizer, world_size)
    components = _outline_model(recipe, num_shards, per_node)
    lengths = bucket_tokens(recipe, components)
    stages = recipe.data.curriculum()
    batches = tuple(largest_batch(recipe, stage, lengths, data_size) for stage in stages)
    # Of micro-batches with equal tokens, the one with the longest clips: attention is quadratic.
    largest = max(batches, key=lambda batch: (batch.num_tokens, lengths[batch.bucket]))
    precision = _planned_precision(recipe, device)
    quantize_as_given(components, recipe, quantized)
    _refuse_missing_products(recipe, device)
    pinned = pinned_beside_bytes(components, recipe, precision, device, num_shards)
    blocks = components.family.blocks(components.model)
    _refuse_missing_host_memory(recipe, blocks, device.host_bytes - pinned)
    # Weights are streamed and activations offloaded on a GPU that holds a whole model.
    is_whole = num_shards == 1 and device.target == "cuda"
    subject = replace(
        _make_subject(recipe, components, largest, precision, device.target),
        is_accumulating=any(batch.num_micro_batches > 1 for batch in batches),
        num_shards=num_shards,
        gathers_in_bf16=num_shards > 1 and recipe.parallel.param_dtype == precision == "bf16",
        weights=_offered_weights(recipe, blocks, is_whole, quantized),
        quantize_gain=recipe.model.quantize_gain,
        offloads=is_whole,
        host_bytes=max(0, device.host_bytes - pinned),
    )
    outlined = components, Tracer(subject, device)
    return MetaStep(
        precision=precision,
        batch=largest,
        stages=batches,
        world_size=world_size,
        per_node=per_node,
        encoding_bytes=_bytes_ahead(recipe, components, largest, device),
        recipe=recipe,
        device=device,
        find_outlined=lambda: outlined,
        **_sizes(subject, recipe),
    )


def _count_by_rule(recipe: Recipe, model: nn.Module) -> dict[str, int]:
    """Count the trained parameters of each of `trainable.rules` and `optimizer.rules`, by its text.

    Raises:
        RecipeError: one of `optimizer.rules` is for no parameter.
    """
    found, layers = Counter[str](), dict(adapter_layers(model))
    for rule, names in layers_by_rule(list(layers), recipe.trainable).items():
        trained = (each for name in names for each in layers[name].parameters())
        text = (
            f"{', '.join(rule.layers)} (trainable.rules, rank {rule.rank or recipe.trainable.rank})"
        )
        found[text] = sum(each.numel() for each in trained if each.requires_grad)
    for parameter, rate in rules_of_weights(model, recipe.optimizer).items():
        text = f"{', '.join(rate.layers)} (optimizer.rules, factor {rate.factor:g})"
        found[text] += parameter.numel()
    return dict(found)


def _sizes(subject: Subject, recipe: Recipe) -> dict[str, Any]:
    """Return the fields of `StepFacts` that describe the model."""
    trained = [each for each in subject.model.parameters() if each.requires_grad]
    return {
        "block_names": tuple(subject.blocks),
        "base_weights": subject.weights[0],
        "host_room": subject.host_bytes or 0,
        "num_parameters": numerics.count_weights(subject.model),
        "num_trainable": sum(each.numel() for each in trained),
        "trainable_bytes": sum(each.nbytes for each in trained),
        "rules": _count_by_rule(recipe, subject.model),
    }


def _planned_precision(recipe: Recipe, device: DeviceBudget) -> numerics.Precision:
    wanted = recipe.training.precision
    if wanted == "auto" and device.target == "cuda":
        return "bf16"  # which every GPU that can be planned for supports
    return numerics.choose_precision(wanted, torch.device("cpu"))


def step_of_facts(facts: StepFacts, recipe: Recipe, device: DeviceBudget) -> MetaStep:
    """Return the step of a recipe whose facts are known, to be outlined if something needs it."""

    @cache
    def outlined() -> Outlined:
        return outline_step(recipe, device, facts.world_size, facts.per_node).find_outlined()

    return MetaStep(**vars(facts), recipe=recipe, device=device, find_outlined=outlined)


def _outline_model(recipe: Recipe, num_shards: int, per_node: int) -> Components:
    """Build the model, codec and text encoder on the meta device, as one rank trains them."""
    components = outline(recipe, _captions(recipe))
    attach_adapters(recipe, components.model, components.family, torch.device("meta"))
    refuse_sharing(components, recipe)
    family, model = components.family, components.model
    refuse_own_optimizer([p for p in model.parameters() if p.requires_grad], recipe.optimizer)
    if (size := recipe.parallel.context) > 1:
        sharing = context_parallel.heads_size(family.block.num_heads(model), size, per_node)
        family.block.share_tokens(model, FakeTokenSharing(size, sharing))
    model.train()
    if num_shards == 1:
        # For sharded weights, FSDP2's `reduce_dtype` does it.
        fsdp.accumulate_in_fp32(model)
    return components


def quantize_as_given(
    components: Components, recipe: Recipe, quantized: Kinds | None = None
) -> None:
    """Quantise the model's blocks as the recipe says, or as an earlier launch chose with "auto"."""
    names = {module: name for name, module in components.model.named_modules()}
    named = recipe.model.quantize
    for block in components.family.blocks(components.model):
        kind = (quantized or {}).get(names[block]) if named == "auto" else named
        if kind is not None and kind != "none":
            quantize_linears(block, kind)


def _bytes_ahead(
    recipe: Recipe, components: Components, batch: StageBatch, device: DeviceBudget
) -> int:
    """Return the bytes of encoding the next micro-batch beside a step, if the recipe wants it."""
    if recipe.training.encode_ahead is not True or device.target != "cuda":
        return 0
    return ahead_bytes(recipe, components, batch, device) or 0


def _refuse_missing_products(recipe: Recipe, device: DeviceBudget) -> None:
    if recipe.model.quantize == "fp8_dynamic" and not device.fp8_rate:
        raise PlanError(
            f'model.quantize = "fp8_dynamic" multiplies in fp8, which {device.name} cannot: GPUs '
            'from Ada and Hopper on can. Set it to "int8_dynamic", or to "fp8", which multiplies '
            "in bf16."
        )


def _refuse_missing_host_memory(recipe: Recipe, blocks: Sequence[nn.Module], room: int) -> None:
    needed = sum(map(streamed_bytes, blocks))
    if recipe.model.stream == "all" and needed > room:
        raise PlanError(
            f'model.stream = "all" keeps {format_size(needed)} of weights in host RAM, but a '
            f"process may take {format_size(max(0, room))} of it. Set recompute.host_memory to "
            'more if there is more, or model.stream = "auto".'
        )


def _offered_weights(
    recipe: Recipe, blocks: Sequence[nn.Module], may_stream: bool, quantized: Kinds | None
) -> tuple[BlockWeights, ...]:
    """List the treatments of blocks' frozen weights that a plan may choose; policies use the first.

    If the recipe names a kind of quantisation, the model is quantised already, and `keep` keeps it
    so.
    """
    if recipe.trainable.base() == "full":
        return ("keep",)
    if recipe.model.stream == "all":
        return ("stream",)
    offered: list[BlockWeights] = ["keep"]
    if recipe.model.stream == "auto" and may_stream:
        offered.append("stream")
    if recipe.model.quantize == "auto" and quantized is None:
        places: list[BlockWeights] = ["int8", "nf4"]
        if "stream" in offered:
            places += ["stream-int8", "stream-nf4"]
        # Not fp8, which takes as many bytes as int8, is rounder, and slower to dequantise.
        offered += [each for each in places if can_quantize(quantization_of(each), blocks)]
    return tuple(offered)


def _captions(recipe: Recipe) -> list[str]:
    """Read the captions from which a text encoder of kind "words" makes its vocabulary.

    Empty for other kinds, or if a catalog is missing.
    """
    sources = recipe.data.sources()
    if recipe.text.kind != "words" or not all(path.is_file() for path in sources.values()):
        return []
    captions = all_captions(
        {name: Catalog.load(path) for name, path in sources.items()}, recipe.data
    )
    return captions if any(caption.strip() for caption in captions) else []


def _make_subject(
    recipe: Recipe,
    components: Components,
    largest: StageBatch,
    precision: numerics.Precision,
    target: Target,
) -> Subject:
    """Describe the model and its loss for a tracer, which creates the input tensors itself."""
    family, model = components.family, components.model
    objective = build_objective(recipe)
    outlined = outline_batch(
        objective, components, recipe, largest.bucket, largest.micro_batch_size
    )

    def make_inputs() -> FlowBatch:
        weights = outlined.loss_weights
        return FlowBatch(
            latents=torch.empty(outlined.latents.shape),
            noise=torch.empty(outlined.noise.shape),
            sigmas=torch.empty(outlined.sigmas.shape),
            conditioning=empty_like(outlined.conditioning),
            loss_weights=None if weights is None else torch.empty(weights.shape),
            no_caption=empty_like(outlined.no_caption),
            audio=empty_like(outlined.audio),
            source=next(iter(objective.sources), ""),
        )

    names, blocks = {module: name for name, module in model.named_modules()}, family.blocks(model)
    compiles, updates = recipe.training.compile, None
    if recipe.optimizer.fused_backward:
        updates = optimizer_bytes(model, blocks, recipe.optimizer, precision, target).step
    cpu = torch.device("cpu")
    return Subject(
        model=model,
        blocks={names[block]: block for block in blocks},
        call_blocks_by=lambda call: family.block.call_by(model, call),
        make_inputs=make_inputs,
        loss=lambda batch: training_losses(objective, components, batch, precision, cpu).mean(),
        networks=tuple(objective.networks()),
        updates=updates,
        compiles=target == "cuda" if compiles == "auto" else compiles,
    )


def optimizer_bytes(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    section: OptimizerSection,
    precision: numerics.Precision,
    device_type: str = "cuda",
    held: Callable[[int], int] = int,
) -> OptimizerBytes:
    """Predict the memory that a recipe's optimizers take; the model may be on the meta device.

    Args:
        model: model with trainable parameters.
        blocks: the model's blocks.
        section: the recipe's optimizer section.
        precision: precision of the training.
        device_type: "cpu" or "cuda"; states are offloaded from "cuda" only.
        held: memory that an allocator takes for a tensor, both in bytes.
    """
    adamw, eight_bit, matrices, own, prodigy = choose_optimizers(model, blocks, section)
    offloaded = section.offload and device_type != "cpu"

    def masters(parameters: Sequence[Tensor], offloaded: bool = False) -> int:
        needed = [p for p in parameters if offloaded or p.dtype != torch.float32]
        return sum(held(4 * p.numel()) for p in needed)

    # Two moments and a step counter per parameter.
    adamw_states = sum(2 * held(4 * p.numel()) + held(4) for p in adamw)
    adamw_states += masters(adamw, offloaded)
    # Two states per parameter, each with a scale per block and a table of its levels.
    eight_bit_states = sum(
        2 * (held(p.numel()) + held(p.numel() // EIGHT_BIT_BLOCK * 4) + held(_EIGHT_BIT_MAP_BYTES))
        for p in eight_bit
    )
    # One momentum per parameter.
    muon_states = sum(held(4 * p.numel()) for p in matrices) + masters(matrices)
    prodigy_states = sum(4 * held(4 * p.numel()) for p in prodigy) + masters(prodigy)
    steps = [
        _adamw_step_bytes(adamw, offloaded),
        max((_EIGHT_BIT_STEP_BYTES * parameter.numel() for parameter in eight_bit), default=0),
        _muon_step_bytes(matrices, 2 if precision == "bf16" else 4),
        # Prodigy's distance from the first weights, and a gradient that is cast to fp32.
        max(
            (4 * p.numel() * (1 if p.grad_dtype == torch.float32 else 2) for p in prodigy),
            default=0,
        ),
        4 * sum(p.numel() for p in own),  # temporary tensors of an update by `foreach`
    ]
    on_host = adamw_states if offloaded else 0
    kept = adamw_states + eight_bit_states + muon_states + prodigy_states
    if own:
        states = own_states(own, section)
        unknown = [4 * each.numel() for each in own] * 2  # as many states as AdamW's
        kept += sum(map(held, unknown if states is None else [each.nbytes for each in states]))
    return OptimizerBytes(kept - on_host, on_host, max(steps))


def _adamw_step_bytes(parameters: Sequence[Tensor], offloaded: bool) -> int:
    """Return the bytes of gradients that AdamW's update converts to fp32, one batch at a time."""
    if offloaded:  # on the host; but masters were made on the device, one by one
        return max((4 * p.numel() for p in parameters if p.dtype != torch.float32), default=0)
    rounded = (
        sum(p.numel() for p in batch if p.grad_dtype != torch.float32)
        for batch in master_weights.in_batches(parameters)
    )
    return max((4 * numbers for numbers in rounded), default=0)


def _muon_step_bytes(parameters: list[nn.Parameter], width: int) -> int:
    """Return the most bytes of an update by Muon: directions in fp32, and the iteration's tensors.

    In the iteration's type these are the stack, x twice, A and A^2. If that is narrower than fp32,
    the results are converted back one at a time, while directions, stack and results are still
    there.
    """
    most = 0
    for batch in muon.in_batches(parameters):
        numbers, squares = sum(p.numel() for p in batch), sum(min(p.shape) ** 2 for p in batch)
        iterating = 4 * numbers + 3 * width * numbers + 2 * width * squares
        converted = 0 if width == 4 else 4 * batch[0].numel()
        most = max(most, iterating, (4 + 2 * width) * numbers + converted)
    return most


def foreach_bytes(model: nn.Module) -> int:
    """Return the bytes that an update by torch's default (`foreach`) AdamW would take in addition.

    It keeps the roots of all second moments at once, which longtake's fused updates never do.
    """
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def static_memory(
    step: MetaStep, input_bytes: int = 0, weight_bytes: int | None = None
) -> StaticMemory:
    """Predict the memory of one process that does not depend on how blocks are recomputed.

    It holds weights, gradients, optimizer states, averages, encoders and inputs.

    Args:
        step: training step to predict.
        input_bytes: bytes of one micro-batch's inputs.
        weight_bytes: bytes of the model on the device, if some weights are streamed or quantised.
    """
    known = step.static
    # A GPU gets the next micro-batch while this one is computed.
    is_ahead = step.device.target == "cuda" and step.is_accumulating
    return replace(
        known,
        weights=known.weights if weight_bytes is None else weight_bytes - known.elsewhere,
        inputs=input_bytes,
        inputs_ahead=input_bytes if is_ahead else 0,
    )


def _static_of(step: MetaStep) -> StaticMemory:
    """Predict the memory that stays, without inputs and with all weights on the device."""
    recipe, components, shards = step.recipe, step.components, step.num_shards
    model, blocks = components.model, components.family.blocks(components.model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_bytes(
        model,
        blocks,
        recipe.optimizer,
        step.precision,
        step.device.target,
        partial(rounded, multiple=step.device.granule),
    )
    frozen = [*components.codec.modules(), *components.text.modules()]
    elsewhere = _elsewhere_bytes(step)
    held = (model, *step.tracer.subject.networks)
    is_replicated = shards == 1 and step.world_size > 1
    buckets = fsdp.gradient_buckets(model, blocks) if is_replicated else ()
    gradients = [(p.grad_dtype or p.dtype).itemsize * p.numel() for p in trained]
    at_once = max if recipe.optimizer.fused_backward else sum
    return StaticMemory(
        weights=sum(module_bytes(each, step.device.granule) for each in held) - elsewhere,
        elsewhere=elsewhere,
        gradients=at_once([0, *gradients]) // shards,
        reduced=max(map(fsdp.bucket_bytes, buckets), default=0),
        optimizer=OptimizerBytes(
            optimizer.device // shards, optimizer.host // shards, optimizer.step // shards
        ),
        inputs=0,
        inputs_ahead=0,
        ema=len(recipe.ema.averages()) * sum(4 * p.numel() for p in trained) // shards,
        encoders=0 if recipe.data.cache is not None else sum(map(module_bytes, frozen)),
        encoding=step.encoding_bytes,
        pinned_beside=pinned_beside_bytes(components, recipe, step.precision, step.device, shards),
    )


def pinned_beside_bytes(
    parts: Components,
    recipe: Recipe,
    precision: numerics.Precision,
    device: DeviceBudget,
    shards: int,
) -> int:
    """Return the page-locked host bytes of a process for checkpoints and offloaded optimizers.

    They hold a checkpoint's states while they are written in the background, and gradients on their
    way to an offloaded optimizer. Streamed weights and offloaded activations are not included.
    """
    if device.target != "cuda":
        return 0

    def held(num_bytes: int) -> int:
        return shards * pinned_bytes(-(-num_bytes // shards))

    model, section = parts.model, recipe.optimizer
    blocks, averages = parts.family.blocks(model), len(recipe.ema.averages())
    trained = [each for each in model.parameters() if each.requires_grad]
    states = optimizer_bytes(model, blocks, section, precision, held=held)
    staged = sum(held(each.nbytes) + averages * held(4 * each.numel()) for each in trained)
    coming = 0
    if section.offload:
        adamw = choose_optimizers(model, blocks, section)[0]
        # Three batches: that of the update, the next one, and the one before, whose weights are
        # still being copied back. Memory that was freed serves tensors of its own size only.
        batches = [
            Counter(held((each.grad_dtype or each.dtype).itemsize * each.numel()) for each in batch)
            for batch in master_weights.in_batches(adamw)
        ]
        most = Counter[int]()
        for first in range(len(batches)):
            most |= sum(batches[first : first + 3], Counter[int]())
        coming = sum(size * count for size, count in most.items())
    return (staged + states.device + coming) // shards


def policy_forecast(
    policy: str, trace: StepTrace, step: MetaStep, overhead: float | None = None
) -> PolicyForecast:
    """Predict the memory and time of a step: its trace, plus optimizer states and all that stays.

    On several processes it is an estimate, as of the buffers of collectives only FSDP2's are
    included.
    """
    static = static_memory(step, trace.input_bytes, trace.weight_bytes)
    budget_bytes = step.device.budget_bytes
    peak = trace.peak_bytes - static.elsewhere
    step_peak = max(static.resident + peak, static.update_bytes)
    fits = step_peak <= (budget_bytes or 0) and trace.host_bytes <= step.host_room
    return PolicyForecast(
        name=policy,
        forward_end_bytes=trace.forward_end_bytes - static.elsewhere,
        peak_bytes=peak,
        step_peak_bytes=step_peak,
        overhead=overhead,
        fits=None if budget_bytes is None else fits,
        host_bytes=trace.host_bytes,
        link_share=trace.link_seconds / trace.seconds,
    )


def gathered_itemsize(parameter: Tensor, step: MetaStep) -> int:
    return min(2, parameter.itemsize) if step.gathers_in_bf16 else parameter.itemsize


def beside_encoding(step: MetaStep, static: StaticMemory | None) -> int:
    """Return the bytes that are taken while encoders work in line with the model's steps.

    They are weights, states and averages, and the gradients of earlier micro-batches. `static` is
    the memory under the chosen policy; None if the step is not traced.
    """
    static = static or static_memory(step)
    there = static.weights + static.resident - static.encoding
    return there + static.gradients if step.is_accumulating else there


def _elsewhere_bytes(step: MetaStep) -> int:
    """Return the bytes of weights that are on other ranks only, for a model sharded by FSDP2.

    Weights that this rank gathers at a time are subtracted: FSDP2 gathers copies of the running and
    of the next block, and keeps the buffer of the all-gather before.
    """
    if step.num_shards == 1:
        return 0

    def gathered(module: nn.Module) -> int:
        weights = sum(gathered_itemsize(p, step) * p.numel() for p in module.parameters())
        return weights + sum(buffer.nbytes for buffer in module.buffers())

    model = step.components.model
    whole = module_bytes(model)
    in_blocks = [gathered(block) for block in step.components.family.blocks(model)]
    at_once = _GATHERED_BLOCKS * max(in_blocks) + gathered(model) - sum(in_blocks)
    return whole - whole // step.num_shards - at_once
