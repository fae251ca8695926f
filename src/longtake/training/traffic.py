"""What the ranks of a mesh send each other in one step, in bytes of each rank.

The formulas are those of rings, which no algorithm can undercut by more than a constant: of S bytes
that n ranks gather or reduce-scatter, each sends (n - 1) / n S; all-reduced, twice that; exchanged
all-to-all, (n - 1) / n of what it has (NVIDIA, nccl-tests, doc/PERFORMANCE.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longtake.planner.trace import StepTrace
from longtake.training.outlined import OutlinedStep, gathers_in_bf16


@dataclass(frozen=True)
class Group:
    size: int
    in_node: int
    """Of these, those of one node."""


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers and reduces as one: a block, a part in another dtype, or the rest."""

    block: str | None
    """The block that it is or belongs to."""
    is_rest: bool
    """Gathered once for forward and backward pass, as FSDP2 does with what wraps the rest."""
    weights: int
    """Bytes of all of it as it is gathered: each parameter padded to so many rows as divide."""
    gradients: int
    """Bytes of what trains of it, likewise, as they are reduced."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends in one step, by what for."""

    shards: Group
    copies: Group
    sequence: Group
    forward: int
    """Weights, gathered for the forward pass of every micro-batch."""
    backward: int
    """And again for the backward pass: they are let go of in between."""
    scattered: int
    """Gradients that are summed into shards, once a step."""
    reduced: int
    """Gradients that copies of the model agree upon, once a step."""
    tokens: int
    """Exchanged for heads in attention, where ranks share the tokens of a clip (DeepSpeed Ulysses:
    queries, keys, values and output, forward, backward and where a block is recomputed), and put
    together after the last block. Read off the trace, in which the model's own code does it."""

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.scattered + self.reduced + self.tokens


def traffic_of(step: OutlinedStep, trace: StepTrace) -> Traffic:
    """What the ranks of a step send each other."""
    shards, copies, sequence = groups_of(step)
    units, times = units_of(step), step.num_micro_batches
    again = [unit for unit in units if not unit.is_rest and _gets_gradient(unit, trace)]
    weights = sum(unit.weights for unit in again) + _gathered_in_vain(units, trace)
    gradients = sum(unit.gradients for unit in units)
    return Traffic(
        shards=shards,
        copies=copies,
        sequence=sequence,
        forward=times * gathered(sum(unit.weights for unit in units), shards),
        backward=times * gathered(weights, shards),
        scattered=gathered(gradients, shards),
        reduced=2 * gathered(gradients // shards.size, copies),
        tokens=times * trace.sent_bytes,
    )


def groups_of(step: OutlinedStep) -> tuple[Group, Group, Group]:
    """Ranks that hold one copy of the model; that hold the same share; that share clips.

    Neighbours hold a copy and share clips, so that as much as can be stays within a node.
    """
    shards, sequence = step.num_shards, step.recipe.parallel.sequence
    return (
        Group(shards, min(shards, step.per_node)),
        Group(step.num_copies, max(1, step.per_node // shards)),
        Group(sequence, min(sequence, step.per_node)),
    )


def gathered(num_bytes: int, group: Group) -> int:
    return num_bytes * (group.size - 1) // group.size


def units_of(step: OutlinedStep) -> list[Unit]:
    """As `longtake.parallel.fsdp.apply_fsdp` makes them, in the order of the forward pass."""
    model, blocks = step.parts.model, step.tracer.subject.blocks
    taken: set[Tensor] = set()
    units: list[Unit] = []
    for name, part in (*blocks.items(), (None, model)):
        free = [p for p in part.parameters() if p not in taken]
        dtypes = [p.dtype for p in free if p.requires_grad]
        inner = list(_of_other_dtypes(part, dtypes[0], taken)) if dtypes else []
        for held in (*inner, free):
            mine = [p for p in held if p not in taken]
            taken.update(mine)
            units.append(_unit(name, name is None and held is free, mine, step))
    return units


def _of_other_dtypes(
    module: nn.Module, dtype: torch.dtype, taken: set[Tensor]
) -> Iterator[list[nn.Parameter]]:
    for child in module.children():
        free = [p for p in child.parameters() if p not in taken]
        dtypes = {p.dtype for p in free if p.requires_grad}
        if dtype in dtypes or isinstance(child, nn.ModuleList):
            yield from _of_other_dtypes(child, dtype, taken)
        elif dtypes:
            yield free


def _unit(
    block: str | None, is_rest: bool, parameters: Sequence[nn.Parameter], step: OutlinedStep
) -> Unit:
    trained = [p for p in parameters if p.requires_grad]
    return Unit(
        block,
        is_rest,
        weights=sum(gathered_size(p, step) * _padded(p, step) for p in parameters),
        gradients=sum(max(4, p.itemsize) * _padded(p, step) for p in trained),
    )


def gathered_size(parameter: Tensor, step: OutlinedStep) -> int:
    is_narrow = gathers_in_bf16(step.recipe, step.precision)
    return min(2, parameter.itemsize) if is_narrow else parameter.itemsize


def _padded(parameter: Tensor, step: OutlinedStep) -> int:
    rows, shards = parameter.shape[0], step.num_shards
    return -(-rows // shards) * shards * (parameter.numel() // rows)


def _gets_gradient(unit: Unit, trace: StepTrace) -> bool:
    return unit.block is None or trace.blocks[unit.block].backward is not None


def _gathered_in_vain(units: Sequence[Unit], trace: StepTrace) -> int:
    """FSDP2 gathers ahead in the backward pass, also what then turns out to be the end of it."""
    ahead = [unit for unit in units if not unit.is_rest and not _gets_gradient(unit, trace)]
    return ahead[-1].weights if ahead else 0
