"""Optimizers and the schedule of their learning rates."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from longtake.config import OptimizerSection
from longtake.models.precision import Precision
from longtake.training.eight_bit import eight_bit_adamw, has_eight_bit_state
from longtake.training.master import MasterAdamW
from longtake.training.muon import Muon


def build_optimizers(
    model: nn.Module, blocks: Sequence[nn.Module], section: OptimizerSection, precision: Precision
) -> list[Optimizer]:
    """Every trained parameter in one optimizer: AdamW's, or where the recipe says so another's.

    Muon takes the blocks' matrices, 8-bit AdamW what is large enough for it. Weights that are not
    fp32, or whose states are offloaded, are updated in fp32 copies.

    Raises:
        RecipeError: an 8-bit optimizer is asked for, but torchao is not installed.
    """
    shares = share_out(model, blocks, section)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rate, decay = section.muon_learning_rate, section.weight_decay
    optimizers: list[Optimizer] = []
    if shares.adamw:
        optimizers.append(_adamw(shares.adamw, section))
    if shares.eight_bit:
        optimizers.append(eight_bit_adamw(shares.eight_bit, section))
    if shares.muon:
        optimizers.append(Muon(shares.muon, lr=rate, weight_decay=decay, dtype=dtype))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = float(group["lr"])
    return optimizers


class Shares(NamedTuple):
    adamw: list[nn.Parameter]
    eight_bit: list[nn.Parameter]
    muon: list[nn.Parameter]


def share_out(model: nn.Module, blocks: Sequence[nn.Module], section: OptimizerSection) -> Shares:
    """Which optimizer updates which of a model's trained parameters; they may be on meta."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    shares = Shares([], [], [])
    for parameter in trained:
        if section.kind == "muon" and id(parameter) in in_blocks and parameter.ndim == 2:
            shares.muon.append(parameter)
        elif section.kind == "adamw8bit" and has_eight_bit_state(parameter):
            shares.eight_bit.append(parameter)
        else:
            shares.adamw.append(parameter)
    return shares


def _adamw(parameters: Sequence[nn.Parameter], section: OptimizerSection) -> Optimizer:
    rate, betas, decay = section.learning_rate, section.betas, section.weight_decay
    if section.offload or any(parameter.dtype != torch.float32 for parameter in parameters):
        return MasterAdamW(parameters, rate, betas, weight_decay=decay, offload=section.offload)
    return AdamW(parameters, lr=rate, betas=betas, weight_decay=decay, fused=True)


def set_learning_rates(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Scale every optimizer's own learning rate by the schedule's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["base_lr"] * factor
            if isinstance(group["lr"], Tensor):  # a compiled update reads it from there
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def schedule_factor(step: int, steps: int, section: OptimizerSection) -> float:
    """The learning rate of an update as a share of its full value, in [0, 1]."""
    if step < section.warmup_steps:
        return (step + 1) / (section.warmup_steps + 1)
    done = (step - section.warmup_steps) / max(1, steps - 1 - section.warmup_steps)
    remaining = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[section.schedule]
    return section.final_factor + (1 - section.final_factor) * remaining
