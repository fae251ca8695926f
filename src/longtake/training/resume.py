"""What is saved of a training state, and how it goes on from there."""

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from longtake import config
from longtake.checkpoint import store
from longtake.checkpoint.store import Saver
from longtake.config import Recipe
from longtake.data.loader import Loader
from longtake.errors import DataError
from longtake.models.trainable import load_trained, trained_state
from longtake.parallel.collectives import gather_objects
from longtake.parallel.fsdp import gradients_of_any_dtype
from longtake.parallel.mesh import World
from longtake.training.step import TrainingState

# Flat, so that states of several optimizers can be saved together and resharded.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_EMA = "ema"


def save_checkpoint(saver: Saver, state: TrainingState, facts: Mapping[str, Any]) -> None:
    """Begin to save all that the next step depends on; all ranks call it.

    Returns when the state may change again; how the save ends is told by the saver. Frozen weights
    are not saved: what built the model builds them again. There is no random state to save: all
    that is random follows from the recipe's seed.
    """
    trainer = {
        "global_step": state.global_step,
        "precision": state.precision,
        "world_size": saver.world.size,
        **facts,
    }
    saver.save(state.global_step, _parts(state), trainer)


def restore(state: TrainingState, path: Path, step: int, world: World) -> None:
    """Put a training state to where a checkpoint was saved, whether it comes from before or after.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
    """
    model = state.components.model
    model.zero_grad(set_to_none=True)
    parts = _parts(state)
    store.load_parts(path, parts, world, is_verified=True)
    load_trained(model, parts["model"])
    state.ema.load({name: parts[f"{_EMA}/{name}"] for name in state.ema.states()})
    with gradients_of_any_dtype(model):
        set_optimizer_state_dict(model, state.optimizers, parts["optimizer"], options=_FLAT)
    state.global_step = step


def recipe_fingerprint(recipe: Recipe) -> str:
    """The checksum (sha256) of a recipe as it is written to a run directory."""
    return hashlib.sha256(config.dump(config.kept(recipe)).encode()).hexdigest()


def _parts(state: TrainingState) -> dict[str, store.State]:
    """What is saved, by the folders that it is saved in; it shares the state's memory."""
    model = state.components.model
    averages = {f"{_EMA}/{name}": each for name, each in state.ema.states().items()}
    with gradients_of_any_dtype(model):
        optimizer = get_optimizer_state_dict(model, state.optimizers, options=_FLAT)
    return {"model": trained_state(model), **averages, "optimizer": optimizer}


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
