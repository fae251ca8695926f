"""What a run has saved: finds the newest whole checkpoint, loads from it, deletes what may go.

A checkpoint is a folder that holds `model/`, `ema/<profile>/` and `optimizer/` apart (torch's
distributed checkpoint format, so that another number of ranks can load it), `trainer.json`, and
COMMITTED, which lists every file and is written last.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import TypedDict

from longtake.checkpoint import manifest
from longtake.checkpoint.deletion import delete, delete_unless_needed, needed_steps
from longtake.checkpoint.reading import Planner, Reader
from longtake.checkpoint.retention import doomed
from longtake.config import CheckpointSection
from longtake.errors import CheckpointError, RecordError
from longtake.fsio import Count, remove_tree, require_record, with_other_fields
from longtake.parallel.collectives import gather_objects
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

State = dict[str, Any]
"""A (nested) dict of tensors; DTensors are saved and loaded in shards."""

LINK_REMEDY = (
    "mount or restore what the link points to, or delete the link, and start the same command again"
)
"""What to do about a checkpoint that is a `dangling_link`."""

_T = TypeVar("_T")


@with_other_fields
class Trainer(TypedDict):
    """What every trainer.json says."""

    global_step: Count


class SampledTrainer(Trainer):
    """What is needed to sample."""

    precision: Literal["bf16", "fp32"]


class Found(NamedTuple):
    """Which checkpoint a run goes on from."""

    path: Path | None
    """None: there is no whole one."""
    passed_over: tuple[tuple[Path, str], ...]
    """Newer ones, the newest first, with what is wrong with each."""


def newest_on_all(run: RunDirectory, world: World, at_most: int | None = None) -> Found:
    """The newest checkpoint all of whose bytes are as they were saved; the same on every rank.

    Args:
        run: the run directory, as rank 0 sees it.
        world: all ranks; they wait for rank 0, which reads the files.
        at_most: leave later steps out of account, as if they were not there.
    """
    found = _newest_verified(run, at_most) if world.is_first else Found(None, ())
    return gather_objects(found, world, patiently=True)[0]


def newest(run: RunDirectory, part: str = "") -> Path | None:
    """The newest checkpoint whose files are there and as long as they were, or None.

    With a `part`, such as `ema/main`, only that one and what is said of the training must be
    there: who samples has no need of the optimizer.
    """
    within = (f"{part}/", "trainer.json") if part else ("",)
    paths = (run.checkpoint_path(step) for step in reversed(run.checkpoint_steps()))
    whole = (path for path in paths if all(_is_whole(path, each) for each in within))
    return next(whole, None)


def dangling_link(path: Path) -> str | None:
    """What is wrong with a checkpoint that links to nothing, such as to an unmounted disk."""
    if not path.is_symlink() or path.exists():
        return None
    return f"{path} is a symbolic link to {path.readlink()}, which does not exist"


def refuse_dangling_links(run: RunDirectory, after_step: int) -> None:
    """Refuse to train on towards a checkpoint that lies where nothing can be read or saved.

    Raises:
        CheckpointError: a checkpoint later than `after_step` is a symbolic link to nothing.
    """
    for step in run.checkpoint_folders():
        found = dangling_link(run.checkpoint_path(step)) if step > after_step else None
        if found is not None:
            raise CheckpointError(
                f"{found}. Training would go on from step {after_step} and could not save step "
                f"{step} there: {LINK_REMEDY}."
            )


def verify(path: Path) -> None:
    """Compare a checkpoint's files with the sizes that were committed.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    _refuse(path, manifest.damage(path, checksums=False))


def verify_part(path: Path, name: str) -> None:
    """Compare the checksums of one part of a checkpoint, such as `ema/main`.

    Raises:
        CheckpointError: a file is missing or has other bytes than were saved.
    """
    _refuse(path, manifest.damage(path, checksums=True, within=f"{name}/"))


def load_trainer(path: Path, kind: type[_T]) -> _T:
    """What the checkpoint was saved with as `trainer`, as a type that names what is needed.

    Raises:
        CheckpointError: the checkpoint is not whole, or lacks what is needed.
    """
    _refuse(path, manifest.damage(path, checksums=True, within="trainer.json"))
    try:
        return require_record(path / "trainer.json", kind)
    except RecordError as error:
        raise CheckpointError(f"{error} Use an earlier checkpoint.") from error


