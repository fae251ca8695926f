"""A result appears as a whole, and once: written aside, renamed into place."""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from longtake.evaluation.server.checkpoints import checkpoint_key
from longtake.evaluation.server.task import Task
from longtake.evaluation_dir import Scores
from longtake.fsio import write_json
from longtake.lease import Lease


@contextmanager
def result_aside(task: Task, lease: Lease) -> Iterator[Path]:
    """A folder beside the result's to write it to; removed at the end, unless it was published.

    Raises:
        OSError: it cannot be made.
    """
    folder = aside_path(task, lease.number, lease.record)
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove(folder)


def aside_path(task: Task, number: int, record: Mapping[str, Any]) -> Path:
    """Where the holder of a lease writes; nobody else ever does."""
    whole = task.directory.result_path(task.preset.name, task.step)
    server = re.sub(r"[^\w.-]", "-", str(record.get("server")))[:100]  # others may have written it
    return whole.with_name(f".{whole.name}.{server}-{task.key}-{number}.partial")


def remove(folder: Path) -> None:
    """Delete what was not published."""
    shutil.rmtree(folder, ignore_errors=True)


def publish(task: Task, lease: Lease, folder: Path, scores: Scores) -> bool:
    """Write scores.json and rename a result into place.

    What of the result is there of other weights of that step gives way, if the checkpoint has
    these weights still.

    Returns:
        False where somebody else was first, or has taken the work over.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / "scores.json", scores)
    _put_on_disk(folder)
    if not lease.is_held or not _make_way(task):
        return False
    whole = task.directory.result_path(task.preset.name, task.step)
    try:
        folder.rename(whole)  # onto a folder with files in it, it fails
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _make_way(task: Task) -> bool:
    """Whether there is no result in the way any more."""
    whole = task.directory.result_path(task.preset.name, task.step)
    if not whole.exists():
        return True
    scores = task.directory.scores(task.preset.name, task.step)
    known = scores["key"] if scores else "unknown"
    if known == task.key or checkpoint_key(task.checkpoint, task.preset.weights) != task.key:
        return False
    try:
        whole.rename(_superseded(task, known))
    except FileNotFoundError:  # somebody else did it
        return not whole.exists()
    return True


def _superseded(task: Task, key: str) -> Path:
    path = task.directory.superseded_path(task.preset.name, task.step, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not path.exists() else next(each for each in others if not each.exists())


def _put_on_disk(folder: Path) -> None:
    """A machine that loses its power leaves no result with empty files."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
