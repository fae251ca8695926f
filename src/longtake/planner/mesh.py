"""Predicts the network traffic between the ranks in a training step, and the time that it adds.

Bytes are those of ring algorithms, which no other undercuts by more than a constant. If n ranks
gather or reduce-scatter S bytes, each sends (n - 1) / n S; in an all-reduce, twice that; in an
all-to-all exchange, (n - 1) / n of its own bytes (NVIDIA, nccl-tests, doc/PERFORMANCE.md).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from longtake.data.batch import num_places
from longtake.errors import RecipeError
from longtake.parallel.context_parallel import heads_size
from longtake.parallel.fsdp import sharding_units
from longtake.planner.devices import DeviceBudget
from longtake.planner.forecast import Forecast, what_if
from longtake.planner.memory import MetaStep, gathered_itemsize
from longtake.planner.trace import StepTrace

MUCH_EXPOSED = 0.05
"""Share of a step's time that communication adds, below which no change is advised."""
SHARE_OF_LINK = 0.8
"""Share of a link's nominal rate that collectives of megabytes reach on NVLink and InfiniBand."""
_GB = 1e9


@dataclass(frozen=True)
class Links:
    """Speed of the links of one GPU, within its node and to other nodes, in bytes per second.

    It can send at this speed while it receives at the same.
    """

    node: float  # to GPUs of its node
    network: float  # to other nodes: the GPU's share of its node's network

    def bandwidth(self, size: int, in_node: int) -> float:
        """Return the bytes per second that each GPU of a group can send in a collective.

        In a ring all data passes each GPU. If the group spans nodes, its GPUs of a node share the
        traffic that leaves the node, each through its own network adapter, as in NCCL's parallel
        rings (NVIDIA, nccl-tests, doc/PERFORMANCE.md: "bus bandwidth").
        """
        if size <= in_node:
            return self.node * SHARE_OF_LINK
        if in_node == 1:
            return self.network * SHARE_OF_LINK
        return min(self.node, in_node * self.network) * SHARE_OF_LINK


# NVLink 4 has 900 GB/s in both directions together; each GPU has a 400 Gb/s InfiniBand adapter
# (NDR; NVIDIA's data sheets of H100, H200 and DGX H100). PCIe 4.0 x16 has 31.5 GB/s in each
# direction, 25 of which copies between GPUs through the processor reach; four GPUs share a 100 Gb/s
# adapter.
_NVLINK = Links(450 * _GB, 50 * _GB)
_PCIE = Links(25 * _GB, 3.125 * _GB)
_NVLINK_3 = Links(300 * _GB, 25 * _GB)  # A100: 600 GB/s together; 200 Gb/s InfiniBand (HDR)
_NVLINK_5 = Links(900 * _GB, 50 * _GB)  # B200: 1.8 TB/s together; 400 Gb/s InfiniBand
_LOOPBACK = Links(2 * _GB, 1 * _GB)
_OF_DEVICES = {
    "h100pcie": _PCIE,
    "h100": _NVLINK,
    "h200": _NVLINK,
    "b200": _NVLINK_5,
    "a100": _NVLINK_3,
}


def links_of(device: DeviceBudget) -> Links:
    """Return the usual links between GPUs of this model; PCIe for an unknown one."""
    if device.target == "cpu":
        return _LOOPBACK
    label = device.name.lower().replace(" ", "").replace("-", "")
    return next((links for name, links in _OF_DEVICES.items() if name in label), _PCIE)


