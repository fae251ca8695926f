"""Opens files below a folder without following links, even if paths are replaced meanwhile."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from longtake import fsio
from longtake.errors import RecordError
from longtake.fsio import open_below, open_folder_below

_T = TypeVar("_T")

MEDIA_TYPES: Final = {
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
"""Media types of the files that pages show, by the suffix of the name."""


def folder_names(top: Path, name: str) -> list[str]:
    """Return the sorted names of the subfolders of a folder below the folder `top`.

    Names that are no text are left out, and so are links. The list is empty if the folder does not
    exist, or if a part of its path is a link.
    """
    return _names(top, name, lambda entry: entry.is_dir(follow_symlinks=False))


def file_names(top: Path, name: str) -> list[str]:
    """Return the sorted names of a folder's files, by the rules of `folder_names`."""
    return _names(top, name, lambda entry: entry.is_file(follow_symlinks=False))


def _names(top: Path, name: str, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    parts = PurePosixPath(name).parts
    with (
        suppress(OSError),
        open_folder_below(top, parts) as folder,
        os.scandir(folder) as entries,
    ):
        return sorted(each.name for each in entries if is_wanted(each) and is_text(each.name))
    return []


def is_text(name: str) -> bool:
    """Return whether a file's name is valid UTF-8, so that a page can show it and link to it."""
    # Python decodes invalid bytes of file names to lone surrogates ("surrogateescape").
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def is_folder_below(top: Path, name: str) -> bool:
    """Return whether the path `name` below folder `top` is a folder, without any link in it."""
    with suppress(OSError, ValueError), open_folder_below(top, PurePosixPath(name).parts):
        return True
    return False


def read_below(top: Path, name: str, kind: fsio.Kind[_T], max_bytes: int = 2**26) -> _T | None:
    """Read a JSON file below the folder `top` as a record; return None if it does not exist.

    Raises:
        RecordError: the file cannot be read, has more than `max_bytes`, or is not such a record.
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
    """Return the last whole lines of a text file below `top`, in at most `num_bytes` bytes.

    Raises:
        OSError: the file cannot be opened without following a link.
    """
    with open_below(top, name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - num_bytes))
        data = file.read(num_bytes)
    if size > num_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")
