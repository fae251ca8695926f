"""What is saved of a training state, and how it goes on from there."""

import socket
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from longtake.checkpoint import store
from longtake.config import Recipe
from longtake.data.loader import Loader
from longtake.errors import CheckpointError, DataError
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory
from longtake.training.step import TrainingState

# Flat, so that states of several optimizers can be saved together and resharded.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(
    state: TrainingState,
    data: Mapping[str, Any],
    recipe: Recipe,
    run: RunDirectory,
    world: World,
) -> None:
    """Save all that the next step depends on; all ranks call it.

    `data` is the loader's state. Frozen weights are not saved: what built the model builds them
    again. There is no random state to save: all that is random follows from the recipe's seed.

    Raises:
        CheckpointError: it could not be written.
    """
    model = state.components.model
    parts = {
        "model": trained_state(model),
        "ema": state.ema.state(),
        "optimizer": get_optimizer_state_dict(model, state.optimizers, options=_FLAT),
    }
    trainer = {
        "global_step": state.global_step,
        "precision": state.precision,
        "data": data,
    }
    path = store.save(run, state.global_step, parts, trainer, world)
    if world.is_first:
        run.append_event("checkpoint", step=state.global_step, path=path.name)
        store.keep_newest(run, recipe.checkpoint.keep)


def restore(state: TrainingState, trainer: dict[str, Any], run: RunDirectory, world: World) -> None:
    """Put a training state back to where a checkpoint was saved.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
    """
    model = state.components.model
    path = run.checkpoint_path(trainer["global_step"])
    weights, averages = trained_state(model), state.ema.state()
    optimizer = get_optimizer_state_dict(model, state.optimizers, options=_FLAT)
    store.load_parts(path, {"model": weights, "ema": averages, "optimizer": optimizer}, world)
    load_trained(model, weights)
    state.ema.averages = {name: averages[name] for name in state.ema.averages}
    set_optimizer_state_dict(model, state.optimizers, optimizer, options=_FLAT)
    state.global_step = trainer["global_step"]


def data_state(trainer: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    """The loader's state in a checkpoint.

    Raises:
        CheckpointError: there is none, because an older longtake saved it.
    """
    if "data" not in trainer:
        raise CheckpointError(
            f"The checkpoint of step {trainer['global_step']} in {run.path} was saved by an older "
            "longtake that ordered clips otherwise: going on would repeat some and miss others. "
            f"Start a new run with --set out={run.path}-2."
        )
    state: dict[str, Any] = trainer["data"]
    return state


def refuse_other_plans(loader: Loader, world: World) -> None:
    """Make sure that all ranks would train the same; each has read the catalogs for itself.

    Raises:
        DataError: on every rank, if one of them has another plan, such as by an older copy of a
            catalog on its node.
    """
    mine = (socket.gethostname(), loader.step, loader.course.plan.fingerprint)
    everyone = gather_objects(mine, world)
    other = [rank for rank, facts in enumerate(everyone) if facts[1:] != everyone[0][1:]]
    if other:
        hosts = sorted({everyone[rank][0] for rank in other})
        raise DataError(
            f"{len(other)} of {world.size} ranks (on {', '.join(hosts)}) would train other clips "
            "than rank 0: they have read another catalog, or another checkpoint. Give all nodes "
            "the same files, and start again."
        )
