"""Finds the fastest way to run the blocks that fits a budget: an integer program over all blocks.

What a block leaves behind in the forward pass, and what its backward pass takes for a while, hardly
depends on how other blocks are run. So three traces, with every block kept, saved in part, and
recomputed, say what any mixture takes. The idea of an integer program over blocks is that of
Checkmate (Jain et al., 2020) and of torch's `sac_milp`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.recompute.apply import OPTIONS, Option
from longtake.recompute.trace import StepTrace

_GIB = 2**30
_SECONDS = 10.0
_GAP = 1e-3
"""Share of the best possible time that a solution may be away from it."""

Bytes = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What each block costs under each option. Arrays are [blocks, options] or [blocks]."""

    names: tuple[str, ...]
    saved: Bytes
    """Left behind by the forward pass."""
    forward: Bytes
    """The most that is there in the forward pass above what was there before."""
    backward: Bytes
    """The most that is there in the backward pass above what was there when it began."""
    seconds: NDArray[np.float64]
    at_forward: Bytes
    """There before each block's forward pass, beside what earlier blocks saved."""
    at_backward: Bytes
    """There before each block's backward pass, beside what it and earlier blocks saved."""
    turn: float
    """The most between forward and backward pass, beside what all blocks saved."""
    least_peak: float
    """The most outside the blocks, whatever they save."""
    other_seconds: float

    def peak_bytes(self, options: Mapping[str, Option]) -> float:
        x = self._chosen(options)
        return max(self.least_peak, float((self._levels() @ x.ravel() + self._fixed()).max()))

    def predicted_seconds(self, options: Mapping[str, Option]) -> float:
        return self.other_seconds + float((self.seconds * self._chosen(options)).sum())

    def _chosen(self, options: Mapping[str, Option]) -> NDArray[np.float64]:
        x = np.zeros((len(self.names), len(OPTIONS)))
        for row, name in enumerate(self.names):
            x[row, OPTIONS.index(options.get(name, "keep"))] = 1
        return x

    def _levels(self) -> NDArray[np.float64]:
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

    def _fixed(self) -> NDArray[np.float64]:
        """[moments]: what is there at each moment whatever is chosen."""
        return np.concatenate([self.at_forward, self.at_backward, [self.turn]])


def costs(traces: Mapping[Option, StepTrace]) -> Costs:
    """What blocks cost, read off one trace for each option in which all blocks are run by it."""
    keep, each = traces["keep"], [traces[option] for option in OPTIONS]
    saved = np.stack([_saved(trace) for trace in each], axis=1)
    so_far = np.cumsum(saved, axis=0)
    at_forward = _array([block.forward.begin_bytes for block in keep.blocks.values()])
    at_forward -= so_far[:, 0] - saved[:, 0]
    at_backward = _array(
        [
            block.backward.begin_bytes if block.backward else -np.inf
            for block in keep.blocks.values()
        ]
    )
    at_backward -= so_far[:, 0]
    forward, backward = _peaks(each)
    seconds = np.stack([_seconds(trace) for trace in each], axis=1)
    return Costs(
        names=tuple(keep.blocks),
        saved=saved,
        forward=forward - at_forward[:, None] - (so_far - saved),
        backward=_without_gradient_none(backward - so_far, at_backward),
        seconds=seconds,
        at_forward=at_forward,
        at_backward=at_backward,
        turn=keep.turn.peak_bytes - float(so_far[-1, 0]),
        least_peak=float(keep.front_peak_bytes),
        other_seconds=keep.seconds - float(seconds[:, 0].sum()),
    )


def _peaks(traces: Sequence[StepTrace]) -> tuple[Bytes, Bytes]:
    """[blocks, options] each: the most in every block's forward and backward pass."""
    blocks = [list(trace.blocks.values()) for trace in traces]
    forward = [[block.forward.peak_bytes for block in each] for each in blocks]
    backward = [[b.backward.peak_bytes if b.backward else 0 for b in each] for each in blocks]
    return _array(forward).T, _array(backward).T


def _without_gradient_none(peaks: Bytes, at_backward: Bytes) -> Bytes:
    """The most above what is there when the backward pass begins; 0 where none passes."""
    passes = np.isfinite(at_backward)
    return np.where(passes[:, None], peaks - np.where(passes, at_backward, 0)[:, None], 0)


def _seconds(trace: StepTrace) -> NDArray[np.float64]:
    """[blocks]: forward and backward pass."""
    return _array(
        [
            block.forward.seconds + (block.backward.seconds if block.backward else 0)
            for block in trace.blocks.values()
        ]
    )


def fastest(costs: Costs, budget_bytes: float) -> dict[str, Option] | None:
    """The fastest options whose predicted peak is within a budget, or None if there are none."""
    number, width = costs.saved.shape
    room = budget_bytes - costs._fixed()
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
            LinearConstraint(costs._levels() / _GIB, -np.inf, room / _GIB),
        ],
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        return None
    chosen = found.x.reshape(number, width).argmax(axis=1)
    return {name: OPTIONS[option] for name, option in zip(costs.names, chosen, strict=True)}


def _pointless(costs: Costs) -> NDArray[np.float64]:
    """[blocks, options]: 1 where an option gains nothing over keeping a block.

    Such as before the first trainable parameter; the solver would choose there by chance.
    """
    gains = [
        each < each[:, [OPTIONS.index("keep")]]
        for each in (costs.saved, costs.forward, costs.backward)
    ]
    pointless: NDArray[np.float64] = (~np.logical_or.reduce(gains)).astype(np.float64)
    pointless[:, OPTIONS.index("keep")] = 0
    return pointless


def _saved(trace: StepTrace) -> Bytes:
    """[blocks]: what each block's forward pass leaves behind until the next one's begins."""
    forward = [block.forward for block in trace.blocks.values()]
    levels = [span.begin_bytes for span in forward] + [forward[-1].end_bytes]
    return np.diff(_array(levels))


def _array(values: Sequence[object]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)
