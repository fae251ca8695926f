"""`longtake train` with a fault inside of the process, which no other process could inject.

    python -m longtake.faults.inject poison 120 train recipe.toml --set ...

The program replaces functions that a training step calls, then runs `longtake`, which contains no
code for drills. Faults of data repeat with their batch after a rollback; faults of the machine
occur once.
"""

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from longtake import config
from longtake.data import workers
from longtake.data.batch import Batch
from longtake.faults import faulty_processes, sandbox
from longtake.guard.history import GROUPS
from longtake.models.components import Components, assemble
from longtake.models.objective import training_losses
from longtake.parallel import fsdp
from longtake.training import build, loop, train
from longtake.training import step as training_step
from longtake.training.guard_runner import GuardRunner
from longtake.training.session import SampleLosses, Session, TrainingState
from longtake.training.statistics import parameter_groups
from longtake.training.step import apply_update, compute_gradients

_BRIGHTER = 8.0  # pixels of poisoned batches are multiplied by it
_RANK = 1  # the rank that gets a fault
_second_group: list[dist.ProcessGroup] = []


class StepFunctions(NamedTuple):
    """Functions that a training step calls; a fault replaces some of them."""

    compute: Callable[[Session, TrainingState, Batch], SampleLosses] = compute_gradients
    update: Callable[..., float] = apply_update
    losses: Callable[..., Tensor] = training_losses

    def install(self) -> None:
        _patch(loop, "compute_gradients", self.compute)
        _patch(loop, "apply_update", self.update)
        _patch(training_step, "training_losses", self.losses)


