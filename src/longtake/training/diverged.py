"""Whose numbers are none any more, in words."""

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from longtake.guard.detectors import GuardVerdict
from longtake.guard.history import StepStatistics
from longtake.parallel.collectives import gather_objects
from longtake.parallel.fsdp import local_shard, num_copies
from longtake.parallel.mesh import World
from longtake.training.step import SampleLosses, TrainingState

_MOST_NAMED = 3


def explained(
    verdict: GuardVerdict,
    statistics: StepStatistics,
    samples: SampleLosses,
    state: TrainingState,
    world: World,
) -> GuardVerdict:
    """The verdict; if numbers are lost, its message says where too. All ranks must call it."""
    if verdict.reason != "non_finite":
        return verdict
    parts, said = state.components, [verdict.message]
    where = _ranks(samples, parts.model, world)
    if where:
        said.append(f"It came from {where}.")
    if not math.isfinite(statistics.grad_norm):
        said.append(lost_gradients(parts.model, parts.family.blocks(parts.model), world))
    if not math.isfinite(statistics.loss):
        said.append("The loss is no number: it was lost before, in the forward pass.")
    return replace(verdict, message=" ".join(said))


def _ranks(samples: SampleLosses, model: nn.Module, world: World) -> str:
    """The ranks whose own losses, or else whose own shares of gradients, are lost, if not all.

    A gradient that is lost on one rank before it is reduced is lost on all after that.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    loses = not all(math.isfinite(loss) for loss in samples.losses)
    is_lost = any(not bool(each.isfinite().all()) for each in gradients)
    everyone = gather_objects((socket.gethostname(), loses, is_lost), world)
    for index in (1, 2):
        ranks = [rank for rank, facts in enumerate(everyone) if facts[index]]
        if 0 < len(ranks) < world.size:
            hosts = ", ".join(sorted({everyone[rank][0] for rank in ranks}))
            return f"rank {', '.join(map(str, ranks))} of {world.size} alone (on {hosts})"
    return ""


def lost_gradients(
    model: nn.Module, blocks: Sequence[nn.Module], world: World | None = None
) -> str:
    """Name the parameters whose gradients hold NaN or infinity, those at the model's end first.

    All ranks must call it; each says the same, of all ranks' shares together.

    Args:
        model: after a backward pass, with its gradients.
        blocks: of the model, in the order in which data passes them.
        world: all ranks; None: this process alone.

    Returns:
        A sentence or two.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    together = max if num_copies(model) > 1 else sum  # a copy of a gradient may be lost alone
    mine = _counts_of_lost(gradients)
    everyone = [mine] if world is None else gather_objects(mine, world)
    lost = [name for name in gradients if any(name in counts for counts in everyone)]
    if not lost:
        return (
            "Each gradient is a finite number, but together they are so large that the sum of "
            "their squares is none."
        )
    named = []
    for name in lost[: -_MOST_NAMED - 1 : -1]:
        counts = zip(*(counts.get(name, (0, 0)) for counts in everyone), strict=True)
        num_nan, num_infinite = map(together, counts)
        where = f"{name} ({_place(name, model, blocks)})"
        named.append(f"{where}, {_numbers(num_nan, num_infinite, gradients[name].numel())}")
    more = " and more" if len(lost) > _MOST_NAMED else ""
    return (
        f"NaN or infinity is in the gradients of {len(lost)} of {len(gradients)} trained "
        "parameters. A backward pass runs from the model's end to its beginning, so the last ones "
        f"were lost first: {'; '.join(named)}{more}."
    )


@torch.no_grad()
def _counts_of_lost(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """How many NaN, how many infinities, in this rank's share of each gradient that has any."""
    found = {}
    for name, gradient in gradients.items():
        mine = local_shard(gradient)
        # Counting takes time and memory, and most have a norm. A norm may overflow all the same.
        if not torch.linalg.vector_norm(mine, dtype=torch.float32).isfinite():
            found[name] = (int(mine.isnan().sum()), int(mine.isinf().sum()))
    return {name: counts for name, counts in found.items() if any(counts)}


def _numbers(num_nan: int, num_infinite: int, num_all: int) -> str:
    counts = [f"{num_nan} NaN"] * bool(num_nan) + [f"{num_infinite} infinite"] * bool(num_infinite)
    return f"{' and '.join(counts)} of {num_all} numbers"


def _place(name: str, model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Which of the blocks a parameter is in, counted from 1."""
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks, start=1):
        if name.startswith(f"{names[id(block)]}."):
            return f"block {number} of {len(blocks)}"
    return "outside the blocks"
