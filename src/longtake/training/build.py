"""The training state at step 0: the model spread over the ranks, its optimizers and averages."""

from longtake.config import Recipe
from longtake.models.build import Components
from longtake.models.numerics import Precision
from longtake.optim.build import build_optimizers
from longtake.optim.ema import Averages
from longtake.parallel.context_parallel import TokenSharing
from longtake.parallel.fsdp import apply_fsdp
from longtake.parallel.mesh import World
from longtake.training.step import TrainingState


def build_state(
    parts: Components, precision: Precision, recipe: Recipe, world: World
) -> TrainingState:
    """The state at step 0; the model is changed in place, and comes on the CPU."""
    family, model = parts.family, parts.model
    model.train()
    blocks = family.blocks(model)
    if world.sequence_group is not None:
        family.share_tokens(model, TokenSharing(world.sequence_group))
    in_bf16 = recipe.parallel.gather == "bf16" and precision == "bf16"
    if world.mesh is None:
        parts.unfilled.give_memory(model, world.device)
    apply_fsdp(model, blocks, world, gather_in_bf16=in_bf16)
    if world.mesh is not None:  # only now: of what was spread a rank needs room for its share
        parts.unfilled.give_memory(model, world.device)
    parts.unfilled.fill()
    optimizers = build_optimizers(model, blocks, recipe.optimizer, precision)
    return TrainingState(parts, optimizers, Averages(model, recipe.ema.averages()), precision)
