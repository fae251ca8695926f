"""What an optimizer will take, before there is one: for the plan of a card's memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longtake.config import OptimizerSection
from longtake.models.numerics import Precision
from longtake.optim import muon
from longtake.optim.build import EIGHT_BIT_BLOCK, choose_optimizers
from longtake.optim.master_weights import in_batches

_MAP_BYTES = 256 * 4
"""The table of a state's 256 levels; each state has its own."""
_EIGHT_BIT_STEP_BYTES = 8
"""Per number of the largest parameter; measured on a CPU."""


@dataclass(frozen=True)
class OptimizerBytes:
    """What the optimizers of a model take beside its weights and gradients."""

    device: int
    """Kept on the device: running averages, and fp32 copies of weights that are not fp32."""
    host: int
    """Kept in the computer's memory instead."""
    step: int
    """The most that an update takes on the device in passing."""


def optimizer_bytes(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    section: OptimizerSection,
    precision: Precision,
    device_type: str = "cuda",
    granule: int = 1,
) -> OptimizerBytes:
    """What `build_optimizers` will need for the same arguments.

    Returns:
        Bytes, exact for what is kept. `step` is exact but for what kernels take for themselves.
    """
    adamw, eight_bit, matrices = choose_optimizers(model, blocks, section)
    offloaded = section.offload and device_type != "cpu"
    sizes = _Sizes(granule)
    averages = sum(sizes.of(parameter, 4, 4) + sizes.rounded(4) for parameter in adamw)
    masters = sum(sizes.master(parameter, offloaded) for parameter in adamw)
    kept = sum(sizes.eight_bit(parameter) for parameter in eight_bit)
    kept += sum(sizes.of(parameter, 4) + sizes.master(parameter) for parameter in matrices)
    steps = [
        _casts(adamw, offloaded),
        max((_EIGHT_BIT_STEP_BYTES * parameter.numel() for parameter in eight_bit), default=0),
        _orthogonalising(matrices, 2 if precision == "bf16" else 4),
    ]
    on_host = averages + masters if offloaded else 0
    return OptimizerBytes(averages + masters + kept - on_host, on_host, max(steps))


def foreach_bytes(model: nn.Module) -> int:
    """What torch's own default, AdamW by `foreach`, would take in each step on the device.

    It keeps the roots of all second moments at a time, which longtake's fused updates never do.
    """
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class _Sizes:
    granule: int

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule) * self.granule

    def of(self, parameter: Tensor, *widths: int) -> int:
        return sum(self.rounded(width * parameter.numel()) for width in widths)

    def master(self, parameter: Tensor, offloaded: bool = False) -> int:
        needed = offloaded or parameter.dtype != torch.float32
        return self.of(parameter, 4) if needed else 0

    def eight_bit(self, parameter: Tensor) -> int:
        scales = self.rounded(parameter.numel() // EIGHT_BIT_BLOCK * 4)
        return 2 * (self.of(parameter, 1) + scales + self.rounded(_MAP_BYTES))


def _casts(parameters: Sequence[Tensor], offloaded: bool) -> int:
    """Gradients that are not fp32 are converted to it, a batch at a time."""
    if offloaded:  # in the computer's memory; but masters were made on the device, one by one
        return max((4 * p.numel() for p in parameters if p.dtype != torch.float32), default=0)
    rounded = (
        sum(p.numel() for p in batch if p.grad_dtype != torch.float32)
        for batch in in_batches(parameters)
    )
    return max((4 * numbers for numbers in rounded), default=0)


def _orthogonalising(parameters: list[nn.Parameter], width: int) -> int:
    """Muon's steps in fp32, alone and stacked; then in the iteration's type x twice, and A, A^2."""
    most = 0
    for batch in muon.in_batches(parameters):
        numbers, squares = sum(p.numel() for p in batch), sum(min(p.shape) ** 2 for p in batch)
        copies = 2 if width == 4 else 3
        most = max(most, 8 * numbers + copies * width * numbers + 2 * width * squares)
    return most
