"""Finds the fastest way to run a model's blocks within a memory budget: an integer program.

The bytes that a block saves in its forward pass, and takes in its backward pass, hardly depend on
how other blocks run. One trace per option, with all blocks run by it, thus gives the costs of any
mixture. The idea is that of Checkmate (Jain et al., 2020) and torch's `sac_milp`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longtake.models.streamed import NUM_BUFFERS
from longtake.parallel.transfer import pinned_bytes
from longtake.planner.activation_checkpointing import ACTIVATIONS, POLICIES, RECOMPUTED, options_of
from longtake.planner.block_weights import (
    Floats,
    WeightCosts,
    buffer_bytes,
    link_seconds,
    weight_costs,
)
from longtake.planner.record import (
    KEEP,
    Activations,
    BlockOption,
    BlockWeights,
    Options,
    is_streamed,
    quantization_of,
)
from longtake.planner.trace import BlockTrace, StepTrace, Tracer

_GIB = 2**30
_MOST_NODES = 20
"""Most nodes of the integer program's search tree. Unlike a time limit, it makes a plan independent
of what else runs on the computer. More nodes prove how good a solution is, but find no better one
(docs/decisions/0106)."""
_GAP = 1e-3
"""Largest relative distance of the solver's step time from the optimum."""
_MOST_TRIES = 5
_LEAST_STEP_BYTES = 2**16  # smallest tightening of the budget; the solver's tolerance hides less
_LEAST_GAIN: Mapping[str, float] = {"offload": 0.002, "offload-input": 0.001, "stream": 0.001}
"""Share of a block's seconds that an option which copies has to save before it is chosen."""
_ROUNDNESS: Mapping[str, float] = {"int8": 1, "fp8": 1.5, "nf4": 2}
"""How many times `model.quantize_gain` a number format has to save over exact weights."""


@dataclass(frozen=True)
class BlockCosts:
    """Memory and time of each block under each option: arrays [blocks, options] or [blocks].

    An option is one treatment of the block's activations and frozen weights.
    """

    names: tuple[str, ...]
    saved: Floats  # bytes that remain after the forward pass
    forward: Floats  # peak of the forward pass above its beginning
    backward: Floats  # peak of the backward pass above its beginning
    forward_seconds: Floats
    backward_seconds: Floats
    at_forward: Floats  # resident before each forward pass, without earlier blocks' `saved`
    at_backward: Floats  # resident before each backward pass, without any `saved`
    at_loss: float  # peak between the last forward and first backward pass, without `saved`
    least_peak: float  # peak before the first block, whatever blocks save
    other_seconds: float
    away: Floats  # bytes of weights that are off the device, or saved by quantisation
    streamed: Floats  # of `away`, bytes that are copied to device buffers for each pass
    offloaded: Floats  # of the activations, bytes that are copied to the host and back
    pinned: Floats  # host memory that `offloaded` takes when pinned
    options: tuple[BlockOption, ...]  # of the columns; the first keeps all, or the most
    link: float = math.inf  # bytes per second to the host, and the same back
    quantize_gain: float = 0.0
    """Share of a block's seconds that quantisation has to save (`model.quantize_gain`)."""

    def peak_bytes(self, options: Options) -> float:
        x = self._chosen(options)
        buffers = buffer_bytes((self.streamed * x).sum(axis=1))
        return buffers + float((self.levels() @ x.ravel() + self.fixed()).max())

    @property
    def seconds(self) -> Floats:
        return self.forward_seconds + self.backward_seconds

    def predicted_seconds(self, options: Options) -> float:
        x = self._chosen(options)
        forward, backward, streamed, offloaded = (
            (each * x).sum(axis=1)
            for each in (self.forward_seconds, self.backward_seconds, self.streamed, self.offloaded)
        )
        waits = link_seconds(forward, backward, streamed, offloaded, self.link)
        return self.other_seconds + float(forward.sum() + backward.sum()) + waits

    def host_bytes(self, options: Options) -> float:
        return float(((self.streamed + self.pinned) * self._chosen(options)).sum())

    def has_backward(self) -> Floats:
        return (self.backward_seconds[:, 0] > 0).astype(np.float64)

    def _chosen(self, options: Options) -> Floats:
        x = np.zeros((len(self.names), len(self.options)))
        for row, name in enumerate(self.names):
            x[row, self.options.index(options.get(name, KEEP))] = 1
        return x

    def levels(self) -> Floats:
        """Return the bytes that each block's choice of an option adds at each moment of a step.

        The array is [moments, blocks x options]. The moments are each block's forward pass, each
        block's backward pass, the loss, and the time before the first block. Offloaded activations
        stay on the device while the next block runs. The buffers of streamed weights are not
        included: see `buffer_bytes`.
        """
        number, width = self.saved.shape
        rows = np.zeros((2 * number + 2, number, width)) - self.away
        for block in range(number):
            rows[block, :block] += self.saved[:block]
            # While a block runs, what earlier blocks saved is resident, and its own bytes count by
            # peak.
            rows[block, block] += self.forward[block]
            rows[number + block, : block + 1] += self.saved[: block + 1]
            rows[number + block, block] += self.backward[block]
            if block:
                rows[block, block - 1] += self.offloaded[block - 1]
                rows[number + block, block - 1] += self.offloaded[block - 1]
        rows[-2] += self.saved
        rows[-2, -1] += self.offloaded[-1]
        return rows.reshape(2 * number + 2, number * width)

    def fixed(self) -> Floats:
        # In the order of the rows of `levels`.
        ends = [self.at_loss, self.least_peak]
        return np.concatenate([self.at_forward, self.at_backward, ends])


