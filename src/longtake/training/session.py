"""Session, state and sample losses, which the parts of a training share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from longtake.config import Recipe
from longtake.models.components import Components
from longtake.models.numerics import Precision
from longtake.optim.update import Averages
from longtake.parallel.equality import RankDifference
from longtake.parallel.mesh import World
from longtake.run_dir import Parent, RunDirectory
from longtake.training.inputs import InputQueue


@dataclass(frozen=True)
class Session:
    """One launch of a run, on one rank; it does not change."""

    recipe: Recipe
    run: RunDirectory
    world: World
    console: Console
    precision: Precision
    parent: Parent | None = None
    """The run whose weights this one begins with."""
    differences: tuple[RankDifference, ...] = ()
    """Differences between ranks that only may matter."""


@dataclass
class TrainingState:
    """All that changes from step to step."""

    components: Components
    optimizers: list[Optimizer]
    ema: Averages
    inputs: InputQueue
    global_step: int = 0
    """Steps done: an optimizer update each, except steps without samples and skipped updates."""


@dataclass
class SampleLosses:
    """Losses of the samples of this rank's share of a batch."""

    on_device: Tensor  # [B] fp32, stand-ins included
    sigmas: tuple[float, ...]  # [B]
    captioned: tuple[bool, ...]  # [B] whether it was trained with a caption
    _seconds: Callable[[], float]
    of_zero: Tensor | None = None
    """[B] fp32, if all velocities were predicted as 0; in the first step of a release's weights."""

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """[B] on the host: waits for the device, unless they came with something else."""
        return tuple(self.on_device.tolist())

    def set_losses(self, losses: Sequence[float]) -> None:
        """Set what has come from the device with something else."""
        vars(self)["losses"] = tuple(losses)

    @property
    def compute_seconds(self) -> float:
        """Time of this rank's own computation, without waiting for other ranks.

        Known when the losses are.
        """
        return self._seconds()
