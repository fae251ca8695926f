"""Holds the prediction of a step's memory against what the step really takes."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from longtake.config import Bucket, Recipe
from longtake.data.loader import Batch
from longtake.errors import PlanError
from longtake.formatting import format_size
from longtake.models.numerics import is_out_of_memory
from longtake.parallel.mesh import World
from longtake.planner.measure import measured
from longtake.planner.plan import MemoryPlan
from longtake.training.session import TrainingState


@dataclass(frozen=True)
class PeakComparison:
    """The most that forward and backward pass took beside the weights, in bytes."""

    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


class PeakCheck:
    """Measures one step of a launch: not its first, in which libraries take what they keep."""

    def __init__(self, predicted_bytes: int | None, bucket: Bucket, device: torch.device) -> None:
        self._predicted_bytes = predicted_bytes
        self._bucket = bucket
        self._device = device
        self._is_first_step = True
        self.comparison: PeakComparison | None = None
        """There after the step that was measured, until the next one."""

    @contextmanager
    def of_step(self, batch: Batch) -> Iterator[None]:
        """Runs a forward and backward pass, and measures it if it is the one."""
        self.comparison, is_first = None, self._is_first_step
        self._is_first_step = False
        if self._predicted_bytes is None or is_first or batch.bucket != self._bucket:
            yield
            return
        with measured(self._device) as memory:
            yield
        self.comparison = PeakComparison(self._predicted_bytes, max(1, memory.peak_bytes))
        self._predicted_bytes = None


@contextmanager
def refuse_out_of_memory(
    plan: MemoryPlan, recipe: Recipe, state: TrainingState, world: World
) -> Iterator[None]:
    """Runs training; if memory is not enough, says what was planned and what was measured."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        where = f"step {state.global_step + 1} on rank {world.rank} ({world.device})"
        raise PlanError(
            f"Out of memory in {where}{_request(error)}. {_planned(plan)} "
            f"{_measured(world.device)} {_advice(plan, recipe)}"
        ) from error


def _request(error: BaseException) -> str:
    found = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    return f", which asked for {found[1]} more" if found else ""


def _planned(plan: MemoryPlan) -> str:
    if plan.memory is None:
        return f"Nothing was predicted (recompute.policy = {plan.policy})."
    budget = (
        "" if plan.budget_bytes is None else f" of a budget of {format_size(plan.budget_bytes)}"
    )
    peak = format_size(plan.memory.step_peak_bytes)
    return f"The plan (recompute.policy = {plan.policy}) predicts at most {peak}{budget}."


def _measured(device: torch.device) -> str:
    if device.type != "cuda":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"The process took at most {format_size(most)}."
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"Measured: tensors took at most {format_size(peak)}, torch holds {format_size(held)}, and "
        f"{format_size(free)} of the GPU's {format_size(total)} are free."
    )


def _advice(plan: MemoryPlan, recipe: Recipe) -> str:
    if plan.budget_bytes is None:
        return (
            "Set recompute.memory to the device's memory, or lower training.micro_batch_size, and "
            "start the same command again."
        )
    return (
        f"Set recompute.reserve above {recipe.recompute.reserve:g}, so that the plan uses less, or "
        "lower training.micro_batch_size, and start the same command again."
    )
