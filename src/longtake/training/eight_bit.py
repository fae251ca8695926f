"""AdamW with 8-bit states, by torchao: a quarter of their memory.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022).
"""

import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from longtake.config import OptimizerSection
from longtake.errors import RecipeError
from longtake.training.compiling import has_cpp_compiler

BLOCK = 256
"""Numbers that share a scale."""
_LEAST_NUMBERS = 4096
"""Smaller states are not worth 8 bits; torchao decides likewise."""


def refuse_missing_torchao(section: OptimizerSection) -> None:
    """Make sure that an 8-bit optimizer can be built here; quick, and without importing anything.

    Raises:
        RecipeError: torchao is not installed, or there is no compiler for its update.
    """
    if section.kind != "adamw8bit":
        return
    if importlib.util.find_spec("torchao") is None:
        raise RecipeError(
            'optimizer.kind = "adamw8bit" needs torchao, which is not installed. Install it with: '
            'pip install "longtake[eightbit]" (or: pip install torchao). Without it, '
            "--set optimizer.kind=adamw --set optimizer.offload=true also keeps the optimizer's "
            "states off the card."
        )
    if not has_cpp_compiler():
        raise RecipeError(
            'optimizer.kind = "adamw8bit" compiles its update when it first runs, and there is no '
            "C++ compiler here. Install g++ (or set CXX), or take --set optimizer.kind=adamw."
        )


def has_eight_bit_state(parameter: Tensor) -> bool:
    """Whether a parameter's states can be kept in 8 bits, on every rank."""
    return all(size >= _LEAST_NUMBERS and size % BLOCK == 0 for size in _part_sizes(parameter))


def eight_bit_adamw(parameters: Sequence[Tensor], section: OptimizerSection) -> Optimizer:
    """AdamW by torchao for parameters that have 8-bit states.

    bf16 weights have no fp32 copies: an update is rounded up or down by chance, so that small ones
    are not lost on average. The chance follows from the step alone: a resumed run rounds alike.

    Raises:
        RecipeError: torchao is not installed, or there is no compiler for its update.
    """
    refuse_missing_torchao(section)
    return _seeded_class()(
        parameters,
        lr=section.learning_rate,
        betas=section.betas,
        weight_decay=section.weight_decay,
        block_size=BLOCK,
        bf16_stochastic_round=True,
    )


def _seeded_class() -> Callable[..., Optimizer]:
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it lists kernels that it does without
    # torch's advice to torchao: its tensors cannot name themselves to a cache of compiled code.
    warnings.filterwarnings("ignore", ".*_stable_hash_for_caching", UserWarning)
    from torchao.optim import AdamW8bit

    class SeededAdamW8bit(AdamW8bit):  # type: ignore[misc]
        """Draws the same numbers in a step, whether the run was interrupted before or not."""

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            """Update the parameters that have a gradient."""
            devices = {parameter.device for parameter in self.param_groups[0]["params"]}
            cards = [device for device in devices if device.type == "cuda"]
            with torch.random.fork_rng(devices=cards):
                torch.manual_seed(self._steps_done())
                return super().step(closure)

        def _steps_done(self) -> int:
            return max((int(state["step"]) for state in self.state.values()), default=0)

    return SeededAdamW8bit


def _part_sizes(parameter: Tensor) -> list[int]:
    """Numbers of a parameter on each rank; FSDP2 cuts its rows into parts of equal size."""
    if not isinstance(parameter, DTensor):
        return [parameter.numel()]
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [mesh.size(dim) for dim, at in enumerate(placements) if isinstance(at, Shard)]
    num_parts, (rows, *columns) = math.prod(sharded), parameter.shape
    share = math.ceil(rows / num_parts)
    parts = [min(share, max(0, rows - share * number)) for number in range(num_parts)]
    return [part * math.prod(columns) for part in parts]
