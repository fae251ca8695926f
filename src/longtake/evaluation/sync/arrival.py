"""A checkpoint becomes visible in the mirror when it is whole.

It is pulled into a folder that no reader looks at, whatever the order of its files, and renamed
into place when all that COMMITTED names is there with its size.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from longtake.checkpoint.deletion import take_away_unless_needed
from longtake.checkpoint.manifest import committed, damage
from longtake.errors import RecordError
from longtake.evaluation.sync.remote import RemoteRun
from longtake.fsio import read_regular
from longtake.run_dir import RunDirectory

_COMMITTED, _OPTIMIZER = "COMMITTED", "optimizer"


def arriving(mirror: RunDirectory, step: int) -> Path:
    """Where a checkpoint is pulled to."""
    return mirror.checkpoints_path / ".pulling" / mirror.checkpoint_path(step).name


def has_arrived(run: RemoteRun, step: int) -> bool:
    """Whether the mirror has the checkpoint of a step that the source has now."""
    there = _committed(run.index.checkpoint_path(step))
    return there is not None and there == _committed(run.mirror.checkpoint_path(step))


def what_is_missing(folder: Path) -> str | None:
    """What a pulled checkpoint lacks, but for the optimizer's state; None: it is whole."""
    try:
        names = committed(folder)
    except FileNotFoundError:
        return f"it has no {_COMMITTED}"
    except (OSError, RecordError):
        return damage(folder, checksums=False)  # which says why COMMITTED cannot be read
    parts = {name.partition("/")[0] + "/" * ("/" in name) for name in names}
    wanted = sorted(parts - {f"{_OPTIMIZER}/"})
    found = (damage(folder, checksums=False, within=part) for part in wanted)
    return next((each for each in found if each), None)


def show(mirror: RunDirectory, step: int) -> bool:
    """Rename a whole checkpoint into place, instead of an older one that no server needs.

    Returns:
        Whether it is there.

    Raises:
        OSError: it cannot be renamed.
    """
    place = mirror.checkpoint_path(step)
    if place.exists() and not take_away_unless_needed(mirror, step):
        return False
    folder = arriving(mirror, step)
    # It came with the source's time. Heartbeats here have the time of this file system's clock, and
    # their age is compared with that of the newest COMMITTED.
    os.utime(folder / _COMMITTED)
    folder.rename(place)
    return True


def forget_arriving(run: RemoteRun) -> None:
    """Delete what was pulled of checkpoints that the source has no more."""
    there = {run.index.checkpoint_path(step).name for step in run.index.checkpoint_steps()}
    for folder in arriving(run.mirror, 0).parent.glob("step_*"):
        if folder.name not in there:
            shutil.rmtree(folder, ignore_errors=True)


def bytes_in(folder: Path) -> int:
    """How long all files below a folder are."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _committed(folder: Path) -> bytes | None:
    with suppress(OSError):
        return read_regular(folder / _COMMITTED)
    return None
