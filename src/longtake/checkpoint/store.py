"""Saves and loads a training state: written aside, renamed when whole.

A checkpoint is a folder that holds `model/`, `ema/` and `optimizer/` apart (torch's distributed
checkpoint format, so that another number of ranks can load it), `trainer.json`, and COMMITTED,
which lists every file with its size and is written last. A folder without it never was.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from longtake.errors import CheckpointError
from longtake.parallel.collectives import from_first, wait_for_all
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory, write_json

State = dict[str, Any]
"""A (nested) dict of tensors; DTensors are saved and loaded in shards."""


def save(
    run: RunDirectory,
    step: int,
    parts: Mapping[str, State],
    trainer: Mapping[str, Any],
    world: World,
) -> Path:
    """Write a checkpoint; all ranks call it.

    Args:
        run: the run directory.
        step: global step, the number of updates that the state has seen.
        parts: `model`, `ema` and `optimizer`.
        trainer: what else is needed to go on, as JSON.
        world: all ranks.

    Raises:
        CheckpointError: the folder cannot be written; older checkpoints are untouched.
    """
    whole = run.checkpoint_path(step)
    aside = whole.with_name(f".{whole.name}.partial")
    try:
        if world.is_first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        wait_for_all(world)
        for name, state in parts.items():
            with _no_hint_of_being_alone():
                state_dict_saver.save(state, checkpoint_id=aside / name, no_dist=world.mesh is None)
        wait_for_all(world)
        if world.is_first:
            _commit(aside, whole, trainer)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"The checkpoint of step {step} in {run.path} cannot be written: {_last_line(error)}. "
            "Earlier checkpoints are whole; make room and start the same command again."
        ) from error
    return whole


def load_parts(path: Path, parts: Mapping[str, State], world: World | None = None) -> None:
    """Fill the given states in place from a checkpoint; resharded where the world is another.

    Raises:
        CheckpointError: the checkpoint is not whole, or holds another model; some of the given
            tensors may have been filled.
    """
    verify(path)
    alone = world is None or world.mesh is None
    for name, state in parts.items():
        try:
            with _no_hint_of_being_alone():
                state_dict_loader.load(state, checkpoint_id=path / name, no_dist=alone)
        except (RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise CheckpointError(
                f"{path / name} cannot be loaded into the model that the recipe describes: "
                f"{_last_line(error)}. Its files are damaged, or hold another model: take the "
                "recipe that the run was started with, or an earlier checkpoint."
            ) from error


def load_trainer(path: Path) -> dict[str, Any]:
    """What `save` was given as `trainer`.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """
    verify(path)
    try:
        loaded: dict[str, Any] = json.loads((path / "trainer.json").read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{path / 'trainer.json'} is damaged: {error}. Use an earlier checkpoint."
        ) from error
    return loaded


def newest(run: RunDirectory) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    for step in reversed(run.checkpoint_steps()):
        path = run.checkpoint_path(step)
        if not _missing(path):
            return path
    return None


def passed_over(run: RunDirectory, step: int) -> list[Path]:
    """Folders of checkpoints later than the one that a run goes on from: none of them is whole."""
    found = sorted(run.checkpoints_path.glob("step_*"))
    return [path for path in found if path.name > run.checkpoint_path(step).name]


def verify(path: Path) -> None:
    """Compare a checkpoint's files with the sizes that were committed.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    if not (path / "COMMITTED").is_file():
        raise CheckpointError(
            f"{path} is not a whole checkpoint: it has no COMMITTED. Its save was interrupted; "
            "use an earlier one."
        )
    if missing := _missing(path):
        raise CheckpointError(
            f"{path} is damaged: {len(missing)} of its files are missing or have another size, "
            f"such as {missing[0]}. Use an earlier checkpoint."
        )


def keep_newest(run: RunDirectory, count: int) -> None:
    """Delete all but the newest `count` whole checkpoints, and what interrupted saves have left.

    Damaged ones do not count, and go: a run that was resumed before them would otherwise keep
    them in place of what it saves.

    Rank 0 only, and never while a checkpoint is being saved.
    """
    whole = [step for step in run.checkpoint_steps() if not _missing(run.checkpoint_path(step))]
    kept = whole[-count:]
    for step in run.checkpoint_steps():
        if step not in kept:
            _delete(run.checkpoint_path(step))
    for leftover in run.checkpoints_path.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def newest_on_all(run: RunDirectory, world: World) -> Path | None:
    """The newest whole checkpoint as rank 0 sees it, the same answer on every rank."""
    return from_first(newest(run) if world.is_first else None, world)


@contextmanager
def _no_hint_of_being_alone() -> Iterator[None]:
    """Torch warns whoever saves or loads in one process that this is what happens."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _commit(aside: Path, whole: Path, trainer: Mapping[str, Any]) -> None:
    write_json(aside / "trainer.json", trainer)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(aside)): path.stat().st_size for path in files}
    write_json(aside / "COMMITTED", {"files": sizes})
    if whole.exists():  # a step that is run again, because this one is damaged
        _delete(whole)
    aside.rename(whole)


def _delete(path: Path) -> None:
    """Take a checkpoint out of sight as a whole, so that no reader sees half of it; delete it."""
    doomed = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)  # left by a deletion that was interrupted
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _missing(path: Path) -> list[str]:
    try:
        sizes = json.loads((path / "COMMITTED").read_bytes())["files"]
    except ValueError:
        return ["COMMITTED"]
    return [
        name
        for name, size in sizes.items()
        if not (path / name).is_file() or (path / name).stat().st_size != size
    ]


def _last_line(error: BaseException) -> str:
    """What torch's report on all ranks ends with, which is what went wrong."""
    return str(error).strip().splitlines()[-1].rstrip(".")
