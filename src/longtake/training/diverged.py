"""Which gradients are no numbers any more, in words."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longtake.parallel.fsdp import full

_MOST_NAMED = 3


@torch.no_grad()
def lost_gradients(model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Name the parameters whose gradients hold NaN or infinity, those at the model's end first.

    All ranks must call it; each says the same, of all ranks' shares together.

    Args:
        model: after a backward pass, with its gradients.
        blocks: of the model, in the order in which data passes them.

    Returns:
        A sentence or two.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    lost = [name for name, gradient in gradients.items() if _is_lost(gradient)]
    if not lost:
        return (
            "Each gradient is a finite number, but together they are so large that the sum of "
            "their squares is none."
        )
    last = lost[: -_MOST_NAMED - 1 : -1]
    named = [_describe(name, gradients[name], _place(name, model, blocks)) for name in last]
    more = " and more" if len(lost) > _MOST_NAMED else ""
    return (
        f"NaN or infinity is in the gradients of {len(lost)} of {len(gradients)} trained "
        "parameters. A backward pass runs from the model's end to its beginning, so the last ones "
        f"were lost first: {'; '.join(named)}{more}."
    )


def _is_lost(gradient: Tensor) -> bool:
    # Counting takes time and memory, and most have a norm. A norm may overflow all the same.
    norm = full(torch.linalg.vector_norm(gradient, dtype=torch.float32))
    return not norm.isfinite() and any(_count_lost(gradient))


def _count_lost(gradient: Tensor) -> tuple[int, int]:
    """How many NaN, how many infinities, over all ranks."""
    return int(full(gradient.isnan().sum())), int(full(gradient.isinf().sum()))


def _describe(name: str, gradient: Tensor, place: str) -> str:
    num_nan, num_infinite = _count_lost(gradient)
    counts = [f"{num_nan} NaN"] * bool(num_nan) + [f"{num_infinite} infinite"] * bool(num_infinite)
    return f"{name} ({place}), {' and '.join(counts)} of {gradient.numel()} numbers"


def _place(name: str, model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Which of the blocks a parameter is in, counted from 1."""
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks, start=1):
        if name.startswith(f"{names[id(block)]}."):
            return f"block {number} of {len(blocks)}"
    return "outside the blocks"
