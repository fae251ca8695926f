"""Writes one checkpoint aside and renames it when it is whole; all ranks together."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from longtake.checkpoint import manifest, store
from longtake.checkpoint.deletion import take_away
from longtake.checkpoint.manifest import Entry
from longtake.checkpoint.store import State
from longtake.errors import CheckpointError
from longtake.fsio import flush_to_disk, remove_tree, write_json
from longtake.parallel.mesh import World
from longtake.run_dir import RunDirectory

T = TypeVar("T")


@dataclass(frozen=True)
class Company:
    """Ranks that save together, through a process group that nobody else talks in."""

    world: World
    group: dist.ProcessGroup | None
    """None where the process is alone."""

    def together(self, work: Callable[[], T]) -> list[T]:
        """Let every rank do something, and wait for all; returns what each has made, by rank.

        Raises:
            OSError: on every rank, if the work failed on any of them.
        """
        made: T | None = None
        mistake: str | None = None
        try:
            made = work()
        except Exception as error:  # whatever it is: nobody may be left waiting for this rank
            mistake = str(error) if isinstance(error, OSError) else repr(error)
        everyone = self._gathered((made, mistake))
        for _, said in everyone:
            if said is not None:
                raise OSError(said)
        return [each for each, _ in everyone]

    def _gathered(self, thing: Any) -> list[Any]:
        everyone = [thing] * self.world.size
        if self.group is not None:
            dist.all_gather_object(everyone, thing, self.group)
        return everyone


def write(
    run: RunDirectory,
    step: int,
    parts: Mapping[str, State],
    trainer: Mapping[str, Any],
    company: Company,
) -> Path:
    """Write a checkpoint; all ranks call it.

    Args:
        run: the run directory.
        step: global step.
        parts: states by the folders in which they are saved.
        trainer: what else is needed to go on, as JSON.
        company: all ranks.

    Returns:
        The whole checkpoint, which is on disk.

    Raises:
        CheckpointError: on every rank; it cannot be written. Nothing is left of it, and older
            checkpoints are untouched.
    """
    whole = run.checkpoint_path(step)
    aside = whole.with_name(f".{whole.name}.partial")
    is_first, rank = company.world.is_first, company.world.rank
    try:
        company.together(lambda: _begin(aside, whole) if is_first else None)
        for name, state in parts.items():
            _write_part(aside / name, state, company.group)
        described = company.together(lambda: manifest.describe(aside, _written_by(rank, aside)))
        company.together(lambda: _commit(aside, whole, trainer, described) if is_first else None)
    except (OSError, CheckpointException) as error:
        if is_first:
            remove_tree(aside)
        raise CheckpointError(_what_was_lost(run, step, error)) from error
    return whole


class _Disk(FileSystem):
    """Says that a disk is full, where torch says that a file is shorter than it should be."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; what is raised while it is open is the error that came first."""
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def _begin(aside: Path, whole: Path) -> None:
    if link := store.dangling_link(whole):
        raise OSError(link)
    remove_tree(aside)
    aside.mkdir(parents=True)


def _write_part(folder: Path, state: State, group: dist.ProcessGroup | None) -> None:
    # Tensors are on the CPU already. With copy-ahead, torch would wait for the current CUDA stream,
    # on which training has queued seconds of work, after every 10 MB.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.fs = _Disk()
    alone = group is None
    state_dict_saver.save(state, storage_writer=writer, process_group=group, no_dist=alone)


def _written_by(rank: int, folder: Path) -> list[str]:
    """Torch puts a rank's number before the names of its files."""
    return [name for name in manifest.file_names(folder) if Path(name).match(f"__{rank}_*")]


def _commit(
    aside: Path, whole: Path, trainer: Mapping[str, Any], described: list[dict[str, Entry]]
) -> None:
    write_json(aside / "trainer.json", trainer)
    entries = {name: entry for each in described for name, entry in each.items()}
    rest = [name for name in manifest.file_names(aside) if name not in entries]
    manifest.commit(aside, entries | manifest.describe(aside, rest))
    for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        flush_to_disk(folder)
    # There may be one already: its step is run again, because it is damaged.
    replaced = take_away(whole) if whole.exists() else None
    aside.rename(whole)
    flush_to_disk(whole.parent)
    if replaced is not None:
        remove_tree(replaced)


def _what_was_lost(run: RunDirectory, step: int, error: BaseException) -> str:
    last = store.newest(run)
    lost = (
        f"nothing is lost but the steps since {last.name}, which is whole"
        if last is not None
        else "there is no earlier one, so all steps so far are lost if the run ends now"
    )
    is_link = store.dangling_link(run.checkpoint_path(step)) is not None
    remedy = store.LINK_REMEDY if is_link else "make room and start the same command again"
    return (
        f"The checkpoint of step {step} in {run.path} cannot be written "
        f"({store.last_line(error)}); {lost}: {remedy}."
    )
