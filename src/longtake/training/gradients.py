"""Will everything train: one step is watched, on tensors without values."""

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

import longtake
from longtake.errors import CannotBePlannedError, LongtakeError, PlanError
from longtake.formatting import first_line
from longtake.planner.gradient_traps import Trap, flow_traps
from longtake.training.outlined import OutlinedStep


@dataclass(frozen=True)
class Gradients:
    """Which trainable parameters a backward pass reaches, by name."""

    reached: Sequence[str]
    unreached: Sequence[str]
    traps: Sequence[Trap]

    @property
    def fatal(self) -> list[Trap]:
        return [trap for trap in self.traps if trap.stops]


def check_gradients(step: OutlinedStep) -> Gradients:
    """Which trainable parameters a step reaches, and what keeps it from the others.

    Raises:
        CannotBePlannedError: the model looks at values.
        PlanError: the model's code fails.
    """
    try:
        with _torch_is_quiet():
            watch = step.tracer.watch_gradients()
    except LongtakeError:
        raise
    except DataDependentOutputException as error:
        raise CannotBePlannedError(
            f"The model cannot be planned{_where(error)}: a tensor's value is asked for. A plan "
            "runs the model on tensors that have a shape but no values, so it can follow no "
            ".item() and no `if` on a tensor. Compute with tensors there, such as by torch.where."
        ) from error
    except Exception as error:  # a user's own module may raise whatever it likes
        reason = first_line(error)
        raise PlanError(
            f"The model cannot be run{_where(error)}: {type(error).__name__}: {reason}. A training "
            "step would fail in the same way."
        ) from error
    return Gradients(watch.reached(), watch.unreached(), flow_traps(watch))


@contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """Torch logs twenty lines of its own where a shape is wrong; the error says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def refuse_traps(gradients: Gradients) -> None:
    """Stop where something that should be trained would not be.

    Raises:
        PlanError: names it, and what to do.
    """
    if gradients.fatal:
        raise PlanError("\n".join(["Not everything would train.", *map(str, gradients.fatal)]))


def _where(error: Exception) -> str:
    """The innermost line that is neither torch's nor longtake's."""
    known = (*torch.__path__, *longtake.__path__)
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(known)]
    if not places:
        return ""
    return f" ({places[-1].filename}, line {places[-1].lineno}: {places[-1].line})"
