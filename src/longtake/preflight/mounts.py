"""Which disk a path is on."""

from pathlib import Path

import psutil


def filesystem_of(path: Path) -> str:
    """Kind and source of the file system that a path is, or would be, on: `nfs4 store:/clips`."""
    wanted = path.absolute().resolve()
    around = {str(each) for each in (wanted, *wanted.parents)}
    found = [each for each in psutil.disk_partitions(all=True) if each.mountpoint in around]
    if not found:
        return "unknown"
    # Of two that are mounted at one place the later one is seen.
    nearest = max(enumerate(found), key=lambda each: (len(each[1].mountpoint), each[0]))[1]
    return f"{nearest.fstype} {nearest.device}"


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
