"""What takes a step's time, and no more: a rank that hangs, one that is slow, and all alike.

All of it befalls the forward pass, which a rank does on its own.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from longtake.config import Recipe
from longtake.data.batch import Batch
from longtake.drill.hangs import hang_once
from longtake.drill.harms import PACE_SECONDS, SLOW_PACE_SECONDS
from longtake.drill.step import Step, When
from longtake.models.assemble import Components
from longtake.models.losses import Examples
from longtake.models.precision import Precision
from longtake.parallel.mesh import World
from longtake.training.step import SampleLosses, TrainingState

_RANK = 1
_aside: list[dist.ProcessGroup] = []


def in_collective() -> None:
    """Begin a collective that no other rank joins."""
    dist.all_reduce(torch.zeros(1), group=_aside[0])


def hang(when: When, step: Step, how: Callable[[], None]) -> Step:
    """Let rank 1 hang in one step, once in a run."""
    is_due = [False]

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        is_its_step = state.global_step == when.at
        if is_its_step and how is in_collective and world.size > 1:
            _aside.append(dist.new_group())  # with the ranks' own, sums would be mixed up
        is_due[0] = is_its_step and world.rank == _RANK
        return step.compute(state, batch, recipe, world)

    def losses(
        parts: Components, examples: Examples, precision: Precision, device: torch.device
    ) -> Tensor:
        if is_due[0]:
            hang_once(how)
        return step.losses(parts, examples, precision, device)

    return step._replace(compute=compute, losses=losses)


def dawdle(when: When, step: Step) -> Step:
    """Let every step take longer from one on, so that there is time to do something to a run."""
    return _slowed(step, lambda at, world: (PACE_SECONDS if at >= when.at else 0.0, 0.0))


def slow_down(when: When, step: Step, share: float) -> Step:
    """Let rank 1 take longer for its own work, from a step on; all take their time from the first.

    So short a work as that of a drill's model is longer or shorter by more than the share all the
    time, as the machine's other processes have it.
    """
    return _slowed(
        step,
        lambda at, world: (
            SLOW_PACE_SECONDS,
            share if at >= when.at and world.rank == _RANK else 0.0,
        ),
    )


def _slowed(step: Step, longer: Callable[[int, World], tuple[float, float]]) -> Step:
    """Let the forward pass take longer.

    Args:
        step: what is slowed.
        longer: by how many seconds in a step, and then by what share of all that it took.
    """
    began, seconds, share = 0.0, 0.0, 0.0

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        nonlocal began, seconds, share
        seconds, share = longer(state.global_step, world)
        began = time.perf_counter()
        return step.compute(state, batch, recipe, world)

    def losses(
        parts: Components, examples: Examples, precision: Precision, device: torch.device
    ) -> Tensor:
        found = step.losses(parts, examples, precision, device)
        time.sleep(seconds)
        time.sleep(share * (time.perf_counter() - began))
        return found

    return step._replace(compute=compute, losses=losses)
