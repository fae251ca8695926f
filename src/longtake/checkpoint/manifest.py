"""COMMITTED: which files a checkpoint has, how long they are and what their checksums are.

It is written last, so that a folder without it never was a checkpoint.
"""

import hashlib
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from longtake.errors import RecordError
from longtake.fsio import (
    Count,
    InnerPath,
    format_number,
    open_regular,
    parse_record,
    read_regular,
    write_json,
)

_NAME = "COMMITTED"
FORMAT: Final = 1
_MOST_BYTES = 64 * 2**20
_THREADS = 4  # more would not read faster from one disk


class Entry(TypedDict):
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(TypedDict):
    format: NotRequired[format_number(FORMAT)]  # type: ignore[valid-type]
    files: dict[InnerPath, Entry]


def file_names(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if str(path) != _NAME)


def describe(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Sizes and checksums of files, by their names in the folder.

    Raises:
        OSError: one cannot be read.
    """
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _checksum(folder / name)}
        for name in names
    }


def commit(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Declare a folder whole; on disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / _NAME, {"format": FORMAT, "files": dict(sorted(entries.items()))})


def damage(folder: Path, *, checksums: bool, within: str = "") -> str | None:
    """What is wrong with a checkpoint's files, in words that name one of them.

    Args:
        folder: the checkpoint.
        checksums: whether to read all bytes, in a few threads, and compare their checksums; else
            only sizes are compared, which is quick.
        within: look only at files whose names begin so, such as `model/`.

    Returns:
        None where nothing is wrong.
    """
    try:
        listed = committed(folder)
    except FileNotFoundError:
        return f"it has no {_NAME}: its save was interrupted"
    except OSError as error:
        return f"{_NAME} cannot be read: {error.strerror or error}"
    except RecordError as error:
        return f"{_NAME} cannot be read: {error.reason}"
    files = {name: entry for name, entry in listed.items() if name.startswith(within)}
    if not files:
        return f"it holds no {within or 'files'}"
    found = [_wrong_size(folder / name, name, entry) for name, entry in files.items()]
    if not any(found) and checksums:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(
                threads.map(lambda each: _wrong_bytes(folder / each[0], *each), files.items())
            )
    return _told([each for each in found if each])


def committed(folder: Path) -> dict[str, Entry]:
    """What COMMITTED lists, by the files' names in the folder.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        RecordError: it holds something else.
    """
    path = folder / _NAME
    return parse_record(read_regular(path, _MOST_BYTES), Manifest, path)["files"]


def _wrong_size(path: Path, name: str, entry: Entry) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is no regular file"
    if size != entry["bytes"]:
        return f"{name} has {size:,} bytes, and had {entry['bytes']:,} when it was saved"
    return None


def _wrong_bytes(path: Path, name: str, entry: Entry) -> str | None:
    try:
        checksum = _checksum(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if checksum != entry["sha256"]:
        return f"{name} has other bytes than were saved: its checksum (sha256) differs"
    return None


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _told(found: list[str]) -> str | None:
    if not found:
        return None
    return found[0] + (f", and {len(found) - 1} more of its files are damaged" * (len(found) > 1))
