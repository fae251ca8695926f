"""`longtake train` with something wrong inside it, for drills of what no other process can do.

    python -m longtake.drill.sabotage poison 120 train recipe.toml --set …

A process of its own, under torchrun as well. Before it does what `longtake` would do, it puts
other functions in the place of some that a training step calls; longtake knows nothing of it.
What belongs to data comes again with its batch; what belongs to the machine befalls it once.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from longtake.config import Recipe
from longtake.data import process
from longtake.data.batch import Batch
from longtake.drill import frozen_worker, hangs
from longtake.drill.delays import dawdle, hang, in_collective, slow_down
from longtake.drill.harms import LOST_PARAMETER, NORM_FACTOR, POISONED_BATCHES, RATE_FACTOR
from longtake.drill.step import Step, When
from longtake.guard.statistics import GROUPS
from longtake.parallel.mesh import World
from longtake.parallel.norms import share
from longtake.training.groups import groups_of
from longtake.training.step import SampleLosses, TrainingState

_BRIGHTER = 8.0


def poison(when: When, step: Step) -> Step:
    """Make the pixels of a few batches far too bright."""

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        if when.at <= batch.step < when.at + POISONED_BATCHES:
            batch = replace(batch, videos=batch.videos.float() * _BRIGHTER)
        return step.compute(state, batch, recipe, world)

    return step._replace(compute=compute)


def raise_rate(when: When, step: Step) -> Step:
    """Let the attention's weights move further than the learning rate says, from a step on."""

    def update(state: TrainingState, recipe: Recipe, grad_norm: float, scale: float) -> float:
        if not when.is_since(state.global_step):
            return step.update(state, recipe, grad_norm, scale)
        weights = _weights(state, ("attention",))
        before = [weight.clone() for weight in weights]
        rate = step.update(state, recipe, grad_norm, scale)
        for weight, old in zip(weights, before, strict=True):
            weight.lerp_(old, 1 - RATE_FACTOR)  # old + factor * (weight - old)
        return rate

    return step._replace(update=update)


def raise_norm(when: When, step: Step) -> Step:
    """Make all weights a little larger in the update of one batch."""
    at_hand = [-1]

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        at_hand[0] = batch.step
        return step.compute(state, batch, recipe, world)

    def update(state: TrainingState, recipe: Recipe, grad_norm: float, scale: float) -> float:
        rate = step.update(state, recipe, grad_norm, scale)
        if at_hand[0] == when.at:
            for weight in _weights(state):
                weight.mul_(NORM_FACTOR)
        return rate

    return step._replace(compute=compute, update=update)


def lose_gradient(when: When, step: Step, rank: int | None = None) -> Step:
    """Make one number of a gradient NaN in one step, on all ranks or on one alone."""

    def compute(state: TrainingState, batch: Batch, recipe: Recipe, world: World) -> SampleLosses:
        samples = step.compute(state, batch, recipe, world)
        if state.global_step == when.at and rank in (None, world.rank):
            gradient = state.components.model.get_parameter(LOST_PARAMETER).grad
            assert gradient is not None
            share(gradient).view(-1)[0] = torch.nan  # after it was reduced over the ranks
        return samples

    return step._replace(compute=compute)


def freeze_worker(when: When, step: Step, how: str) -> Step:
    """Let decoding processes be such that freeze; training steps stay what they are."""
    vars(process).update(PROGRAM=(frozen_worker.NAME, how, str(when.at)))
    return step


HARMS: dict[str, Callable[[When, Step], Step]] = {
    "poison": poison,
    "raise-rate": raise_rate,
    "raise-norm": raise_norm,
    "lose-gradient": lose_gradient,
    "lose-gradient-on-rank-1": partial(lose_gradient, rank=1),
    "freeze-worker-in-c": partial(freeze_worker, how="in-c"),
    "freeze-worker-holding-gil": partial(freeze_worker, how="holding-gil"),
    "hang-rank-1-asleep": partial(hang, how=hangs.asleep),
    "hang-rank-1-holding-gil": partial(hang, how=hangs.holding_gil),
    "hang-rank-1-stopped": partial(hang, how=hangs.stopped),
    "hang-rank-1-in-collective": partial(hang, how=in_collective),
    "slow-rank-1-by-10": partial(slow_down, share=0.1),
    "slow-rank-1-by-30": partial(slow_down, share=0.3),
    "dawdle": dawdle,
}


def told(step: Step, path: Path) -> Step:
    """The same, but after each update a checksum of this rank's weights is left in a file."""

    def update(state: TrainingState, recipe: Recipe, grad_norm: float, scale: float) -> float:
        rate = step.update(state, recipe, grad_norm, scale)
        whole = b"".join(weight.cpu().numpy().tobytes() for weight in _weights(state))
        path.write_text(sha256(whole).hexdigest(), encoding="utf-8")
        return rate

    return step._replace(update=update)


def _weights(state: TrainingState, groups: Collection[str] = GROUPS) -> list[Tensor]:
    """This rank's share of the trained weights of some groups."""
    model = state.components.model
    group_of = groups_of(model, state.components.family.blocks(model))
    names = [name for name, group in group_of.items() if group in groups]
    return [share(model.get_parameter(name).detach()) for name in names]


def main() -> None:
    """Do harm, and then what `longtake` does with the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m longtake.drill.sabotage")
    parser.add_argument("--lasting", action="store_true")
    parser.add_argument("harm", choices=HARMS)
    parser.add_argument("at", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    step = HARMS[given.harm](When(given.at, given.lasting), Step())
    step = told(step, Path(f"weights_of_rank_{os.environ.get('RANK', '0')}.sha256"))
    step.put_in_place()
    sys.argv = ["longtake", *given.command]
    runpy.run_module("longtake", run_name="__main__")  # as a program: drills know no verbs


if __name__ == "__main__":
    main()