def costs_of(
    traces: Mapping[Activations, StepTrace],
    weights: Sequence[WeightCosts],
    link: float = math.inf,
    *,
    offloads: bool = False,
) -> BlockCosts:
    """Compute the costs of blocks from traces of a step in which all blocks are treated alike.

    Args:
        traces: traces by treatment of activations; the first is `keep`, the basis of comparison.
        weights: costs of each treatment of frozen weights, which the traces keep on the device.
        link: bytes per second between the device and host memory.
        offloads: true if the inputs of recomputed blocks may be offloaded; this needs no trace,
            since a recomputed block saves only its inputs.
    """
    kept = _activation_costs(traces, offloads=offloads)
    names = [option.activations for option in kept.options]

    def wide(values: Floats) -> Floats:
        """Repeat costs that depend on the treatment of activations alone: [blocks, options]."""
        return np.repeat(values, len(weights), axis=1)

    def tall(values: Sequence[Floats]) -> Floats:
        """Tile costs that depend on the treatment of weights alone: [blocks, options]."""
        return np.tile(np.stack(values, axis=1), (1, len(names)))

    # A recomputed block dequantises its weights twice in the backward pass: forward, then backward.
    made, work = tall([each.seconds for each in weights]), tall([each.work for each in weights])
    again = np.array([[float(name in RECOMPUTED) for name in names]])
    has_backward = np.isfinite(kept.at_backward)[:, None]
    return replace(
        kept,
        saved=wide(kept.saved),
        forward=wide(kept.forward) + work,
        backward=wide(kept.backward) + work * has_backward,
        forward_seconds=wide(kept.forward_seconds) + made,
        backward_seconds=wide(kept.backward_seconds) + made * has_backward * (1 + wide(again)),
        away=tall([each.away for each in weights]),
        streamed=tall([each.streamed for each in weights]),
        offloaded=wide(kept.offloaded),
        pinned=wide(kept.pinned),
        options=tuple(BlockOption(name, each.name) for name in names for each in weights),
        link=link,
    )


