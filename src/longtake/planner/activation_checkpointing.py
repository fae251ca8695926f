"""Runs a block with its activations saved, offloaded, recomputed, or partly recomputed.

Recomputation uses torch's non-reentrant checkpointing only: the reentrant kind gives parameters
inside no gradient unless a tensor argument carries one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint, create_selective_checkpoint_contexts

from longtake.parallel.ring import RING_ATTENTION
from longtake.planner.activation_offload import ActivationOffload
from longtake.planner.record import KEEP, Activations, BlockOption, BlockWeights
from longtake.planner.save_attention import KeptAttention

# FSDP2 labels its hooks for the profiler. Inside a block they run a different number of times in
# forward pass and recomputation, which selective checkpointing takes for another computation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)

Block = Callable[..., Any]
BlockCall = Callable[..., Any]
"""A function that runs a block of the transformer: `call(block, *args)` stands for
`block(*args)`."""


_aten = torch.ops.aten
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        RING_ATTENTION,
    }
)
"""Attention operations, whose output `save-attention` saves: they take longest for their bytes."""


def _keep(block: Block, *args: Any, **kwargs: Any) -> Any:
    return block(*args, **kwargs)


def _save_attention(block: Block, *args: Any, **kwargs: Any) -> Any:
    # In compiled blocks, the compiler's own selective checkpointing saves attention.
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, use_reentrant=False, context_fn=_contexts, **kwargs)
    forward, again = KeptAttention().contexts()
    with forward:  # torch 2.11's checkpoint would leave it on after an error in the block
        return checkpoint(
            block, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs
        )


# Contexts that make the compiler save attention; they would slow eager mode down.
_contexts = partial(create_selective_checkpoint_contexts, list(ATTENTION))


def _recompute(block: Block, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


RUN_BY: Mapping[Activations, BlockCall] = {
    "keep": _keep,
    "save-attention": _save_attention,
    "recompute": _recompute,
    "offload": _keep,
    "offload-input": _recompute,
}
"""Functions that run a transformer block with each treatment of its activations. `keep` saves all
of them for the backward pass, `save-attention` only the output of attention, `recompute` only
the block's inputs. `offload` saves all and `offload-input` the inputs in host memory, to which
`caller` moves them. The costs of each treatment are read off traces in which all blocks use it
(`longtake.planner.solver`)."""
ACTIVATIONS: tuple[Activations, ...] = tuple(RUN_BY)
OFFLOADED: tuple[Activations, ...] = ("offload", "offload-input")
RECOMPUTED: tuple[Activations, ...] = ("save-attention", "recompute", "offload-input")
"""Treatments of activations with which a block is computed again in the backward pass."""
POLICIES = ("none", "all", "all-but-first", "alternate", "save-attention")


def run_block(activations: Activations, block: Block, *args: Any, **kwargs: Any) -> Any:
    """Run a block with this treatment of its activations; its output is bitwise equal with each.

    Random numbers, such as for dropout, are drawn again as before when a block is recomputed: the
    generators' states are saved.
    """
    return RUN_BY[activations](block, *args, **kwargs)


def caller(options: Mapping[nn.Module, BlockOption]) -> BlockCall:
    """Return the argument of `BlockContract.call_by` that runs each block by its option.

    An option says how the block's activations and frozen weights are treated. Activations of blocks
    without an option are kept on the device. The order of `options` must be the blocks'.
    """
    offload, first = ActivationOffload(), next(iter(options), None)

    def call(block: nn.Module, *args: Any) -> Any:
        # A new forward pass: nothing of the pass before may be taken for the block before.
        if block is first:
            offload.begin()
        activations = options.get(block, KEEP).activations
        run = partial(run_block, activations)
        return offload.call(run, block, *args, offloads=activations in OFFLOADED)

    return call


def options_of(
    policy: str, blocks: Sequence[str], weights: BlockWeights = "keep"
) -> dict[str, BlockOption]:
    """Return each block's option under a named recompute policy, such as `all` or `alternate`.

    `blocks` are the blocks' names in running order.
    """
    chosen: Mapping[str, tuple[Activations, Sequence[Activations]]] = {  # of the first, of the rest
        "none": ("keep", ["keep"]),
        "all": ("recompute", ["recompute"]),
        "all-but-first": ("keep", ["recompute"]),
        "alternate": ("keep", ["recompute", "keep"]),
        "save-attention": ("save-attention", ["save-attention"]),
    }
    first, rest = chosen[policy]
    each = [first, *islice(cycle(rest), len(blocks) - 1)]
    return {name: BlockOption(one, weights) for name, one in zip(blocks, each, strict=True)}
