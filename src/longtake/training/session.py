"""What the parts of a training share: session, state, and what a step gives."""

from dataclasses import dataclass, field

from rich.console import Console
from torch.optim import Optimizer

from longtake.config import Recipe
from longtake.models.build import Components
from longtake.models.numerics import Precision
from longtake.optim.update import Averages
from longtake.parallel.mesh import World
from longtake.run_dir import Parent, RunDirectory


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


@dataclass
class TrainingState:
    """All that changes from step to step."""

    components: Components
    optimizers: list[Optimizer]
    ema: Averages
    global_step: int = 0
    """Steps done: an optimizer update each, except steps without samples and skipped updates."""


@dataclass(frozen=True)
class SampleLosses:
    """Losses of the samples of this rank's share of a batch."""

    losses: tuple[float, ...]  # [B], stand-ins included
    sigmas: tuple[float, ...]  # [B]
    compute_seconds: float = field(default=0.0, compare=False)
    """Time of this rank's own computation, without waiting for other ranks."""