def _activation_costs(traces: Mapping[Activations, StepTrace], *, offloads: bool) -> BlockCosts:
    """Read blocks' costs off traces, one for each treatment of activations.

    Bytes that other blocks have saved by then are subtracted. All weights stay on the device.
    """
    if offloads:
        traces = {**traces, "offload-input": traces["recompute"]}

    def read(number: Callable[[BlockTrace], float]) -> Floats:
        rows = [[number(block) for block in trace.blocks.values()] for trace in traces.values()]
        return np.array(rows, dtype=np.float64).T.copy()

    offloaded = read(lambda block: block.offloaded_bytes)
    pinned = read(lambda block: block.pinned_bytes)
    before = np.vstack([np.zeros((1, len(traces))), offloaded[:-1]])  # of the block before
    begins = read(lambda block: block.forward.begin_bytes)
    end = read(lambda block: block.forward.end_bytes)[-1:]
    # growth from block to block, without activations that are on their way to the host
    saved = np.diff(np.vstack([begins, end]), axis=0) - offloaded + before
    so_far = np.cumsum(saved, axis=0)
    at_forward = begins[:, 0] - (so_far[:, 0] - saved[:, 0])
    at_backward = read(lambda b: b.backward.begin_bytes if b.backward else -np.inf)[:, 0]
    at_backward = at_backward - so_far[:, 0]
    has_backward = np.isfinite(at_backward)[:, None]
    backward = read(lambda b: b.backward.peak_bytes if b.backward else 0)
    # Offloaded bytes of the block before return while this one's backward pass runs.
    backward = backward - so_far - before - np.where(has_backward, at_backward[:, None], 0)
    forward = read(lambda block: block.forward.peak_bytes)
    forward = forward - at_forward[:, None] - (so_far - saved) - before
    saved_by_all = float(so_far[-1, 0])
    if offloads:
        inputs = np.maximum(0, saved[:, -1])
        offloaded[:, -1] = inputs
        pinned[:, -1] = [pinned_bytes(int(size)) for size in inputs]
        saved[:, -1] -= inputs
        backward[:, -1] += inputs  # copied back before the recomputation
    kept, forward_seconds = traces["keep"], read(lambda block: block.forward.seconds)
    backward_seconds = read(lambda block: block.backward.seconds if block.backward else 0.0)
    # One sum of all passes: sums of blocks would round otherwise, and change plans' last digits.
    in_blocks = float(np.stack([forward_seconds, backward_seconds], axis=-1)[:, 0].sum())
    return BlockCosts(
        names=tuple(kept.blocks),
        saved=saved,
        forward=forward,
        backward=np.where(has_backward, backward, 0),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        at_forward=at_forward,
        at_backward=at_backward,
        at_loss=kept.loss_span.peak_bytes - saved_by_all,
        least_peak=float(kept.front_peak_bytes),
        other_seconds=kept.seconds - kept.link_seconds - in_blocks,
        away=np.zeros_like(saved),
        streamed=np.zeros_like(saved),
        offloaded=offloaded,
        pinned=pinned,
        options=tuple(map(BlockOption, traces)),
    )


def fastest(
    costs: BlockCosts, budget_bytes: float, host_bytes: float | None = None
) -> dict[str, BlockOption] | None:
    """Find the fastest options of blocks whose predicted peak memory is within a budget.

    None if there are none.

    Args:
        costs: costs of each block under each option.
        budget_bytes: limit of device memory.
        host_bytes: limit of host memory for streamed weights and offloaded activations; None: no
            limit.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, that few runs need

    # Unknowns: an option per block (0 or 1), the seconds of each wait, and the size of a buffer.
    number, width = costs.saved.shape
    size, scale = number * width, float(costs.seconds.max())
    waits = _waits(costs) / scale
    num_waits = len(waits)

    def joined(choices: Any, of_waits: Floats | None = None, of_buffer: int = 0) -> Any:
        """Widen a constraint matrix of the integer program by columns of its other unknowns.

        Its columns are the blocks' options; added are those of the waits for copies, in seconds,
        and of the buffer of streamed weights, in GiB.
        """
        count = len(choices)
        middle = np.zeros((count, num_waits)) if of_waits is None else of_waits
        return np.hstack([choices, middle, np.full((count, 1), of_buffer)])

    one_each = np.kron(np.eye(number), np.ones(width))
    room = (budget_bytes - costs.fixed()) / _GIB
    streamed, host = costs.streamed.ravel() / _GIB, (costs.streamed + costs.pinned) / _GIB
    host_room = np.inf if host_bytes is None else host_bytes / _GIB
    constraints = [
        # One option per block; memory at each moment; a buffer as large as the largest streamed
        # block; each wait at least its copy less the compute it hides behind; host memory.
        LinearConstraint(joined(one_each), 1, 1),
        LinearConstraint(joined(costs.levels() / _GIB, None, NUM_BUFFERS), -np.inf, room),
        LinearConstraint(joined(one_each * streamed, None, -1), -np.inf, 0),
        LinearConstraint(joined(waits, -np.eye(num_waits)), -np.inf, 0),
        LinearConstraint(joined(host.reshape(1, -1)), -np.inf, host_room),
    ]
    most = np.concatenate([1 - _pointless(costs).ravel(), np.full(num_waits + 1, np.inf)])
    gains = [_least_gain(each, costs.quantize_gain) for each in costs.options]
    preferred = costs.seconds + np.array(gains) * costs.seconds[:, :1]
    found = milp(
        np.concatenate([preferred.ravel() / scale, np.ones(num_waits), [0]]),
        integrality=np.concatenate([np.ones(size), np.zeros(num_waits + 1)]),
        bounds=Bounds(0, most),
        constraints=constraints,
        options={
            "node_limit": _MOST_NODES,
            "mip_rel_gap": _GAP,
        },
    )
    if found.x is None:
        return None
    chosen = found.x[:size].reshape(number, width).argmax(axis=1)
    return {name: costs.options[index] for name, index in zip(costs.names, chosen, strict=True)}


def _least_gain(option: BlockOption, quantize_gain: float) -> float:
    """Return the share of a block's seconds that an option has to save in order to be chosen."""
    kind, copies = quantization_of(option.weights), "stream" * is_streamed(option.weights)
    rounding = 0.0 if kind is None else quantize_gain * _ROUNDNESS[kind]
    return _LEAST_GAIN.get(option.activations, 0) + _LEAST_GAIN.get(copies, 0) + rounding


