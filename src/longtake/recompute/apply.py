"""How a block is run: its activations kept, computed again in the backward pass, or half of each.

Always by torch's non-reentrant recompute: the reentrant kind gives no gradient to what is inside
unless a tensor that carries one is handed in directly.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# FSDP2 labels its hooks for the profiler. Inside a block they run a different number of times in
# forward and recompute, which selective checkpointing takes for another computation.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)

Option = Literal["keep", "save-attention", "recompute"]
"""`keep`: all activations stay; `save-attention`: attention's output stays, the rest is computed
again; `recompute`: only the block's inputs stay."""
OPTIONS: tuple[Option, ...] = ("keep", "save-attention", "recompute")

Block = Callable[..., Any]
BlockCall = Callable[..., Any]
"""`call(block, *args)` stands for `block(*args)`."""

_aten = torch.ops.aten
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""The operations whose output `save-attention` keeps: the dearest of a block for its bytes."""


def run_block(option: Option, block: Block, *args: Any, **named: Any) -> Any:
    """A block's output, the same to the bit whatever the option.

    What is random in it (dropout) is drawn again as it was: the generators' states are kept.
    """
    if option == "keep":
        return block(*args, **named)
    contexts: dict[str, Any] = {}
    if option == "save-attention":
        contexts["context_fn"] = _keep_attention
    return checkpoint(block, *args, use_reentrant=False, **contexts, **named)


def caller(options: Mapping[nn.Module, Option]) -> BlockCall:
    """What a family calls its blocks by (`Family.call_blocks_by`); unnamed blocks are kept."""

    def call(block: nn.Module, *args: Any) -> Any:
        return run_block(options.get(block, "keep"), block, *args)

    return call


def _keep_attention() -> tuple[Any, Any]:
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_keeps)  # type: ignore[no-untyped-call]
    return contexts


def _keeps(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operation in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
