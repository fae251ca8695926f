"""Finds the fastest way to run the blocks that fits a budget: an integer program over all blocks.

What a block saves in the forward pass, and what its backward pass takes for a while, hardly depends
on how other blocks are run. So one trace for each option, in which all blocks are run by it, says
what any mixture takes. The idea is that of Checkmate (Jain et al., 2020) and torch's `sac_milp`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.planner.activation_checkpointing import (
    ACTIVATIONS,
    KEEP,
    POLICIES,
    Activations,
    BlockOption,
    Options,
    options_of,
)
from longtake.planner.trace import StepTrace, Tracer

_GIB = 2**30
_TIME_LIMIT_SECONDS = 10.0
_GAP = 1e-3
"""Share of the best possible time that a solution may be away from it."""
_MOST_TRIES = 5
_LEAST_STEP_BYTES = 2**16  # below it the solver's tolerance hides the difference

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BlockCosts:
    """What each block costs under each option. Arrays are [blocks, options] or [blocks]; bytes."""

    names: tuple[str, ...]
    saved: Floats  # left behind by the forward pass
    forward: Floats  # the most in the forward pass above what was there before
    backward: Floats  # the most in the backward pass above what was there when it began
    seconds: Floats
    at_forward: Floats  # there before each forward pass, beside what earlier blocks saved
    at_backward: Floats  # there before each backward pass, beside what it and earlier blocks saved
    at_loss: float  # the most between forward and backward pass, beside what all blocks saved
    least_peak: float  # the most outside the blocks, whatever they save
    other_seconds: float
    options: tuple[BlockOption, ...] = tuple(map(BlockOption, ACTIVATIONS))
    """Of the columns; the first keeps everything."""

    def peak_bytes(self, options: Options) -> float:
        x = self._chosen(options)
        return max(self.least_peak, float((self.levels() @ x.ravel() + self.fixed()).max()))

    def predicted_seconds(self, options: Options) -> float:
        return self.other_seconds + float((self.seconds * self._chosen(options)).sum())

    def _chosen(self, options: Options) -> Floats:
        x = np.zeros((len(self.names), len(self.options)))
        for row, name in enumerate(self.names):
            x[row, self.options.index(options.get(name, KEEP))] = 1
        return x

    def levels(self) -> Floats:
        """[moments, blocks x options]: what each choice adds at each moment of a step."""
        number, width = self.saved.shape
        rows = np.zeros((2 * number + 1, number, width))
        for block in range(number):
            rows[block, :block] = self.saved[:block]
            rows[block, block] = self.forward[block]
            rows[number + block, : block + 1] = self.saved[: block + 1]
            rows[number + block, block] += self.backward[block]
        rows[-1] = self.saved
        return rows.reshape(2 * number + 1, number * width)

    def fixed(self) -> Floats:
        return np.concatenate([self.at_forward, self.at_backward, [self.at_loss]])


def costs_of(traces: Mapping[Activations, StepTrace]) -> BlockCosts:
    """What blocks cost, from a trace for each option in which all blocks are run by it.

    The first trace is of `keep`, with which the others are compared.
    """
    kept, each = traces["keep"], list(traces.values())
    saved = np.stack([_saved(trace) for trace in each], axis=1)
    so_far = np.cumsum(saved, axis=0)
    blocks = list(kept.blocks.values())
    at_forward = _array([block.forward.begin_bytes for block in blocks])
    at_forward -= so_far[:, 0] - saved[:, 0]
    at_backward = _array([b.backward.begin_bytes if b.backward else -np.inf for b in blocks])
    at_backward -= so_far[:, 0]
    has_backward = np.isfinite(at_backward)
    forward, backward = _peaks(each)
    above = backward - so_far - np.where(has_backward, at_backward, 0)[:, None]
    seconds = np.stack([_seconds(trace) for trace in each], axis=1)
    return BlockCosts(
        names=tuple(kept.blocks),
        saved=saved,
        forward=forward - at_forward[:, None] - (so_far - saved),
        backward=np.where(has_backward[:, None], above, 0),
        seconds=seconds,
        at_forward=at_forward,
        at_backward=at_backward,
        at_loss=kept.loss_span.peak_bytes - float(so_far[-1, 0]),
        least_peak=float(kept.front_peak_bytes),
        other_seconds=kept.seconds - float(seconds[:, 0].sum()),
        options=tuple(map(BlockOption, traces)),
    )


def _saved(trace: StepTrace) -> Floats:
    forward = [block.forward for block in trace.blocks.values()]
    levels = [span.begin_bytes for span in forward] + [forward[-1].end_bytes]
    return np.diff(_array(levels))


def _peaks(traces: Sequence[StepTrace]) -> tuple[Floats, Floats]:
    """[blocks, options] each: the most in every block's forward and backward pass."""
    blocks = [list(trace.blocks.values()) for trace in traces]
    forward = [[block.forward.peak_bytes for block in each] for each in blocks]
    backward = [[b.backward.peak_bytes if b.backward else 0 for b in each] for each in blocks]
    return _array(forward).T, _array(backward).T


