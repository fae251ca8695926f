"""Compiled blocks (`training.compile`): torch.compile makes one program of each block's many."""

import logging
from functools import partial
from typing import Any

import torch
from torch.utils._triton import has_triton

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.models.build import Components
from longtake.optim.build import has_cpp_compiler
from longtake.planner.activation_checkpointing import Options, run_block

_PROGRAMS_PER_SHAPE = 32
"""Programs that one shape of clips may need: for each kind of block and memory option, for the
first block (whose input has no gradient) and the others, for a full and a smaller micro-batch."""
_LIMIT_WARNING = "torch._dynamo hit config."


def refuse_missing_compiler(recipe: Recipe, device: torch.device) -> None:
    """Say before the run what compiled blocks would fail on in its first step.

    Raises:
        RecipeError: the recipe wants them, and this machine has nothing to compile with.
    """
    if not recipe.training.compile:
        return
    lacks = "" if has_cpp_compiler() else "C++ compiler (g++ or clang++)"
    if device.type == "cuda" and not has_triton():
        lacks = "Triton for its cards"
    if lacks:
        raise RecipeError(
            f"training.compile = true, but this machine has no {lacks}, which torch.compile needs. "
            "Install it, or --set training.compile=false."
        )


def compile_blocks(options: Options, parts: Components, recipe: Recipe) -> None:
    """Have a model run its blocks as they are told, and each of them compiled, from now on.

    Call it before the model is spread over ranks: what brings a block's weights together stays
    outside of what is compiled. The recompute of activations does not: only the compiler knows
    what there is to keep. A block that cannot be followed to its end, such as before an added
    module that looks at values, is compiled in pieces.
    """
    config: Any = torch._dynamo.config
    wanted = _PROGRAMS_PER_SHAPE * len(recipe.data.shapes())
    config.recompile_limit = max(config.recompile_limit, wanted)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, wanted)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_say_what_the_limit_means)
    names = dict(parts.model.named_modules())
    for name, option in options.items():
        block: Any = names[name]
        block.forward = partial(run_block, option, block.forward)
        block.compile(dynamic=False)


def _say_what_the_limit_means(record: logging.LogRecord) -> bool:
    """Puts torch's warning that it compiles no further into the words of a recipe."""
    if str(record.msg).startswith(_LIMIT_WARNING):
        limit = torch._dynamo.config.recompile_limit
        record.args = None
        record.msg = (
            f"torch.compile has made {limit} programs of one function, its limit. Blocks with "
            "other inputs run uncompiled from now on, which is slower. Train with fewer shapes of "
            "clips (data.buckets), or with a training.batch_size that training.micro_batch_size "
            "divides."
        )
    return True