def _patch(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    assert callable(vars(module)[name]), f"{module.__name__} does not call {name}"
    setattr(module, name, function)


@dataclass
class Trigger:
    """Step at which a fault begins: active from `at` until the run goes back to an earlier step.

    With `lasting` it stays active after that.
    """

    at: int
    lasting: bool = False
    # The largest step seen is not enough: only the order of steps shows that the run went back.
    _last_step: int = -1
    _went_back: bool = False

    def is_active(self, step: int) -> bool:
        self._went_back = self._went_back or step <= self._last_step
        self._last_step = step
        return step >= self.at and (self.lasting or not self._went_back)


def poison(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: make the pixels of a few batches far too bright."""

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        # Faults of data are tied to a batch, not to a step: they meet the same batch again
        # after a rollback, unless the guard excludes it.
        if trigger.at <= batch.step < trigger.at + sandbox.POISONED_BATCHES:
            batch = replace(batch, videos=batch.videos.float() * _BRIGHTER)
        return step.compute(session, state, batch)

    return step._replace(compute=compute)


def raise_rate(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: multiply the updates of the attention's weights by `RATE_FACTOR` from a step on."""

    def update(session: Session, state: TrainingState, *of_step: Any) -> float:
        if not trigger.is_active(state.global_step):
            return step.update(session, state, *of_step)
        weights = _weights(state, ("attention",))
        before = [weight.clone() for weight in weights]
        rate = step.update(session, state, *of_step)
        for weight, old in zip(weights, before, strict=True):
            weight.lerp_(old, 1 - sandbox.RATE_FACTOR)  # = old + factor * (weight - old)
        return rate

    return step._replace(update=update)


def raise_norm(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: make all weights a little larger in the update of one batch."""
    current_batch = -1

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        nonlocal current_batch
        current_batch = batch.step
        return step.compute(session, state, batch)

    def update(session: Session, state: TrainingState, *of_step: Any) -> float:
        rate = step.update(session, state, *of_step)
        if current_batch == trigger.at:
            for weight in _weights(state):
                weight.mul_(sandbox.NORM_FACTOR)
        return rate

    return step._replace(compute=compute, update=update)


def lose_gradient(trigger: Trigger, step: StepFunctions, rank: int | None = None) -> StepFunctions:
    """Fault: set one element of a gradient to NaN in one step, on all ranks or on one."""

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        samples = step.compute(session, state, batch)
        if state.global_step == trigger.at and rank in (None, session.world.rank):
            gradient = state.components.model.get_parameter(sandbox.NAN_PARAMETER).grad
            assert gradient is not None
            # After the gradients were reduced over the ranks, so that the NaN stays on this one.
            fsdp.local_shard(gradient).view(-1)[0] = torch.nan
        return samples

    return step._replace(compute=compute)


def give_other_rate(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: let rank 1 read a recipe with twice the learning rate."""
    load = config.load

    def load_other(path: Path, overrides: Sequence[str] = ()) -> config.Recipe:
        rate = load(path, overrides).optimizer.learning_rate
        return load(path, [*overrides, f"optimizer.learning_rate={2 * rate}"])

    # The recipe is read before there is a process group, so the launcher's variable names the rank.
    if os.environ.get("RANK") == str(_RANK):
        vars(config).update(load=load_other)
    return step


def give_other_weights(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: let rank 1 read a frozen weight that is a little larger."""

    def assemble_other(*arguments: Any, **options: Any) -> Components:
        parts = assemble(*arguments, **options)
        frozen = (each for each in parts.model.parameters() if not each.requires_grad)
        next(frozen).data.view(-1)[0] += 1e-3
        return parts

    if os.environ.get("RANK") == str(_RANK):
        vars(build).update(assemble=assemble_other)
    return step


def flip_bit(trigger: Trigger, step: StepFunctions) -> StepFunctions:
    """Fault: flip the lowest bit of one weight of rank 1 after the update of one step."""

    def update(session: Session, state: TrainingState, *of_step: Any) -> float:
        # The trigger is asked at every step, to see a rollback: the repeated step stays whole, as a
        # bit that flips by itself does so once.
        is_active = trigger.is_active(state.global_step) and state.global_step == trigger.at
        rate = step.update(session, state, *of_step)
        if is_active and session.world.rank == _RANK:
            weight = state.components.model.get_parameter(sandbox.NAN_PARAMETER).detach()
            # As an integer, because float arithmetic cannot change only the lowest bit.
            fsdp.local_shard(weight).view(-1).view(torch.int32)[0] ^= 1
        return rate

    return step._replace(update=update)


def freeze_worker(trigger: Trigger, step: StepFunctions, how: str) -> StepFunctions:
    vars(workers).update(PROGRAM=(faulty_processes.PROGRAM, "worker", how, str(trigger.at)))
    return step


def in_collective() -> None:
    dist.all_reduce(torch.zeros(1), group=_second_group[0])


def hang_rank(trigger: Trigger, step: StepFunctions, how: Callable[[], None]) -> StepFunctions:
    """Fault: let rank 1 hang in the forward pass of one step, once in a run."""
    is_due = False

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        nonlocal is_due
        is_step = state.global_step == trigger.at
        if is_step and how is in_collective and session.world.size > 1:
            # Every rank must create the group, so before the rank of the fault is looked at. In the
            # default group the other rank would join with its next collective, and mix up sums.
            _second_group.append(dist.new_group())
        is_due = is_step and session.world.rank == _RANK
        return step.compute(session, state, batch)

    def losses(*of_micro_batch: Any) -> Tensor:
        if is_due:
            faulty_processes.hang_once(how)
        return step.losses(*of_micro_batch)

    return step._replace(compute=compute, losses=losses)


def slow(
    trigger: Trigger,
    step: StepFunctions,
    seconds: float = 0.0,
    later_seconds: float = 0.0,
    share: float = 0.0,
) -> StepFunctions:
    """Fault: delay the forward pass of each step, on all ranks or on rank 1.

    Args:
        trigger: the step from which on `later_seconds` and `share` hold.
        step: the functions to delay.
        seconds: delay on all ranks from the first step. The step time of such a small model alone
            varies by more than `share`.
        later_seconds: further delay on all ranks.
        share: fraction of its time by which rank 1 takes longer.
    """
    began, delay, of_time = 0.0, 0.0, 0.0

    def compute(session: Session, state: TrainingState, batch: Batch) -> SampleLosses:
        nonlocal began, delay, of_time
        is_due = state.global_step >= trigger.at
        delay = seconds + later_seconds * is_due
        of_time = share if is_due and session.world.rank == _RANK else 0.0
        began = time.perf_counter()
        return step.compute(session, state, batch)

    def losses(*of_micro_batch: Any) -> Tensor:
        found = step.losses(*of_micro_batch)
        time.sleep(delay)
        # After the delay of all ranks, so that the share is one of the whole forward pass.
        time.sleep(of_time * (time.perf_counter() - began))
        return found

    return step._replace(compute=compute, losses=losses)


INJECTIONS: dict[str, Callable[[Trigger, StepFunctions], StepFunctions]] = {
    "poison": poison,
    "raise-rate": raise_rate,
    "raise-norm": raise_norm,
    "lose-gradient": lose_gradient,
    "lose-gradient-on-rank-1": partial(lose_gradient, rank=1),
    "other-rate-on-rank-1": give_other_rate,
    "other-weights-on-rank-1": give_other_weights,
    "flip-bit-on-rank-1": flip_bit,
    "freeze-worker-in-c": partial(freeze_worker, how="in-c"),
    "freeze-worker-holding-gil": partial(freeze_worker, how="holding-gil"),
    "hang-rank-1-asleep": partial(hang_rank, how=faulty_processes.asleep),
    "hang-rank-1-holding-gil": partial(hang_rank, how=faulty_processes.holding_gil),
    "hang-rank-1-stopped": partial(hang_rank, how=faulty_processes.stopped),
    "hang-rank-1-in-collective": partial(hang_rank, how=in_collective),
    "slow-rank-1-by-10": partial(slow, seconds=sandbox.SLOW_PACE_SECONDS, share=0.1),
    "slow-rank-1-by-30": partial(slow, seconds=sandbox.SLOW_PACE_SECONDS, share=0.3),
    "slow-steps": partial(slow, later_seconds=sandbox.PACE_SECONDS),
}


def _with_checksum(step: StepFunctions, path: Path) -> StepFunctions:
    """Return step functions that also write a checksum of this rank's weights after updates."""

    def update(session: Session, state: TrainingState, *of_step: Any) -> float:
        rate = step.update(session, state, *of_step)
        whole = b"".join(weight.cpu().numpy().tobytes() for weight in _weights(state))
        path.write_text(sha256(whole).hexdigest(), encoding="utf-8")
        return rate

    return step._replace(update=update)


def _weights(state: TrainingState, groups: Collection[str] = GROUPS) -> list[Tensor]:
    """Return this rank's shards of the trained weights in some groups, such as attention."""
    model = state.components.model
    group_of = parameter_groups(model, state.components.family.blocks(model))
    names = [name for name, group in group_of.items() if group in groups]
    return [fsdp.local_shard(model.get_parameter(name).detach()) for name in names]


def main() -> None:
    """Inject the fault of the command line, and run `longtake` with the rest of it."""
    parser = argparse.ArgumentParser(prog="python -m longtake.faults.inject")
    parser.add_argument("--lasting", action="store_true")
    parser.add_argument("--guard", type=json.loads, default={}, help="constants, as JSON")
    parser.add_argument("kind", choices=INJECTIONS)
    parser.add_argument("at", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    step = INJECTIONS[given.kind](Trigger(given.at, given.lasting), StepFunctions())
    # A file for each rank: checkpoints have one copy of the weights, which hides a difference.
    path = Path(f"weights_of_rank_{os.environ.get('RANK', '0')}.sha256")
    _with_checksum(step, path).install()
    vars(train).update(GuardRunner=partial(GuardRunner, **given.guard))
    sys.argv = ["longtake", *given.command]
    runpy.run_module("longtake", run_name="__main__")  # as a program: drills import no verbs


if __name__ == "__main__":
    main()