def _seconds(trace: StepTrace) -> Floats:
    """[blocks]: forward and backward pass."""
    return _array(
        [
            block.forward.seconds + (block.backward.seconds if block.backward else 0)
            for block in trace.blocks.values()
        ]
    )


def _array(values: Sequence[object]) -> Floats:
    return np.array(values, dtype=np.float64)


def fastest(costs: BlockCosts, budget_bytes: float) -> dict[str, BlockOption] | None:
    """The fastest options whose predicted peak is within a budget, or None if there are none."""
    number, width = costs.saved.shape
    room = budget_bytes - costs.fixed()
    if costs.least_peak > budget_bytes:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, that few runs need

    one_each = np.kron(np.eye(number), np.ones(width))
    found = milp(
        costs.seconds.ravel() / costs.seconds.max(),
        integrality=np.ones(number * width),
        bounds=Bounds(0, 1 - _pointless(costs).ravel()),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs.levels() / _GIB, -np.inf, room / _GIB),
        ],
        options={"time_limit": _TIME_LIMIT_SECONDS, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        return None
    chosen = found.x.reshape(number, width).argmax(axis=1)
    return {name: costs.options[index] for name, index in zip(costs.names, chosen, strict=True)}


def _pointless(costs: BlockCosts) -> Floats:
    """[blocks, options]: 1 where an option gains nothing over keeping a block.

    Such as before the first trainable parameter; the solver would choose there by chance.
    """
    gains = [each < each[:, :1] for each in (costs.saved, costs.forward, costs.backward)]
    pointless: Floats = (~np.logical_or.reduce(gains)).astype(np.float64)
    pointless[:, 0] = 0
    return pointless


@dataclass(frozen=True)
class BestOptions:
    """The fastest options that fit, traced again as a whole."""

    options: Options
    predicted_bytes: int  # peak of forward and backward pass, composed of single blocks
    traced: StepTrace
    overhead: float  # share of a step without recompute that it takes longer
    overhead_with_another_gib: float  # the same with a budget of 1 GiB more

    def per_block(self) -> dict[str, int]:
        """Blocks of each option; of those that no block has, only the activations'."""
        return {**dict.fromkeys(ACTIVATIONS, 0), **Counter(map(str, self.options.values()))}


@dataclass(frozen=True)
class PolicySweep:
    """Every named policy, traced."""

    traces: Mapping[str, StepTrace]
    costs: BlockCosts

    def overhead(self, trace: StepTrace) -> float:
        return trace.seconds / self.traces["none"].seconds - 1


def sweep_policies(tracer: Tracer) -> PolicySweep:
    """Trace every named policy, and every option with all blocks run by it."""
    names = tuple(tracer.subject.blocks)
    traces = {policy: tracer.trace(options_of(policy, names)) for policy in POLICIES}
    named: Mapping[Activations, str] = {
        "keep": "none",
        "save-attention": "save-attention",
        "recompute": "all",
    }
    return PolicySweep(traces, costs_of({each: traces[named[each]] for each in ACTIVATIONS}))


def find_best(tracer: Tracer, sweep: PolicySweep, budget_bytes: int | None) -> BestOptions | None:
    """The fastest options whose traced peak is within a budget; None if nothing fits.

    Without a budget every block is kept.
    """
    names, kept = tuple(tracer.subject.blocks), sweep.traces["none"]
    if budget_bytes is None:
        return BestOptions(options_of("none", names), kept.peak_bytes, kept, 0.0, 0.0)
    fitting: list[tuple[Options, StepTrace]] = [
        (options_of(policy, names), trace)
        for policy, trace in sweep.traces.items()
        if trace.peak_bytes <= budget_bytes
    ]
    if not any(trace.seconds <= kept.seconds for _, trace in fitting):
        fitting += _solved(tracer, sweep.costs, budget_bytes)
    if not fitting:
        return None
    options, traced = min(fitting, key=lambda each: each[1].seconds)
    with_another = sweep.costs.predicted_seconds(
        fastest(sweep.costs, budget_bytes + _GIB) or options
    )
    overhead = sweep.overhead(traced)
    return BestOptions(
        options=options,
        predicted_bytes=int(sweep.costs.peak_bytes(options)),
        traced=traced,
        overhead=overhead,
        # a solution may be a little off, and more memory never costs time
        overhead_with_another_gib=min(with_another / kept.seconds - 1, overhead),
    )


def _solved(
    tracer: Tracer, costs: BlockCosts, budget_bytes: int
) -> list[tuple[Options, StepTrace]]:
    """What the solver finds, traced: its budget is tightened until the trace fits."""
    within = budget_bytes
    for _ in range(_MOST_TRIES):
        options = fastest(costs, within)
        if options is None:
            return []
        traced = tracer.trace(options)
        if traced.peak_bytes <= budget_bytes:
            return [(options, traced)]
        within -= max(traced.peak_bytes - budget_bytes, _LEAST_STEP_BYTES)
    return []