def _waits(costs: BlockCosts) -> Floats:
    """Return the seconds of each copy between device and host beyond the compute that hides it.

    The array is [copies, blocks x options]; a copy whose row is positive for the chosen options
    makes the step wait. Copies of weights may really hide behind several blocks, so that with few
    streamed blocks `link_seconds` is lower.
    """
    number, width = costs.saved.shape
    rows: list[Floats] = []

    def add(block: int, moved: Floats, behind: int, seconds: Floats) -> None:
        if moved[block].any() and 0 <= behind < number:
            row = np.zeros((number, width))
            row[block] += moved[block] / costs.link
            row[behind] -= seconds[behind]
            rows.append(row.ravel())

    # The last block's activations are needed at once, so they stay.
    leaving = costs.offloaded.copy()
    leaving[-1] = 0
    back = (costs.streamed + leaving) * costs.has_backward()[:, None]
    for block in range(number):
        add(block, costs.streamed, block - 1, costs.forward_seconds)
        add(block, leaving, block + 1, costs.forward_seconds)
        add(block, back, block + 1, costs.backward_seconds)
    return np.array(rows).reshape(len(rows), number * width)


def _pointless(costs: BlockCosts) -> Floats:
    """Mark options that save no memory over keeping a block: 1 for these, else 0 [blocks, options].

    This is so before the first trainable parameter, where the solver would choose by chance.
    """
    keeps = {option: column for column, option in enumerate(costs.options)}
    pointless = np.zeros(costs.saved.shape)
    for column, option in enumerate(costs.options):
        if option.activations != "keep":  # compared with keeping activations, with equal weights
            kept = keeps.get(BlockOption("keep", option.weights), 0)
            gains = [
                each[:, column] < each[:, kept]
                for each in (costs.saved, costs.forward, costs.backward)
            ]
            pointless[:, column] = ~np.logical_or.reduce(gains)
        if option.weights != costs.options[0].weights:
            pointless[costs.away[:, column] <= costs.away[:, 0], column] = 1
    return pointless


@dataclass(frozen=True)
class BestOptions:
    """The fastest options of blocks that fit the memory, confirmed by a trace of the whole step."""

    options: Options
    predicted_bytes: int  # peak of both passes, composed of the costs of blocks
    traced: StepTrace
    overhead: float  # time of a step over that without recompute, minus 1
    overhead_with_another_gib: float | None = None  # None: nobody has asked for it

    def per_block(self) -> dict[str, int]:
        """Count the blocks that use each option; unused treatments of activations count 0."""
        return {
            **dict.fromkeys(ACTIVATIONS, 0),
            **Counter(map(str, self.options.values())),
        }


@dataclass(frozen=True)
class PolicySweep:
    """Traces of a step under every named recompute policy, and the costs of its blocks."""

    traces: Mapping[str, StepTrace]
    costs: BlockCosts
    weight_bytes: int  # bytes of the model with all weights on the device

    def overhead(self, trace: StepTrace) -> float:
        return trace.seconds / self.traces["none"].seconds - 1


