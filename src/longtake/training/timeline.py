"""How long a step takes on a mesh: what of its communication hides behind compute.

The order of things is FSDP2's (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py): while one
block is computed the next one's weights are gathered, and in the backward pass the gradients of the
one before are reduced, both by one communicator, one after the other; what copies of the model
agree upon goes over another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longtake.planner.trace import StepTrace
from longtake.training.links import Links
from longtake.training.outlined import OutlinedStep
from longtake.training.traffic import Group, Traffic, Unit, gathered, units_of


@dataclass(frozen=True)
class Turn:
    """Seconds of one block, or of what is outside of blocks, in one micro-batch."""

    forward: float
    backward: float
    """0 where no gradient passes."""
    gather: float
    """Of its weights, each time."""
    scatter: float
    """Of its gradients into shards."""
    reduce: float
    """Of its gradients between copies."""


@dataclass(frozen=True)
class Timeline:
    """One update: the blocks in their order, and all else."""

    blocks: Sequence[Turn]
    rest: Turn
    """What is outside of blocks; its compute is counted between forward and backward pass."""
    num_micro_batches: int
    waits: float
    """Seconds of one micro-batch in which compute waits for tokens of other ranks."""

    def seconds(self) -> float:
        between = _micro_batch_seconds(self._reducing(False))
        last = _micro_batch_seconds(self)
        return (self.num_micro_batches - 1) * between + last + self.num_micro_batches * self.waits

    def compute_seconds(self) -> float:
        turns = (*self.blocks, self.rest)
        return self.num_micro_batches * sum(turn.forward + turn.backward for turn in turns)

    def without(self, *names: str) -> "Timeline":
        """The same where `gather`, `scatter`, `reduce` or `waits` take no time."""
        waits = 0.0 if "waits" in names else self.waits
        none = {name: 0.0 for name in names if name != "waits"}
        blocks = [replace(turn, **none) for turn in self.blocks]
        return replace(self, blocks=blocks, rest=replace(self.rest, **none), waits=waits)

    def _reducing(self, wanted: bool) -> "Timeline":
        return self if wanted else self.without("scatter", "reduce")


def timeline_of(step: OutlinedStep, trace: StepTrace, traffic: Traffic, links: Links) -> Timeline:
    """The timeline of a step whose compute was traced, over these links."""
    units = units_of(step)
    turns = {
        name: _turn([unit for unit in units if unit.block == name], traffic, links)
        for name in (*trace.blocks, None)
    }
    blocks = [
        replace(
            turns[name],
            forward=block.forward.seconds,
            backward=block.backward.seconds if block.backward else 0.0,
        )
        for name, block in trace.blocks.items()
    ]
    outside = trace.seconds - sum(turn.forward + turn.backward for turn in blocks)
    waits = seconds_of(traffic.tokens, traffic.sequence, links)
    return Timeline(
        blocks=blocks,
        rest=replace(turns[None], forward=outside),
        num_micro_batches=step.num_micro_batches,
        waits=waits / step.num_micro_batches,
    )


def seconds_of(num_bytes: int, group: Group, links: Links) -> float:
    return num_bytes / links.bandwidth(group.size, group.in_node) if num_bytes else 0.0


def _turn(units: Sequence[Unit], traffic: Traffic, links: Links) -> Turn:
    weights = sum(unit.weights for unit in units)
    gradients = sum(unit.gradients for unit in units)
    shards, copies = traffic.shards, traffic.copies
    agreed = 2 * gathered(gradients // shards.size, copies)
    return Turn(
        forward=0.0,
        backward=0.0,
        gather=seconds_of(gathered(weights, shards), shards, links),
        scatter=seconds_of(gathered(gradients, shards), shards, links),
        reduce=seconds_of(agreed, copies, links),
    )


def _micro_batch_seconds(line: Timeline) -> float:
    """Forward and backward pass, as streams of compute, shards and copies wait for each other."""
    compute = link = line.rest.gather
    begun = [0.0, 0.0]
    for turn in line.blocks:
        link = max(link, begun[-2]) + turn.gather
        begun.append(max(compute, link))
        compute = begun[-1] + turn.forward
    link = max(link, compute)
    return _backward_end(line, compute + line.rest.forward, link)


def _backward_end(line: Timeline, compute: float, link: float) -> float:
    """When all is reduced, from when the loss is known and the link is free."""
    turns = [turn for turn in reversed(line.blocks) if turn.backward]
    gathers = [*(turn.gather for turn in turns), 0.0]
    ready = link = link + gathers[0]
    scattered = across = 0.0
    for turn, next_gather in zip(turns, gathers[1:], strict=True):
        begun = max(compute, ready)
        ready = link = max(link, begun) + next_gather
        compute = max(begun + turn.backward, scattered)  # one reduction is under way at a time
        scattered = link = max(link, compute) + turn.scatter
        across = max(across, link) + turn.reduce
    link = max(link, compute) + line.rest.scatter
    return max(compute, max(across, link) + line.rest.reduce)
