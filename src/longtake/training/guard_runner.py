"""Runs the guard: a verdict on each step before its update, NaN and inf located, reports."""

import math
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longtake.data.loader import Batch
from longtake.fsio import now
from longtake.guard.detectors import OK, GuardVerdict, judge
from longtake.guard.history import GuardSettings, History, JudgedStep, StepStatistics
from longtake.parallel.collectives import gather_objects
from longtake.parallel.fsdp import local_shard, num_copies
from longtake.parallel.mesh import World
from longtake.training.session import Session, TrainingState
from longtake.training.step import SampleLosses

_REPORTED_SAMPLE_STEPS = 16
_REPORTED_STEPS = 128
_MAX_NAMED_GRADIENTS = 3


@dataclass(frozen=True)
class _StepSamples:
    """Samples that this rank trained in one step."""

    batch: int
    step: int
    rank: int
    samples: tuple[tuple[str, str, int, float, float], ...]
    """(identity, caption, epoch, sigma, loss) of each."""


class GuardRunner:
    """The guard of one run, the same on every rank."""

    def __init__(self, session: Session) -> None:
        self.settings = GuardSettings.of(session.recipe.guard)
        self.history = History(self.settings.window)
        self._run, self._world = session.run, session.world
        self._samples: deque[_StepSamples] = deque(maxlen=_REPORTED_SAMPLE_STEPS)

    def judge(self, statistics: StepStatistics, losses: SampleLosses, batch: Batch) -> GuardVerdict:
        """The verdict on a step before its update; the step becomes part of the history."""
        self._samples.append(_trained_samples(statistics, losses, batch, self._world))
        verdict = self._by_mode(judge(self.history, statistics, self.settings))
        done = "ok" if self.allows(verdict) else verdict.kind
        self.history = self.history.append(JudgedStep(statistics, done))
        return verdict

    def allows(self, verdict: GuardVerdict) -> bool:
        return verdict.kind == "ok" or (self.settings.mode != "act" and verdict.kind != "stop")

    def _by_mode(self, verdict: GuardVerdict) -> GuardVerdict:
        mode = self.settings.mode
        if mode != "act" and verdict.reason == "non_finite":  # training cannot continue with it
            return replace(verdict, kind="stop")
        return OK if mode == "off" else verdict

    def load(self, data: Any) -> None:
        self.history = History.from_json(data, self.settings.window)
        self._samples.clear()

    def report(
        self,
        verdict: GuardVerdict,
        statistics: StepStatistics,
        losses: SampleLosses,
        state: TrainingState,
    ) -> tuple[GuardVerdict, str | None]:
        """Write a report on the newest step's verdict; all ranks call it."""
        verdict = _explain_non_finite(verdict, statistics, losses, state, self._world)
        everyone = gather_objects((socket.gethostname(), list(self._samples)), self._world)
        if not self._world.is_first:
            return verdict, None
        number = len(list(self._run.guard_path.glob(f"step_{statistics.step:08d}_*.json")))
        path = self._run.guard_report_path(statistics.step, number)
        resumable = (step for step in self._run.checkpoint_steps() if step <= statistics.step)
        report = {
            "step": statistics.step,
            "batch": statistics.batch,
            "time": now(),
            "verdict": asdict(verdict),
            "history": [_history_row(each) for each in list(self.history)[-_REPORTED_STEPS:]],
            "samples": [
                row
                for host, steps in everyone
                for each in steps
                for row in _sample_rows(each, host)
            ],
            "state": {"checkpoint": max(resumable, default=None)},
        }
        self._run.write_guard_report(path, report)
        return verdict, str(path.relative_to(self._run.path))


def _trained_samples(
    statistics: StepStatistics, losses: SampleLosses, batch: Batch, world: World
) -> _StepSamples:
    rows = zip(
        batch.identities,
        batch.captions,
        batch.epochs,
        losses.sigmas,
        losses.losses,
        batch.weights.tolist(),
        strict=True,
    )
    trained = tuple(row[:-1] for row in rows if row[-1] and world.speaks_for_data)
    return _StepSamples(statistics.batch, statistics.step, world.rank, trained)


def _history_row(step: JudgedStep) -> dict[str, Any]:
    return {**step.statistics.as_dict(), "verdict": step.verdict_kind}


def _sample_rows(step: _StepSamples, host: str) -> list[dict[str, Any]]:
    keys = ("identity", "caption", "epoch", "sigma", "loss")
    where = {"step": step.step, "batch": step.batch, "rank": step.rank, "host": host}
    samples = ((*sample[:-1], _for_json(sample[-1])) for sample in step.samples)
    return [{**where, **dict(zip(keys, sample, strict=True))} for sample in samples]


