"""Opens files below a folder without following links, whatever is replaced meanwhile."""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from longtake.fsio import open_below, open_folder_below

__all__ = ["MEDIA_TYPES", "is_folder_below", "open_below", "read_end"]

MEDIA_TYPES: Final = {
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
"""What pages show, by the suffix of its name."""


def is_folder_below(top: Path, name: str) -> bool:
    """Whether a folder is there, and no part of its path below `top` is a link."""
    with suppress(OSError, ValueError), open_folder_below(top, PurePosixPath(name).parts):
        return True
    return False


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
