"""Records on disk that several processes read: appended, or renamed into place, as a whole."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longtake.aside import written_aside

_TAIL_BYTES = 2**14


def now() -> str:
    """Wall-clock time for people to read, ISO 8601 in UTC; never subtracted from another."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def file_time() -> str:
    """Wall-clock time as a part of file names, in UTC."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S_%f")


def append_json(path: Path, record: Mapping[str, Any], *, durably: bool = False) -> None:
    """Append a record as one line, after ending a line that an interrupted write left half.

    `durably`: it is on disk, and not only on its way, when this returns.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        if durably:
            file.flush()
            os.fsync(file.fileno())


def read_json_lines(path: Path) -> Iterator[Any]:
    """Records of a JSON-lines file; none if there is no file.

    Half a line is left out: the last while it is being written, another where a write was cut off.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with suppress(ValueError):
                    yield json.loads(line)


def read_last_json(path: Path) -> Any | None:
    """The last record of a JSON-lines file, however long that is; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        reach, size = _TAIL_BYTES, file.seek(0, os.SEEK_END)
        while True:
            file.seek(max(0, size - reach))
            lines = file.read(reach).splitlines(keepends=True)
            for line in reversed(lines[reach < size :]):  # the first may be a part of one
                with suppress(ValueError):
                    if line.endswith(b"\n"):
                        return json.loads(line)
            if reach >= size:
                return None
            reach *= 8


def read_json_lines_on(path: Path, offset: int, at_most: int) -> tuple[list[Any], int]:
    """The next whole lines of a JSON-lines file, and the byte after them.

    Args:
        path: of the file.
        offset: the byte to read on from; of a shorter file, which is another one, all is read.
        at_most: so many records; the rest is for the next time.

    Raises:
        OSError: it cannot be read.
    """
    found: list[Any] = []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == offset:
            return found, offset
        offset = file.seek(offset if offset < size else 0)
        for line in file:
            if not line.endswith(b"\n") or len(found) == at_most:
                break
            offset += len(line)
            with suppress(ValueError):  # the rest of a line that was cut off
                found.append(json.loads(line))
    return found, offset


def write_json(path: Path, record: Mapping[str, Any], *, by_many: bool = False) -> None:
    """Replace a JSON file as a whole; `by_many`: several processes may do so at a time."""
    write_text(path, _as_text(record), by_many=by_many)


def write_text(path: Path, text: str, *, by_many: bool = False) -> None:
    """Replace a file as a whole: written aside, flushed to disk, renamed into place."""
    with written_aside(path, by_many=by_many) as aside:
        _write_durably(aside, text)


def write_once(path: Path, record: Mapping[str, Any]) -> bool:
    """Write a JSON file whole if there is none; whether it was this call that did.

    It is on disk before it has its name: a machine that loses its power leaves no empty file.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_durably(aside, _as_text(record))
        os.link(aside, path)  # fails where rename would overwrite
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # whether the file is there is what counts
            aside.unlink()
    return True


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