def load_parts(
    path: Path,
    parts: Mapping[str, State],
    world: World | None = None,
    *,
    is_verified: bool = False,
) -> None:
    """Fill the given states in place from a checkpoint; resharded where the world is another.

    Args:
        path: the checkpoint.
        parts: what to fill, by the part of the checkpoint: `model`, `ema/<profile>`, `optimizer`.
        world: all ranks, each of which calls this; None for a process that loads alone.
        is_verified: whether the checksums of the files were compared already. Else those of these
            parts are; the others need not be there.

    Raises:
        CheckpointError: the checkpoint is not whole, or holds another model; some of the given
            tensors may have been filled.
    """
    forget_hint_of_being_alone()
    logging.getLogger().addFilter(_is_no_warning_of_the_loader)
    alone = world is None or world.mesh is None
    for name, state in parts.items():
        if not is_verified:
            verify_part(path, name)
        try:
            state_dict_loader.load(
                state, storage_reader=Reader(path / name), planner=Planner(), no_dist=alone
            )
        except (Exception, CheckpointException) as error:  # torch raises whatever comes along
            raise CheckpointError(
                f"{path / name} cannot be loaded into the model that the recipe describes: "
                f"{last_line(error)}. Its files are damaged, or hold another model: take the "
                "recipe that the run was started with, or an earlier checkpoint."
            ) from error


def thin_out(
    run: RunDirectory, saved: int, since: int, section: CheckpointSection, reach: int
) -> None:
    """Delete checkpoints that nobody needs, and what interrupted saves have left.

    Those that are not whole do not count, and go. So do those that are later than the step before
    the one that was `saved`, which is `since`: the run went on from before them, because they are
    damaged or because it went back; no server's needs keep these. What cannot be deleted now can be
    after the next save.

    Rank 0 only, and never while a checkpoint is being saved.
    """
    folders = _folders(run)
    gone = {
        step
        for step, path in folders.items()
        if step != saved and (step > min(since, saved) or not _is_whole(path))
    }
    unneeded = doomed(
        folders.keys() - gone,
        keep=section.keep,
        keep_every=section.keep_every,
        needed=needed_steps(run),
        reach=reach,
    )
    delete(folders[step] for step in sorted(gone))
    for step in unneeded:
        delete_unless_needed(run, step)
    for leftover in run.checkpoints_path.glob(".step_*"):
        remove_tree(leftover)


def abandon(run: RunDirectory, after_step: int) -> None:
    """Delete all checkpoints later than a step: a run that went back there comes by otherwise.

    They go even if an evaluation server needs them: the run saves these steps anew.

    Rank 0 only, and never while a checkpoint is being saved.
    """
    later = {step: path for step, path in _folders(run).items() if step > after_step}
    delete(later[step] for step in sorted(later, reverse=True))


def _is_no_warning_of_the_loader(record: logging.LogRecord) -> bool:
    """Filter torch's warnings, with tracebacks, of metadata about which it raises an error too."""
    return record.levelno >= logging.ERROR or record.pathname != state_dict_loader.__file__


def forget_hint_of_being_alone() -> None:
    """Silence torch's warning to whoever saves or loads in one process that this is what happens.

    For good: filters belong to all threads, and saving has its own.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def last_line(error: BaseException) -> str:
    """What torch's report on all ranks ends with, which is what went wrong."""
    return str(error).strip().splitlines()[-1].rstrip(".")


def _newest_verified(run: RunDirectory, at_most: int | None) -> Found:
    passed_over: list[tuple[Path, str]] = []
    for step, path in sorted(_folders(run).items(), reverse=True):
        if at_most is not None and step > at_most:
            continue
        reason = manifest.damage(path, checksums=True) or _unreadable_trainer(path)
        if reason is None:
            return Found(path, tuple(passed_over))
        passed_over.append((path, reason))
    return Found(None, tuple(passed_over))


def _folders(run: RunDirectory) -> dict[int, Path]:
    """Folders of checkpoints by step, whole or not."""
    paths = {step: run.checkpoint_path(step) for step in run.checkpoint_folders()}
    return {step: path for step, path in paths.items() if path.is_dir()}


def _is_whole(path: Path, within: str = "") -> bool:
    return manifest.damage(path, checksums=False, within=within) is None


def _refuse(path: Path, reason: str | None) -> None:
    if reason is not None:
        raise CheckpointError(f"{path} is damaged: {reason}. Use an earlier checkpoint.")


def _unreadable_trainer(path: Path) -> str | None:
    try:
        require_record(path / "trainer.json", Trainer)
    except RecordError as error:
        return f"trainer.json cannot be read: {error.reason}"
    return None
