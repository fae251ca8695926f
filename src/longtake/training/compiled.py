"""Blocks compiled by torch.compile: where, with which limits, and what is said if it fails."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._triton import has_triton

from longtake import errors
from longtake.config import Recipe
from longtake.models.added_module import added_modules
from longtake.models.components import Components
from longtake.optim.build import has_cpp_compiler
from longtake.parallel import attention_rules
from longtake.planner import activation_checkpointing
from longtake.planner.plan import run_blocks
from longtake.planner.record import Options
from longtake.training.build import streamed_by

_PROGRAMS_PER_SHAPE = 32
"""Most programs that torch.compile may need for one shape of clips: one per kind of block and
memory option, for the first block (whose input has no gradient) and for the others, for full and
for smaller micro-batches, with and without a mask of padded captions."""
_PROGRAMS_PER_BLOCK = 4
"""The same of one block, within added modules that look up weights by the block's name."""
_GRAPH_BREAK = re.compile(r"user code at (.+:\d+)\n.*?Reason: (?:.*:\n\s*)?(.+)")
_SLOWER = (
    "Blocks with it run uncompiled or in pieces, which is slower. Change the added module "
    "(docs/guides/modules.md), or set training.compile = false."
)
_LIMITED = (
    "torch.compile has made {limit} programs of one function, its limit. Blocks with other inputs "
    "run uncompiled from now on, which is slower. Train with fewer shapes of clips (data.buckets), "
    "or with a training.global_batch_size that training.micro_batch_size divides. "
    "TORCH_LOGS=recompiles says what differs."
)
_log = logging.getLogger(__name__)


def refuse_missing_compiler(recipe: Recipe, device: torch.device) -> None:
    """Refuse training.compile = true on a machine without the compilers that it needs."""
    lacks = _missing_compiler(device)
    if recipe.training.compile is True and lacks:
        raise errors.RecipeError(
            f"training.compile = true, but this machine has no {lacks}, which torch.compile needs. "
            "Install it, or --set training.compile=false."
        )


def compiles_blocks(recipe: Recipe, device: torch.device) -> bool:
    if recipe.training.compile == "auto":
        return device.type == "cuda" and not _missing_compiler(device)
    return recipe.training.compile


def uncompiled(recipe: Recipe, device: torch.device) -> str:
    """Return a warning if training.compile = "auto" leaves a GPU's blocks uncompiled; else ""."""
    is_wanted = recipe.training.compile == "auto" and device.type == "cuda"
    lacks = _missing_compiler(device) if is_wanted else ""
    if not lacks:
        return ""
    return (
        f"blocks run uncompiled, which is slower: this machine has no {lacks}, which torch.compile "
        "needs. Install it, or set training.compile = false."
    )


def _missing_compiler(device: torch.device) -> str:
    if device.type == "cuda" and not has_triton():
        return "Triton for its GPUs"
    return "" if has_cpp_compiler() else "C++ compiler (g++ or clang++)"


def compile_blocks(options: Options, parts: Components, recipe: Recipe) -> None:
    """Compile each block of a model, together with its activation checkpointing.

    Call it before the model is sharded, since the gathering of weights cannot be compiled.
    Recomputation is compiled with a block, because only the compiler knows which tensors are worth
    saving, except where activations are offloaded, and around a streamed block, whose weights are
    looked up again when it is recomputed. A streamed block that keeps its activations is not
    compiled. Blocks of a family whose captions keep their own lengths are compiled for any length.
    With training.compile = "auto", what torch fails to compile runs uncompiled; `FAULTS` says it.
    """
    # Otherwise each length of a caption would be a program of its own, which takes minutes. The
    # first length is one, too; a second makes torch compile for the sizes that differ.
    dynamic = None if parts.family.text.has_lengths else False
    _configure(len(options) if added_modules(parts.model) else 0, recipe)
    names, streamed = dict(parts.model.named_modules()), streamed_by(recipe, options, parts)
    run_by_torch = {}
    for name, option in options.items():
        block: Any = names[name]
        if block in streamed:
            # Otherwise views of weights would be saved, and would be gone in the backward pass.
            if option.activations in activation_checkpointing.RECOMPUTED:
                block.forward = torch.compile(block.forward, dynamic=dynamic)
            if option.activations == "save-attention":  # attention is compiled, too
                option = replace(option, activations="recompute")
            run_by_torch[name] = option
        elif option.activations in activation_checkpointing.OFFLOADED:
            run_by_torch[name] = option
            block.compile(dynamic=dynamic)
        else:
            block.forward = partial(
                activation_checkpointing.run_block, option.activations, block.forward
            )
            block.compile(dynamic=dynamic)
    run_blocks(run_by_torch, parts)


def _configure(num_blocks: int, recipe: Recipe) -> None:
    """Set torch.compile's limits, for so many blocks within added modules, and hear its faults."""
    config: Any = torch._dynamo.config
    wanted = max(_PROGRAMS_PER_SHAPE, _PROGRAMS_PER_BLOCK * num_blocks) * len(recipe.data.shapes())
    if recipe.objective.kind != "flow_matching":  # passes without gradient, or without adapter
        wanted *= 3
    # By default torch stops to compile a function after 8 programs.
    config.recompile_limit = max(config.recompile_limit, wanted)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, wanted)
    # Cached compiled code contains the choice of attention kernels, which its key must thus have.
    torch.compiler.config.cache_key_tag = attention_rules.fingerprint()
    # Recomputing a block enters and leaves the mode around attention, which has no other effect.
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    config.suppress_errors = recipe.training.compile == "auto"
    breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    breaks.setLevel(logging.DEBUG)  # it has no handler unless TORCH_LOGS asks for it
    for logger in (breaks, logging.getLogger("torch._dynamo.convert_frame")):
        logger.addFilter(FAULTS)


# --- What is said -----------------------------------------------------------------------------


class _Faults(logging.Filter):
    """Reasons for which compiled blocks run uncompiled in whole or in part, as torch logs them.

    Each is shown once, as a warning in words of the recipe.
    """

    said: ClassVar[set[str]] = set()
    new: ClassVar[list[str]] = []
    """Reasons that the run's record does not have yet."""

    def filter(self, record: logging.LogRecord) -> bool:
        text, is_warning = record.getMessage(), record.levelno >= logging.WARNING
        if text.startswith("torch._dynamo hit config."):
            said = _LIMITED.format(limit=torch._dynamo.config.recompile_limit)
        elif is_warning and record.exc_info:  # with training.compile = "auto"
            said = f"{_failed(record.exc_info[1])} {_SLOWER}"
        elif found := _GRAPH_BREAK.search(text):
            said = f"torch.compile cannot follow {found[1]}: {found[2].strip()}. {_SLOWER}"
        else:
            return True
        if said not in self.said:
            self.said.add(said)
            self.new.append(said)
            _log.warning(said)
        return not is_warning


FAULTS = _Faults()


def _failed(error: BaseException | None) -> str:
    # "backend='inductor' raised:", then the error itself, then advice for developers.
    return f"torch.compile has failed: {' '.join(str(error).strip().splitlines()[:2]):.300}."


@contextmanager
def refuse_failed() -> Iterator[None]:
    """Turn an error of torch.compile in the context into one that says what to do.

    Raises:
        ModelError: a block could not be compiled.
    """
    try:
        yield
    except RuntimeError as error:
        # By name, as an import of the compiler takes seconds where nothing is compiled.
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise errors.ModelError(
            f"{_failed(error)} Train without it: --set training.compile=false. The run resumes "
            "from its newest checkpoint."
        ) from error