def _for_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


# --- Where NaN and inf came from --------------------------------------------------------------


def _explain_non_finite(
    verdict: GuardVerdict,
    statistics: StepStatistics,
    losses: SampleLosses,
    state: TrainingState,
    world: World,
) -> GuardVerdict:
    """The verdict; of `non_finite` its message locates NaN and inf. All ranks must call it."""
    if verdict.reason != "non_finite":
        return verdict
    parts, message = state.components, [verdict.message]
    where = _non_finite_ranks(losses, parts.model, world)
    if where:
        message.append(f"It came from {where}.")
    if not math.isfinite(statistics.grad_norm):
        message.append(
            describe_non_finite_gradients(parts.model, parts.family.blocks(parts.model), world)
        )
    if not math.isfinite(statistics.loss):
        message.append("The loss is NaN or inf: it was already lost in the forward pass.")
    return replace(verdict, message=" ".join(message))


def _non_finite_ranks(losses: SampleLosses, model: nn.Module, world: World) -> str:
    """Ranks with NaN or inf in their own losses, or else in their gradient shards, if not all.

    A gradient that is NaN on one rank before it is reduced is NaN on all after that.
    """
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    in_losses = not all(math.isfinite(loss) for loss in losses.losses)
    in_gradients = any(not bool(each.isfinite().all()) for each in gradients)
    everyone = gather_objects((socket.gethostname(), in_losses, in_gradients), world)
    for index in (1, 2):
        ranks = [rank for rank, facts in enumerate(everyone) if facts[index]]
        if 0 < len(ranks) < world.size:
            hosts = ", ".join(sorted({everyone[rank][0] for rank in ranks}))
            return f"rank {', '.join(map(str, ranks))} of {world.size} alone (on {hosts})"
    return ""


def describe_non_finite_gradients(
    model: nn.Module, blocks: Sequence[nn.Module], world: World | None = None
) -> str:
    """Name the parameters whose gradients hold NaN or inf, those at the model's end first.

    All ranks must call it; the result is the same on each and covers all shards.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    combine = max if num_copies(model) > 1 else sum  # one copy alone may have NaN
    mine = _count_non_finite(gradients)
    everyone = [mine] if world is None else gather_objects(mine, world)
    non_finite = [name for name in gradients if any(name in counts for counts in everyone)]
    if not non_finite:
        return (
            "Each gradient is finite, but together they are so large that the sum of their squares "
            "is not."
        )
    named = []
    for name in non_finite[: -_MAX_NAMED_GRADIENTS - 1 : -1]:
        counts = zip(*(counts.get(name, (0, 0)) for counts in everyone), strict=True)
        num_nan, num_infinite = map(combine, counts)
        where = f"{name} ({_block_of(name, model, blocks)})"
        named.append(f"{where}, {_numbers(num_nan, num_infinite, gradients[name].numel())}")
    more = " and more" if len(non_finite) > _MAX_NAMED_GRADIENTS else ""
    return (
        f"NaN or infinity is in the gradients of {len(non_finite)} of {len(gradients)} trained "
        "parameters. A backward pass runs from the model's end to its beginning, so the last ones "
        f"were lost first: {'; '.join(named)}{more}."
    )


@torch.no_grad()
def _count_non_finite(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Number of NaN and of inf in this rank's shard of each gradient that has any."""
    found = {}
    for name, gradient in gradients.items():
        shard = local_shard(gradient)
        # The norm is cheaper than counting; it may also overflow without NaN or inf.
        if not torch.linalg.vector_norm(shard, dtype=torch.float32).isfinite():
            found[name] = (int(shard.isnan().sum()), int(shard.isinf().sum()))
    return {name: counts for name, counts in found.items() if any(counts)}


def _numbers(num_nan: int, num_infinite: int, num_all: int) -> str:
    counts = [f"{num_nan} NaN"] * bool(num_nan) + [f"{num_infinite} infinite"] * bool(num_infinite)
    return f"{' and '.join(counts)} of {num_all} numbers"


def _block_of(name: str, model: nn.Module, blocks: Sequence[nn.Module]) -> str:
    """Which block a parameter is in, counted from 1."""
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks, start=1):
        if name.startswith(f"{names[id(block)]}."):
            return f"block {number} of {len(blocks)}"
    return "outside the blocks"