def links_named(text: str, device: DeviceBudget) -> Links:
    """Parse the links of `longtake plan --link`: "450,50" or "450", in GB/s per GPU.

    Raises:
        RecipeError: the text is not one or two positive numbers.
    """
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) not in (1, 2) or not all(0 < speed < math.inf for speed in speeds):
        raise RecipeError(
            f"The link {text!r} cannot be read. Expected NODE[,NETWORK]: GB/s that one GPU sends "
            "to others of its node and, after a comma, to other nodes, such as 450,50."
        )
    network = speeds[1] * _GB if len(speeds) == 2 else links_of(device).network
    return Links(speeds[0] * _GB, network)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that take part in one collective operation."""

    size: int
    in_node: int  # ranks of one node

    def ring_bytes(self, num_bytes: int) -> int:
        return num_bytes * (self.size - 1) // self.size

    def seconds(self, sent_bytes: int, links: Links) -> float:
        return sent_bytes / links.bandwidth(self.size, self.in_node) if sent_bytes else 0.0


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that FSDP2 gathers together: a block's, those of another dtype, or the rest."""

    block: str | None  # name of the block that it is, or belongs to
    is_rest: bool  # the root, which FSDP2 gathers once for both passes
    weights: int  # gathered bytes, with each parameter's rows padded to a multiple of the ranks
    gradients: int  # reduced bytes of the trainable parameters, padded likewise


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends in one step, by purpose."""

    shards: RankGroup
    copies: RankGroup
    heads: RankGroup  # ranks that share a clip, and exchange its tokens for heads
    rings: RankGroup  # ranks that share a clip, and pass keys and values around
    forward: int  # weights gathered for the forward pass of every micro-batch
    backward: int  # weights gathered again for the backward pass, since they were freed
    scattered: int  # gradients summed into shards, once a step
    reduced: int  # gradients all-reduced between copies of the model, once a step
    tokens: int
    """Bytes of tokens exchanged for heads in attention, if ranks share the tokens of a clip
    (DeepSpeed Ulysses: queries, keys, values and output, in the forward, backward and recomputed
    pass), and gathered after the last block. Counted by the trace, in which the model's own code
    exchanges them."""
    passed: int
    """Bytes of keys, values and their gradients, passed around if more ranks share a clip than
    exchange heads; counted by the trace as well."""


def traffic_of(step: MetaStep, trace: StepTrace) -> Traffic:
    """Count the bytes that the ranks send each other in a training step.

    Ranks next to each other hold a copy of the model and share clips, so that most traffic stays in
    a node.
    """
    sharing, num_heads = step.recipe.parallel.context, step.components.family.block.num_heads
    heads = heads_size(num_heads(step.components.model), sharing, step.per_node)
    exchanging = heads if heads > 1 else sharing  # then only after the last block
    shards = RankGroup(step.num_shards, min(step.num_shards, step.per_node))
    copies = RankGroup(step.num_copies, max(1, step.per_node // step.num_shards))
    units, times = fsdp_units(step), step.batch.num_micro_batches

    def gets_gradient(unit: FsdpUnit) -> bool:
        return unit.block is None or trace.blocks[unit.block].backward is not None

    again = [unit for unit in units if not unit.is_rest and gets_gradient(unit)]
    # FSDP2 prefetches in the backward pass, also a block that then needs no gradient
    unused = [unit for unit in units if not unit.is_rest and not gets_gradient(unit)][-1:]
    gradients = sum(unit.gradients for unit in units)
    return Traffic(
        shards=shards,
        copies=copies,
        heads=RankGroup(exchanging, min(exchanging, step.per_node)),
        # between nodes each ring has one link: that of its last rank in a node
        rings=RankGroup(sharing // heads, sharing // heads if sharing <= step.per_node else 1),
        forward=times * shards.ring_bytes(sum(unit.weights for unit in units)),
        backward=times * shards.ring_bytes(sum(unit.weights for unit in (*again, *unused))),
        scattered=shards.ring_bytes(gradients),
        reduced=2 * copies.ring_bytes(gradients // shards.size),
        tokens=times * trace.sent_bytes,
        passed=times * trace.ring_bytes,
    )


def fsdp_units(step: MetaStep) -> list[FsdpUnit]:
    """List the groups of parameters that `longtake.parallel.fsdp.apply_fsdp` makes, in their order.

    If each rank holds the whole model there is one: nothing is gathered, and gradients are reduced
    when all are there.
    """
    model, blocks = step.components.model, step.tracer.subject.blocks
    if step.num_shards == 1:
        return [_fsdp_unit(None, True, list(model.parameters()), step)]
    names = {block: name for name, block in blocks.items()}
    return [
        _fsdp_unit(names.get(part), module is model, parameters, step)
        for part, module, parameters in sharding_units(model, list(blocks.values()))
    ]


def _fsdp_unit(
    block: str | None, is_rest: bool, parameters: Sequence[nn.Parameter], step: MetaStep
) -> FsdpUnit:
    def padded(parameter: Tensor) -> int:
        # FSDP2 shards the first dimension, padded to a multiple of the ranks.
        rows, shards = parameter.shape[0], step.num_shards
        return -(-rows // shards) * shards * (parameter.numel() // rows)

    return FsdpUnit(
        block,
        is_rest,
        weights=sum(gathered_itemsize(p, step) * padded(p) for p in parameters),
        gradients=sum(max(4, p.itemsize) * padded(p) for p in parameters if p.requires_grad),
    )


@dataclass(frozen=True)
class BlockTiming:
    """Seconds of compute and communication of one block, or outside of blocks, in a micro-batch."""

    forward: float
    backward: float  # 0 where no gradient passes
    gather: float  # to gather its weights, each time
    scatter: float  # to reduce-scatter its gradients
    reduce: float  # to all-reduce its gradients between copies


@dataclass(frozen=True)
class StepTimeline:
    """Timings of one optimizer update over several ranks: its blocks in order, and the rest.

    The order of operations is FSDP2's (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py):
    while one block is computed, the next one's weights are gathered, and in the backward pass the
    gradients of the one before are reduced. One communicator does both, one after the other;
    all-reduces between copies use another.
    """

    blocks: Sequence[BlockTiming]
    rest: BlockTiming  # its compute counts between forward and backward pass
    num_micro_batches: int
    waits: float  # seconds per micro-batch that compute waits for tokens of other ranks
    ring_waits: float = 0.0  # seconds per micro-batch that it waits for keys and values of a ring

    def seconds(self) -> float:
        # Gradients are reduced in the last micro-batch only.
        between = self.without("scatter", "reduce").micro_batch_seconds()
        last = self.micro_batch_seconds()
        waits = self.num_micro_batches * (self.waits + self.ring_waits)
        return (self.num_micro_batches - 1) * between + last + waits

    def compute_seconds(self) -> float:
        timings = (*self.blocks, self.rest)
        return self.num_micro_batches * sum(each.forward + each.backward for each in timings)

    def without(self, *names: str) -> "StepTimeline":
        """Return this timeline as if some operations took no time.

        They are named `gather`, `scatter`, `reduce`, `waits` or `ring_waits`.
        """
        waits = 0.0 if "waits" in names else self.waits
        ring_waits = 0.0 if "ring_waits" in names else self.ring_waits
        none = {name: 0.0 for name in names if name not in ("waits", "ring_waits")}
        blocks = [replace(timing, **none) for timing in self.blocks]
        rest = replace(self.rest, **none)
        return replace(self, blocks=blocks, rest=rest, waits=waits, ring_waits=ring_waits)

    def micro_batch_seconds(self) -> float:
        """Simulate compute, gathers and reductions of a micro-batch, which wait for each other.

        Returns its seconds.
        """
        compute = link = self.rest.gather
        begun = [0.0, 0.0]
        for timing in self.blocks:
            # FSDP2 gathers one block ahead: this one's gather waits until the block before last
            # began.
            link = max(link, begun[-2]) + timing.gather
            begun.append(max(compute, link))
            compute = begun[-1] + timing.forward
        return self._backward_end(compute + self.rest.forward, max(link, compute))

    def _backward_end(self, compute: float, link: float) -> float:
        """Return the time at which all gradients are reduced; arguments are times at the loss."""
        timings = [timing for timing in reversed(self.blocks) if timing.backward]
        gathers = [*(timing.gather for timing in timings), 0.0]
        ready = link = link + gathers[0]
        scattered = across = 0.0
        for timing, next_gather in zip(timings, gathers[1:], strict=True):
            begun = max(compute, ready)
            ready = link = max(link, begun) + next_gather
            compute = max(begun + timing.backward, scattered)  # one reduction runs at a time
            scattered = link = max(link, compute) + timing.scatter
            across = max(across, link) + timing.reduce
        link = max(link, compute) + self.rest.scatter
        return max(compute, max(across, link) + self.rest.reduce)


def timeline_of(step: MetaStep, trace: StepTrace, traffic: Traffic, links: Links) -> StepTimeline:
    """Combine a step's traced compute with the time of its traffic over these links."""
    units = fsdp_units(step)

    def timing(block: str | None, forward: float, backward: float) -> BlockTiming:
        mine = [unit for unit in units if unit.block == block]
        weights, gradients = sum(u.weights for u in mine), sum(u.gradients for u in mine)
        shards, copies = traffic.shards, traffic.copies
        reduced = 2 * copies.ring_bytes(gradients // shards.size)
        return BlockTiming(
            forward,
            backward,
            gather=shards.seconds(shards.ring_bytes(weights), links),
            scatter=shards.seconds(shards.ring_bytes(gradients), links),
            reduce=copies.seconds(reduced, links),
        )

    blocks = [
        timing(name, block.forward.seconds, block.backward.seconds if block.backward else 0.0)
        for name, block in trace.blocks.items()
    ]
    outside = trace.seconds - sum(each.forward + each.backward for each in blocks)
    waits = traffic.heads.seconds(traffic.tokens, links)
    times, rings = step.batch.num_micro_batches, traffic.rings
    # A rank attends to each received block but the last while the next one arrives.
    beside = trace.attention_seconds * (rings.size - 1) / rings.size
    return StepTimeline(
        blocks=blocks,
        rest=timing(None, outside, 0.0),
        num_micro_batches=times,
        waits=waits / times,
        ring_waits=max(0.0, rings.seconds(traffic.passed, links) / times - beside),
    )


@dataclass(frozen=True)
class CommCost:
    """Traffic of each rank in one step for one purpose."""

    what: str
    """Purpose of the traffic: weights, gradients to shards, gradients (between copies of the
    model), tokens, or keys and values."""
    ranks: int  # ranks of each collective
    over: str  # slowest of its links: node or network
    num_bytes: int
    seconds: float
    exposed_seconds: float  # seconds by which the step would be shorter without it


@dataclass(frozen=True)
class MeshAdvice:
    """A change of the recipe that makes a step over several ranks faster; its time and memory."""

    changes: Sequence[str]  # in the form of `--set`
    step_seconds: float
    step_peak_bytes: int
    fits: bool | None


@dataclass(frozen=True)
class MeshForecast:
    """Forecast of one update over all ranks, its traffic and time, without the optimizer."""

    links: Links
    num_shards: int
    num_copies: int
    sent: Sequence[CommCost]
    compute_seconds: float
    step_seconds: float
    idle_share: float  # share of a batch's places that stay empty, since it does not divide
    advice: Sequence[MeshAdvice] = ()
    """Changes of the recipe that make a step faster, best first; empty if ranks wait little for the
    network."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.sent)

    @property
    def exposed_share(self) -> float:
        return 1 - self.compute_seconds / self.step_seconds if self.step_seconds else 0.0


def mesh_forecast(known: Forecast, links: Links) -> MeshForecast | None:
    """Forecast the network traffic between ranks; None for one process or without a trace."""
    if known.step.world_size == 1 or known.chosen is None:
        return None
    _, trace = known.chosen
    plain = without_advice(known.step, trace, links)
    if plain.exposed_share < MUCH_EXPOSED:
        return plain
    helping = []
    for changes in _possible_changes(known.step):
        changed = what_if(known, changes)
        if changed is None:
            continue
        seconds = without_advice(changed.step, changed.trace, links).step_seconds
        if seconds < plain.step_seconds:
            policy = changed.policy
            helping.append(MeshAdvice(changes, seconds, policy.step_peak_bytes, policy.fits))
    helping.sort(key=lambda advice: (advice.fits is False, advice.step_seconds))
    return replace(plain, advice=helping)


def idle_share(batch_size: int, data_size: int) -> float:
    return 1 - batch_size / (num_places(batch_size, data_size) * data_size)


def without_advice(step: MetaStep, trace: StepTrace, links: Links) -> MeshForecast:
    traffic = traffic_of(step, trace)
    line = timeline_of(step, trace, traffic, links)
    whole = line.seconds()

    def cost(what: str, num_bytes: int, group: RankGroup, name: str) -> CommCost:
        exposed = whole - line.without(name).seconds()
        over = "node" if group.size <= group.in_node else "network"
        return CommCost(what, group.size, over, num_bytes, group.seconds(num_bytes, links), exposed)

    weights = traffic.forward + traffic.backward
    rows = [
        cost("weights", weights, traffic.shards, "gather"),
        cost("gradients to shards", traffic.scattered, traffic.shards, "scatter"),
        cost("gradients", traffic.reduced, traffic.copies, "reduce"),
        cost("tokens", traffic.tokens, traffic.heads, "waits"),
        cost("keys and values", traffic.passed, traffic.rings, "ring_waits"),
    ]
    batch, sharing = step.batch.global_batch_size, step.recipe.parallel.context
    return MeshForecast(
        links=links,
        num_shards=step.num_shards,
        num_copies=step.num_copies,
        sent=[row for row in rows if row.num_bytes],
        compute_seconds=line.compute_seconds(),
        step_seconds=whole,
        idle_share=idle_share(batch, step.world_size // sharing),
    )


def _possible_changes(step: MetaStep) -> Iterator[list[str]]:
    section, model = step.recipe.parallel, step.components.model
    hybrid, in_bf16 = ["parallel.strategy=hybrid"], ["parallel.param_dtype=bf16"]
    may_be_hybrid = section.strategy == "shard" and step.world_size > step.per_node
    if may_be_hybrid:
        yield hybrid
    is_rounded = section.param_dtype == "fp32" and step.precision == "bf16"
    if step.num_shards > 1 and is_rounded and any(p.itemsize == 4 for p in model.parameters()):
        yield in_bf16
        if may_be_hybrid:
            yield [*hybrid, *in_bf16]
    if step.batch.num_micro_batches > 1:
        # With fewer micro-batches, weights are gathered less often.
        yield [f"training.micro_batch_size={2 * step.batch.micro_batch_size}"]
