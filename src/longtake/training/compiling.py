"""Compiled blocks (`training.compile`): torch.compile makes one program of each block's many."""

import os
import shutil
from functools import partial
from typing import Any

import torch
from torch.utils._triton import has_triton

from longtake.config import Recipe
from longtake.errors import RecipeError
from longtake.models.assemble import Components
from longtake.recompute.apply import run_block
from longtake.recompute.policies import Options

_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")
_PER_SHAPE = 4
"""Programs that one shape of clips may need: a last micro-batch may be smaller, for instance."""


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


def has_cpp_compiler() -> bool:
    """Whether there is one where torch looks for it."""
    named = [os.environ.get(name, "") for name in ("CXX", "CC")]
    return any(shutil.which(compiler) for compiler in (*named, *_COMPILERS) if compiler)


def compile_blocks(options: Options, parts: Components, recipe: Recipe) -> None:
    """Have a model run its blocks as they are told, and each of them compiled, from now on.

    Call it before the model is spread over ranks: what brings a block's weights together stays
    outside of what is compiled. The recompute of activations does not: only the compiler knows
    what there is to keep. A block that cannot be followed to its end, such as before an added
    module that looks at values, is compiled in pieces.
    """
    config: Any = torch._dynamo.config
    wanted = _PER_SHAPE * len(recipe.data.shapes())
    config.recompile_limit = max(config.recompile_limit, wanted)
    names = dict(parts.model.named_modules())
    for name, option in options.items():
        block: Any = names[name]
        block.forward = partial(run_block, option, block.forward)
        block.compile(dynamic=False)
