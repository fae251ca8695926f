"""Disks: how long a small file takes to be safe, and to be read back; and how much space is left.

A training disk is as slow as its slowest moment: a shared file system that hangs holds up
checkpoints and data alike, and whoever looks at it hangs too. Run it in a thread of its own.
"""

import errno
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from longtake.health.check import Numbers

_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """Times a file in the run directory, and measures the space there and elsewhere.

    Args:
        folder: where the file is written, and removed again.
        spaces: folders whose disks are measured, by the names that they get.
    """

    name = "disk"
    numbers: Mapping[str, str] = {
        "disk_write_seconds": "How long 4 KiB took to be written and safe (fsync)",
        "disk_read_seconds": "How long it took to read them back, past the page cache",
        "disk_is_full": "1: they could not be written, for want of space or quota",
        "disk_is_failing": "1: they could not be written or read, for another reason",
        "disk_free_bytes": "Space that this user may still fill",
        "disk_size_bytes": "The disk's size",
        "disk_free_inodes": "Files that can still be made; none are told of where there is no end",
        "disk_inodes": "Files that there can be",
    }

    def __init__(self, folder: Path, spaces: Mapping[str, Path]) -> None:
        self._folder, self._spaces = folder, dict(spaces)

    def sample(self) -> Numbers:
        """The numbers now; it can take as long as the disk hangs."""
        found = self._latency()
        for name, folder in self._spaces.items():
            found |= {f"{each}:{name}": value for each, value in space(folder).items()}
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _latency(self) -> Numbers:
        path = self._folder / f".disk_probe.{os.getpid()}"
        found: Numbers = {"disk_is_full:run": 0.0, "disk_is_failing:run": 0.0}
        try:
            found["disk_write_seconds:run"] = round(write_seconds(path), 6)
            found["disk_read_seconds:run"] = round(read_seconds(path), 6)
        except OSError as error:
            is_full = error.errno in _FULL
            found["disk_is_full:run" if is_full else "disk_is_failing:run"] = 1.0
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return found


def write_seconds(path: Path, num_bytes: int = _BYTES) -> float:
    """How long it takes to write a file so that it survives a power cut; the file stays.

    Raises:
        OSError: it cannot be written.
    """
    start = time.monotonic()
    with path.open("wb") as file:
        file.write(os.urandom(num_bytes))
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - start


def read_seconds(path: Path) -> float:
    """How long it takes to read a file that is on disk, past the page cache where that is heeded.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.monotonic()
        while file.read(2**20):
            pass
        return time.monotonic() - start


def space(folder: Path) -> Numbers:
    """What is left of the disk that a folder is on, without its name; empty: it cannot be seen."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    numbers = {
        "disk_free_bytes": float(found.f_bavail * found.f_frsize),
        "disk_size_bytes": float(found.f_blocks * found.f_frsize),
    }
    if found.f_files:
        numbers |= {
            "disk_free_inodes": float(found.f_favail),
            "disk_inodes": float(found.f_files),
        }
    return numbers
