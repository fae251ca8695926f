"""Objects that the parts of a training share: session, training state, losses of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer

from longtake.config import Recipe
from longtake.models.components import Components
from longtake.models.numerics import Precision
from longtake.models.objective import FlowMatching, Objective
from longtake.optim.update import Averages
from longtake.parallel.equality import RankDifference
from longtake.parallel.mesh import World
from longtake.run_dir import Parent, RunDirectory
from longtake.training.inputs import InputQueue


@dataclass(frozen=True)
class Session:
    """A launch of a run on one rank: recipe, directory, ranks and settings; immutable."""

    recipe: Recipe
    run: RunDirectory
    world: World
    console: Console
    precision: Precision
    parent: Parent | None = None
    """The run, and its step, with whose weights this run begins (`train --from`); None without
    one."""
    differences: tuple[RankDifference, ...] = ()
    """Differences between the ranks' machines, such as package versions, that may change results;
    shown as warnings."""


@dataclass
class TrainingState:
    """Weights, optimizers, averages and step number: all state that changes from step to step."""

    components: Components
    optimizers: list[Optimizer]
    ema: Averages
    inputs: InputQueue
    objective: Objective = field(default_factory=FlowMatching)
    global_step: int = 0
    """Number of training steps done; steps without samples and skipped updates are included."""


@dataclass
class SampleLosses:
    """Losses of this rank's samples in one step, still on the device at first."""

    on_device: Tensor  # [B] fp32; stand-ins have one too
    sigmas: tuple[float, ...]  # [B] noise levels
    captioned: tuple[bool, ...]  # [B] true where the sample was trained with its caption
    _seconds: Callable[[], float]  # returns `compute_seconds`
    of_zero: Tensor | None = None
    """Losses [B] in fp32 that a prediction of velocity 0 would have; only at step 0 of pretrained
    weights."""

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """Losses [B] on the host; waits for the device, unless `set_losses` was called."""
        return tuple(self.on_device.tolist())

    def set_losses(self, losses: Sequence[float]) -> None:
        """Set `losses` from numbers that came to the host with other sums, which saves a wait."""
        # `cached_property` looks in the instance's dictionary.
        vars(self)["losses"] = tuple(losses)

    @property
    def compute_seconds(self) -> float:
        """Seconds that this rank computed without waiting for other ranks.

        Call it when the losses are on the host: the GPU's events have fired then.
        """
        return self._seconds()
