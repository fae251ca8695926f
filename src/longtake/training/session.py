"""What the parts of a training share: its session, and the state that changes from step to step."""

from dataclasses import dataclass

from rich.console import Console
from torch.optim import Optimizer

from longtake.config import Recipe
from longtake.models.build import Components
from longtake.models.numerics import Precision
from longtake.optim.ema import Averages
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory


@dataclass(frozen=True)
class Session:
    """One launch of a run, on one rank; it does not change."""

    recipe: Recipe
    run: RunDirectory
    world: World
    console: Console
    precision: Precision


@dataclass
class TrainingState:
    """All that changes from step to step."""

    components: Components
    optimizers: list[Optimizer]
    ema: Averages
    global_step: int = 0
    """Steps done: an optimizer update each, except steps without samples and skipped updates."""
