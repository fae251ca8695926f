"""Optimizers and the schedule of their learning rates."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from longtake.config import OptimizerSection
from longtake.models.precision import Precision
from longtake.training.muon import Muon


def build_optimizers(
    model: nn.Module, blocks: Sequence[nn.Module], section: OptimizerSection, precision: Precision
) -> list[Optimizer]:
    """AdamW for all that trains, or Muon for the blocks' matrices and AdamW for the rest."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = _matrices(blocks) if section.kind == "muon" else []
    in_matrices = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in in_matrices]
    optimizers: list[Optimizer] = []
    if rest:
        adamw = AdamW(
            rest,
            lr=section.learning_rate,
            betas=section.betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        optimizers.append(adamw)
    if matrices:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        rate, decay = section.muon_learning_rate, section.weight_decay
        optimizers.append(Muon(matrices, lr=rate, weight_decay=decay, dtype=dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def set_learning_rates(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Scale every optimizer's own learning rate by the schedule's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor


def schedule_factor(step: int, steps: int, section: OptimizerSection) -> float:
    """The learning rate of an update as a share of its full value, in [0, 1].

    Args:
        step: updates done before this one.
        steps: updates of the whole run.
        section: a linear warm-up over `warmup_steps`, then a plateau, a line or half a cosine
            down to `final_factor`, reached at the last update (of at least two after the warm-up).
    """
    if step < section.warmup_steps:
        return (step + 1) / (section.warmup_steps + 1)
    done = (step - section.warmup_steps) / max(1, steps - 1 - section.warmup_steps)
    remaining = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[section.schedule]
    return section.final_factor + (1 - section.final_factor) * remaining


def _matrices(blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [
        parameter
        for block in blocks
        for parameter in block.parameters()
        if parameter.requires_grad and parameter.ndim == 2
    ]
