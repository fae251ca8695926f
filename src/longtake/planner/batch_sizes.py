"""Batch sizes of a recipe's buckets: by tokens, per stage and per rank.

A model is outlined only if tokens have to be counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longtake.config import Bucket, Recipe, Stage
from longtake.data.batch import num_places
from longtake.errors import RecipeError

if TYPE_CHECKING:
    from longtake.models.components import Components


def with_batch_sizes(recipe: Recipe) -> Recipe:
    """Return the recipe with a batch size in each bucket (clip shape), by `data.tokens_per_batch`.

    The batch size of a bucket is max(1, tokens_per_batch // tokens of a clip).

    Raises:
        RecipeError: the recipe's parts do not fit together.
        ModelError: the configuration of a pretrained part cannot be found.
    """
    data, budget = recipe.data, recipe.data.tokens_per_batch
    if budget is None or all(shape.batch_size for shape in data.shapes()):
        return recipe
    tokens = bucket_tokens(recipe)

    def fill(shapes: Sequence[Bucket]) -> tuple[Bucket, ...]:
        return tuple(
            shape
            if shape.batch_size or shape not in tokens
            else shape.model_copy(update={"batch_size": max(1, budget // tokens[shape])})
            for shape in shapes
        )

    stages = tuple(
        stage.model_copy(update={"buckets": fill(stage.buckets)}) if stage.buckets else stage
        for stage in data.stages
    )
    changed = data.model_copy(update={"buckets": fill(data.buckets), "stages": stages})
    return recipe.model_copy(update={"data": changed})


def bucket_tokens(recipe: Recipe, components: "Components | None" = None) -> dict[Bucket, int]:
    """Count the tokens of a clip of each bucket in one attention, with its text and references."""
    # Imported only here: most recipes need no model to know their batch sizes.
    from longtake.models.base import latent_shape  # imports torch
    from longtake.models.components import outline
    from longtake.models.conditioning import outline_conditioning

    parts = components or outline(recipe)

    def count(bucket: Bucket) -> int:
        shape = latent_shape(parts.codec, bucket)
        conditioning = outline_conditioning(parts, recipe, bucket)
        return parts.family.sequence_length(parts.model, shape, conditioning)

    return {shape: count(shape) for shape in recipe.data.shapes()}


@dataclass(frozen=True)
class StageBatch:
    """The micro-batch of one process that has the most tokens, in one stage of the curriculum."""

    name: str
    global_batch_size: int
    bucket: Bucket  # bucket of the stage whose micro-batch has the most tokens
    micro_batch_size: int
    num_micro_batches: int
    num_tokens: int  # tokens of one micro-batch


def largest_batch(
    recipe: Recipe, stage: Stage, lengths: Mapping[Bucket, int], data_size: int
) -> StageBatch:
    """Return a stage's micro-batch with the most tokens, and among equals the longest clips.

    Args:
        recipe: recipe to which the stage belongs.
        stage: stage of the data curriculum.
        lengths: tokens of one clip, by bucket (clip shape).
        data_size: number of ranks that divide a batch among themselves.
    """
    shapes = stage.buckets or recipe.data.buckets
    sizes = recipe.data.batch_sizes(stage, recipe.training.global_batch_size)
    batches = []
    for bucket, batch_size in zip(shapes, sizes, strict=True):
        # Rounded up: the ranks with the most clips decide.
        local = num_places(batch_size, data_size)
        micro = recipe.micro_batch_size(stage, bucket, data_size)
        count, tokens = -(-local // micro), micro * lengths[bucket]
        batches.append(StageBatch(stage.name, batch_size, bucket, micro, count, tokens))
    return max(batches, key=lambda batch: (batch.num_tokens, lengths[batch.bucket]))


def refuse_idle_ranks(recipe: Recipe, data_size: int) -> None:
    """Refuse a recipe in which some batch has fewer clips than there are ranks."""
    for stage in recipe.data.curriculum():
        sizes = recipe.data.batch_sizes(stage, recipe.training.global_batch_size)
        for shape, size in zip(stage.buckets or recipe.data.buckets, sizes, strict=True):
            if size >= data_size:
                continue
            key = "training.global_batch_size"
            if shape.batch_size is not None:
                key = f"batch_size of the bucket of {shape},"
            elif stage.global_batch_size is not None:
                key = f"global_batch_size of stage {stage.name},"
            raise RecipeError(
                f"{key} {size} cannot be shared by {data_size} processes: each needs a clip. Start "
                "fewer processes, let several share a clip's tokens (parallel.context), or begin a "
                "run with a larger batch."
            )
