"""Updates weights within the backward pass, each as soon as its gradient is complete."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from longtake.config import OptimizerSection
from longtake.errors import RecipeError


def refuse_fused_ranks(section: OptimizerSection, world_size: int) -> None:
    """Refuse `optimizer.fused_backward` in a launch of several processes.

    Raises:
        RecipeError: gradients would have to be reduced over the processes before an update.
    """
    if section.fused_backward and world_size > 1:
        raise RecipeError(
            "optimizer.fused_backward updates weights before processes could add up their "
            f"gradients, and there are {world_size} processes: start one, or set "
            "optimizer.fused_backward = false."
        )


@contextmanager
def updating_in_backward(
    optimizers: Sequence[Optimizer], scale: float
) -> Iterator[dict[Tensor, Tensor]]:
    """Update each trained weight inside the context once its gradient is complete, and free that.

    An update is a step of the weight's optimizer, in whose group it is alone for so long. States
    are the same as those of ordinary steps, and so are checkpoints.

    Args:
        optimizers: optimizers of all trained weights, with the learning rates of this step.
        scale: factor of the gradients; 0: they are freed, and no weight is updated.

    Yields:
        The norms of the gradients before the multiplication by `scale`, scalars in fp32 on their
        device, by weight; it is filled while the backward pass runs.

    Raises:
        RecipeError: a weight's gradient came in several parts; the first has been applied.
    """
    norms = dict[Tensor, Tensor]()

    @torch.no_grad()
    def update(optimizer: Optimizer, group: dict[str, Any], weight: Tensor) -> None:
        if weight in norms:
            raise RecipeError(
                "optimizer.fused_backward updates a weight once its gradient is complete, but that "
                f"of a weight of shape {list(weight.shape)} came in several parts: it is used in "
                "more than one reentrant checkpoint call. Call torch.utils.checkpoint.checkpoint "
                "with use_reentrant=False, or set optimizer.fused_backward = false."
            )
        gradient = weight.grad
        assert gradient is not None
        norms[weight] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if scale:
            if scale != 1:
                gradient.mul_(scale)
            everything = [each["params"] for each in optimizer.param_groups]
            for each in optimizer.param_groups:
                each["params"] = [weight] if each is group else []
            try:
                optimizer.step()
            finally:
                for each, parameters in zip(optimizer.param_groups, everything, strict=True):
                    each["params"] = parameters
        weight.grad = None

    hooks = [
        weight.register_post_accumulate_grad_hook(partial(update, optimizer, group))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
    ]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()
