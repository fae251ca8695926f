"""One training step of a recipe without weights and values, ready to be traced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.config import Bucket, Recipe
from longtake.data.batch import num_places
from longtake.models.build import Components, latent_shape, outline, refuse_sharing
from longtake.models.numerics import Precision, choose_precision
from longtake.models.objective import FlowBatch, flow_losses, outline_conditioning
from longtake.parallel.fsdp import accumulate_in_fp32
from longtake.parallel.mesh import shard_size
from longtake.planner.devices import Device
from longtake.planner.fake_tensors import FakeTokenSharing
from longtake.planner.trace import Subject, Tracer
from longtake.training.share import refuse_idle_ranks


@dataclass(frozen=True)
class OutlinedStep:
    """A micro-batch's way through the model."""

    recipe: Recipe
    parts: Components
    """On the meta device."""
    tracer: Tracer
    bucket: Bucket
    """The shape of clips that makes the most tokens: the others fit if it does."""
    num_tokens: int
    """Of one sample of it, that attend to each other; those of text and references included."""
    precision: Precision
    micro_batch_size: int
    num_micro_batches: int
    """Of one process, for one update."""
    world_size: int
    """Processes that share a batch."""
    per_node: int
    """Of these, those of one node."""

    @property
    def num_shards(self) -> int:
        """Processes that hold one copy of the model between them; 1 where each holds all of it."""
        return shard_size(self.recipe.parallel, self.world_size, self.per_node)

    @property
    def num_copies(self) -> int:
        return self.world_size // self.num_shards


def outlined_step(
    recipe: Recipe, device: Device, world_size: int = 1, per_node: int | None = None
) -> OutlinedStep:
    """A recipe's step at its largest bucket, without weights.

    Raises:
        RecipeError: the recipe's parts do not fit together, or the processes cannot share a batch
            or a model as it says.
    """
    per_node = min(per_node or world_size, world_size)
    shard_size(recipe.parallel, world_size, per_node)
    data_size = world_size // recipe.parallel.sequence
    refuse_idle_ranks(recipe.training.batch_size, data_size)
    parts = outline(recipe)
    refuse_sharing(parts, recipe)
    if recipe.parallel.sequence > 1:
        parts.family.share_tokens(parts.model, FakeTokenSharing(recipe.parallel.sequence))
    parts.model.train()
    if world_size == 1:
        accumulate_in_fp32(parts.model)
    local = num_places(recipe.training.batch_size, data_size)
    micro = min(recipe.training.micro_batch_size or local, local)
    bucket = max(recipe.data.shapes(), key=lambda shape: sequence_length(parts, recipe, shape))
    family, model = parts.family, parts.model
    names = {module: name for name, module in model.named_modules()}
    precision = _precision(recipe, device)
    subject = Subject(
        model=model,
        blocks={names[block]: block for block in family.blocks(model)},
        call_blocks_by=lambda call: family.call_blocks_by(model, call),
        make_inputs=_inputs_maker(parts, recipe, bucket, micro),
        loss=lambda examples: flow_losses(parts, examples, precision, torch.device("cpu")).mean(),
        is_accumulating=local > micro,
        num_shards=shard_size(recipe.parallel, world_size, per_node),
        gathers_in_bf16=world_size > 1 and gathers_in_bf16(recipe, precision),
    )
    return OutlinedStep(
        recipe=recipe,
        parts=parts,
        tracer=Tracer(subject, device),
        bucket=bucket,
        num_tokens=sequence_length(parts, recipe, bucket),
        precision=precision,
        micro_batch_size=micro,
        num_micro_batches=-(-local // micro),
        world_size=world_size,
        per_node=per_node,
    )


def gathers_in_bf16(recipe: Recipe, precision: Precision) -> bool:
    """Whether ranks send each other bf16 instead of fp32 weights."""
    return recipe.parallel.gather == "bf16" and precision == "bf16"


def _precision(recipe: Recipe, device: Device) -> Precision:
    """What training would choose; every card that is planned for has bf16."""
    wanted = recipe.training.precision
    if wanted == "auto" and device.target == "cuda":
        return "bf16"
    return choose_precision(wanted, torch.device("cpu"))


def sequence_length(parts: Components, recipe: Recipe, bucket: Bucket) -> int:
    shape = latent_shape(parts.codec, bucket)
    told = outline_conditioning(parts, recipe, shape)
    return parts.family.sequence_length(parts.model, shape, told)


def _inputs_maker(
    parts: Components, recipe: Recipe, bucket: Bucket, batch_size: int
) -> Callable[[], FlowBatch]:
    """Makes a micro-batch's tensors where it is called: without values in a trace."""
    shape = latent_shape(parts.codec, bucket)
    outlined = outline_conditioning(parts, recipe, shape, batch_size)

    def make() -> FlowBatch:
        latents = torch.empty(batch_size, *shape)
        told: Mapping[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in outlined.items()
        }
        return FlowBatch(latents, torch.empty_like(latents), torch.empty(batch_size), dict(told))

    return make
