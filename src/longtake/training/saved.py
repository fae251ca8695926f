"""What a checkpoint holds besides weights, averages and optimizer states."""

from pathlib import Path
from typing import Any

from longtake.checkpoint import files
from longtake.config import Recipe
from longtake.data.course import LoaderState
from longtake.data.loader import Loader
from longtake.fsio import Count
from longtake.guard.history import HistoryColumns
from longtake.parallel.collectives import sum_over_ranks
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.gauge import Gauge
from longtake.training.guarding import Guard
from longtake.training.resume import recipe_fingerprint, restore
from longtake.training.step import TrainingState


class SavedTrainer(files.SampledTrainer):
    """trainer.json: what is needed to resume."""

    data: LoaderState
    guard: HistoryColumns
    last_update: dict[str, float]
    num_rollbacks: Count


def facts_to_save(
    loader: Loader, guard: Guard, gauge: Gauge, recipe: Recipe, world: World
) -> dict[str, Any]:
    """All that the next step and its verdict depend on, as JSON; all ranks call it.

    There is no random state among it: all that is random follows from the recipe's seed, the step
    and the clips (`longtake.training.randomness`, `longtake.data.sample`).
    """
    return {
        "data": loader.state_dict(),
        "guard": guard.history.as_json(),
        "last_update": sum_over_ranks(gauge.last_update(), world),
        "num_rollbacks": len(RunDirectory(recipe.out).rollbacks()),
        "recipe": recipe_fingerprint(recipe),
    }


def go_on_from(path: Path, state: TrainingState, guard: Guard, gauge: Gauge, world: World) -> None:
    """Put training state and the guard's memory back to a whole checkpoint; all ranks call it.

    Raises:
        CheckpointError: it is damaged, or belongs to another model.
    """
    trainer = files.load_trainer(path, SavedTrainer)
    restore(state, path, trainer["global_step"], world)
    guard.load(trainer["guard"])
    gauge.set_last_update(trainer["last_update"], world.size)
