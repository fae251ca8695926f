"""Opens files below a folder without following links, whatever is replaced meanwhile."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from longtake import fsio
from longtake.errors import RecordError

_T = TypeVar("_T")

MEDIA_TYPES: Final = {
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
"""What pages show, by the suffix of its name."""


def open_below(top: Path, name: str) -> BufferedReader:
    """Open a regular file by its path below a folder; no part of the path may be a link.

    Each part is opened from the one before it, so that a link that is made meanwhile is not
    followed either. `top` itself may be reached by links.

    Raises:
        OSError: it is no regular file below the folder, or cannot be read.
    """
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise OSError(errno.EACCES, "it is not below the folder", name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(parts[-1], flags | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)
    return os.fdopen(descriptor, "rb")


def read_below(top: Path, name: str, kind: fsio.Kind[_T], max_bytes: int = 2**26) -> _T | None:
    """The record in a JSON file below a folder; None if there is no file.

    Raises:
        RecordError: the file cannot be read, has more than `max_bytes`, or holds no such record.
    """
    try:
        with open_below(top, name) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        if fsio.is_missing(error):
            return None
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise RecordError(top / name, why or str(error)) from error
    if len(data) > max_bytes:
        raise RecordError(top / name, f"it has more than {max_bytes:,} bytes")
    return fsio.parse_record(data, kind, top / name)


def read_end(top: Path, name: str, num_bytes: int) -> str:
    """The last lines of a text file below a folder, of at most so many bytes.

    Raises:
        OSError: as `open_below`.
    """
    with open_below(top, name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - num_bytes))
        data = file.read(num_bytes)
    if size > num_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")