def sweep_policies(tracer: Tracer) -> PolicySweep:
    """Trace a step under every named recompute policy and with each treatment of activations."""
    subject = tracer.subject
    names, base = tuple(subject.blocks), subject.weights[0]

    def trace_all(policies: Sequence[str], weights: BlockWeights) -> dict[str, StepTrace]:
        return {name: tracer.trace(options_of(name, names, weights)) for name in policies}

    traces = trace_all(POLICIES, base)
    # Choices are compared with unstreamed weights, though named policies may stream them.
    plain = traces if base == "keep" else trace_all(("none", "save-attention", "all"), "keep")
    of_activations: dict[Activations, StepTrace] = {
        "keep": plain["none"],
        "save-attention": plain["save-attention"],
        "recompute": plain["all"],
    }
    if subject.offloads:
        of_activations["offload"] = tracer.trace(dict.fromkeys(names, BlockOption("offload")))
    blocks = list(subject.blocks.values())
    weights = [weight_costs(name, blocks, tracer.device) for name in subject.weights]
    costs = costs_of(of_activations, weights, tracer.device.link, offloads=subject.offloads)
    costs = replace(costs, quantize_gain=subject.quantize_gain)
    return PolicySweep(traces, costs, plain["none"].weight_bytes)


def find_best(
    tracer: Tracer,
    sweep: PolicySweep,
    budget_bytes: int | None,
    update_bytes: int = 0,
    *,
    tries_more: bool = False,
) -> BestOptions | None:
    """Find the fastest options of blocks whose traced peak is within a budget; None if none fit.

    Without a budget every block is kept.

    Args:
        tracer: tracer of the training step.
        sweep: traces that `sweep_policies` made with this tracer.
        budget_bytes: limit for the forward and backward pass.
        update_bytes: bytes that the optimizer's update takes, with all weights on the device.
        tries_more: true to find the overhead with another GiB, too, which may take a second.
    """
    names, kept = tuple(tracer.subject.blocks), sweep.traces["none"]
    base = tracer.subject.weights[0]
    if budget_bytes is None:
        unchanged = options_of("none", names, base)
        return BestOptions(unchanged, kept.peak_bytes, kept, 0.0, 0.0)
    costs = replace(sweep.costs, least_peak=max(sweep.costs.least_peak, update_bytes))
    whole_bytes = update_bytes - sweep.weight_bytes  # bytes of an update beside the weights
    fitting: list[tuple[Options, StepTrace]] = [
        (options_of(policy, names, base), trace)
        for policy, trace in sweep.traces.items()
        if max(trace.peak_bytes, trace.weight_bytes + whole_bytes) <= budget_bytes
        and trace.host_bytes <= (tracer.subject.host_bytes or math.inf)
    ]
    with ThreadPoolExecutor(1) as beside:  # the solver works without Python's lock
        more_bytes, host_bytes = budget_bytes + _GIB, tracer.subject.host_bytes
        more = beside.submit(fastest, costs, more_bytes, host_bytes) if tries_more else None
        # A policy that is as fast as keeping everything cannot be improved on.
        if not any(trace.seconds <= kept.seconds for _, trace in fitting):
            fitting += _solved(tracer, costs, budget_bytes, whole_bytes)
    if not fitting:
        return None
    options, traced = min(fitting, key=lambda each: each[1].seconds)

    overhead, with_another_gib = sweep.overhead(traced), None
    if more is not None:
        faster = costs.predicted_seconds(more.result() or options) / kept.seconds - 1
        # The solver may be a little off the optimum, but more memory never costs time.
        with_another_gib = min(faster, overhead)
    predicted = int(costs.peak_bytes(options))
    return BestOptions(options, predicted, traced, overhead, with_another_gib)


def _solved(
    tracer: Tracer, costs: BlockCosts, budget_bytes: int, whole_bytes: int
) -> list[tuple[Options, StepTrace]]:
    """Find the fastest options of blocks and trace them; tighten the budget until they fit."""
    within = float(budget_bytes)
    for _ in range(_MOST_TRIES):
        options = fastest(costs, within, tracer.subject.host_bytes)
        if options is None:
            return []
        traced = tracer.trace(options)
        needed = max(traced.peak_bytes, traced.weight_bytes + whole_bytes)
        if needed <= budget_bytes:
            return [(options, traced)]
        # Below what was predicted of this mixture, or else an equal one could be found again.
        predicted = costs.peak_bytes(options)
        within = min(within, predicted) - max(needed - budget_bytes, _LEAST_STEP_BYTES)
    return []
