"""Reading of typed records from JSON files and JSON lines.

Readers trust nothing: lines and nesting are limited, and pydantic validates every record.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, TypeVar

import pydantic

from longtake.errors import RecordError
from longtake.fsio.opening import MAX_FILE_BYTES, is_missing, open_regular, read_regular

MAX_LINE_BYTES: Final = 64 * 2**10
MAX_LINE_DEPTH: Final = 8
MAX_FILE_DEPTH: Final = 32
_BLOCK_BYTES = 2**18
_TAIL_BYTES, _MAX_TAIL_BYTES = 2**14, 2**26
# A string, an opening or a closing bracket. The closing quote is optional, so that brackets in a
# string that was cut off do not count either.
_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_num_skipped: dict[Path, int] = {}  # skipped lines by file since the last `skipped_lines`
_T = TypeVar("_T")
Kind = type[_T] | pydantic.TypeAdapter[_T]


def read_record(path: Path, kind: Kind[_T], max_bytes: int = MAX_FILE_BYTES) -> _T | None:
    """Read the record in a JSON file; None: there is no file.

    Raises:
        RecordError: the file cannot be read, or its content is not such a record.
    """
    try:
        data = read_regular(path, max_bytes)
    except OSError as error:
        if is_missing(error):
            return None
        raise RecordError(path, error.strerror or str(error)) from error
    return parse_record(data, kind, path)


def require_record(path: Path, kind: Kind[_T], max_bytes: int = MAX_FILE_BYTES) -> _T:
    """Read the record in a JSON file that must exist.

    Raises:
        RecordError: the file is missing, cannot be read, or its content is not such a record.
    """
    found = read_record(path, kind, max_bytes)
    if found is None:
        raise RecordError(path, "there is no such file")
    return found


def parse_record(data: bytes, kind: Kind[_T], path: Path, max_depth: int = MAX_FILE_DEPTH) -> _T:
    """Parse and validate JSON text as a record; error messages name `path`.

    Raises:
        RecordError: the text is not such a record, or nested too deeply.
    """
    if is_nested_deeper(data, max_depth):
        raise RecordError(path, f"it is nested deeper than {max_depth} levels")
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def check_record(value: Any, kind: Kind[_T], path: Path) -> _T:
    """Validate a value that was read from `path` as a record, and return it.

    Raises:
        RecordError: the value is not such a record.
    """
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file cannot be read as such."""
    with suppress(RecordError):
        return read_record(path, dict[str, Any]) or {}
    return {}


def read_records(path: Path, kind: Kind[_T], max_line_bytes: int = MAX_LINE_BYTES) -> list[_T]:
    """Read the records of a JSON lines file, in order; an empty list if there is no file.

    A last line without a newline is still being written and left out. Other lines that are not
    records are left out and counted; see `skipped_lines`.

    Raises:
        RecordError: the file cannot be read.
    """
    return list(validate_lines(read_lines(path, max_line_bytes), kind, path))


def validate_lines(lines: Iterable[bytes | None], kind: Kind[_T], path: Path) -> Iterator[_T]:
    """Yield the lines of a file that are valid records; count others for `skipped_lines`."""
    num_skipped, validate = 0, _adapter(kind).validate_json
    for line in lines:
        try:
            if line:
                yield validate(line, strict=True)
                continue
        except pydantic.ValidationError:
            pass
        num_skipped += line is None or bool(line.strip())
    _num_skipped[path] = num_skipped


def read_json_lines(path: Path) -> list[Any]:
    return read_records(path, dict[str, Any])


def read_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield the complete lines of a JSON lines file, without newlines; nothing if it is missing.

    None stands for a line that is too long or too deeply nested to be parsed as JSON.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            yield from _split_lines(file, max_line_bytes)
    except OSError as error:
        if not is_missing(error):
            raise RecordError(path, error.strerror or str(error)) from error


def note_skipped_lines(path: Path, num_skipped: int) -> None:
    """Record the number of lines of a file that were not records, for `skipped_lines`."""
    _num_skipped[path] = num_skipped


def skipped_lines() -> list[str]:
    """Return a sentence for each file in which lines were skipped since the last call."""
    counts = [(path, count) for path, count in _num_skipped.items() if count]
    _num_skipped.clear()
    return [
        f"{path}: {count} lines are no records and were left out."
        if count > 1
        else f"{path}: 1 line is no record and was left out."
        for path, count in counts
    ]


def read_last_record(path: Path, kind: Kind[_T]) -> _T | None:
    """Read the last record of a JSON lines file from its end; None: it has no record.

    The time does not depend on the length of the file. At most its last 64 MiB are searched.

    Raises:
        RecordError: the file cannot be read.
    """
    validate = _adapter(kind).validate_json
    try:
        with open_regular(path) as file:
            # Read a longer and longer tail until it contains a record.
            reach, size = _TAIL_BYTES, file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, size - reach))
                lines = file.read(reach).splitlines(keepends=True)
                for line in reversed(lines[reach < size :]):  # the first may be half a line
                    if line.endswith(b"\n") and _is_readable(line):
                        with suppress(pydantic.ValidationError):
                            return validate(line, strict=True)
                if reach >= min(size, _MAX_TAIL_BYTES):
                    return None
                # Eightfold: all reads together take hardly more than the last one.
                reach *= 8
    except OSError as error:
        if is_missing(error):
            return None
        raise RecordError(path, error.strerror or str(error)) from error


def read_new_records(
    path: Path, kind: Kind[_T], offset: int, limit: int = sys.maxsize
) -> tuple[list[_T], int]:
    """Read at most `limit` records of a JSON lines file from byte `offset` on.

    Lines that are not records are left out. A file shorter than `offset` was replaced, and is read
    from its start.

    Returns:
        The records, and the offset at which to continue.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[_T] = []
    validate = _adapter(kind).validate_json
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size == offset:
            return found, offset
        offset = file.seek(offset if offset < size else 0)
        while len(found) < limit:
            line, length = _next_line(file)
            if not length:
                break
            offset += length
            if line and _is_readable(line):
                with suppress(pydantic.ValidationError):
                    found.append(validate(line, strict=True))
    return found, offset


class Tail(Generic[_T]):
    """Follows a growing JSON lines file: each call of `read` returns the new records.

    A file that was replaced or shortened is read from its start.
    """

    def __init__(self, path: Path, kind: Kind[_T], offset: int = 0) -> None:
        self.offset = offset  # the byte up to which the file was read
        self.has_restarted = False  # the last `read` began at the start, or there was no file
        self._path, self._kind = path, kind
        self._inode: int | None = None

    def read(self, limit: int = sys.maxsize) -> list[_T]:
        """Return at most `limit` records that were appended since the last call.

        Raises:
            OSError: the file cannot be read; a missing file is no error.
        """
        try:
            status = self._path.stat()
            is_same = self._inode in (None, status.st_ino) and status.st_size >= self.offset
            # Usually nothing is new: then a stat is enough, and the file is not opened.
            if is_same and status.st_size == self.offset:
                found: list[_T] = []
            else:
                start = self.offset if is_same else 0
                found, self.offset = read_new_records(self._path, self._kind, start, limit)
            # The inode from before the file was opened: if the file is replaced in between, the
            # next call finds another inode and starts again, instead of missing the first records.
            self._inode, self.has_restarted = status.st_ino, not is_same
        except FileNotFoundError:
            found, self.offset, self._inode, self.has_restarted = [], 0, None, True
        return found


def is_nested_deeper(data: bytes, max_depth: int) -> bool:
    """Return True if arrays and objects in JSON text are nested deeper than `max_depth` levels."""
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
    # The pattern matches whole strings, so brackets inside of strings do not count.
    depth = 0
    for mark in _MARK.finditer(data):
        first = data[mark.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _split_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    rest, is_too_long = b"", False
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line if _is_readable(line, max_bytes) and not is_too_long else None
            is_too_long = False
        # Memory stays bounded even for a file that is one endless line.
        if len(rest) > max_bytes:
            rest, is_too_long = b"", True


def _next_line(file: BinaryIO) -> tuple[bytes, int]:
    """Read the next complete line and its length in bytes.

    A line that is too long is returned empty, with its length; (b"", 0): there is no line.
    """
    line = file.readline(MAX_LINE_BYTES + 1)
    length, piece = len(line), line
    while piece and not piece.endswith(b"\n"):
        # Read in pieces and dropped, so that an endless line does not fill the memory.
        piece = file.readline(_BLOCK_BYTES)
        length += len(piece)
        line = b""
    return (line, length) if piece else (b"", 0)


def _is_readable(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> bool:
    return len(line) <= max_bytes and not is_nested_deeper(line, MAX_LINE_DEPTH)


def _adapter(kind: Kind[_T]) -> pydantic.TypeAdapter[_T]:
    return kind if isinstance(kind, pydantic.TypeAdapter) else _adapter_of(kind)  # type: ignore[arg-type]


# Building a validator takes far longer than validating a record, so there is one for each type.
@cache
def _adapter_of(kind: type[_T]) -> pydantic.TypeAdapter[_T]:
    return pydantic.TypeAdapter(kind)


def _reason(error: pydantic.ValidationError) -> str:
    """Return the first reason why a record is invalid, such as launches.0.host: Field required."""
    errors = error.errors(include_url=False, include_input=False)
    # A wrong format number is the cause of all other errors, so it is reported first.
    first = next((each for each in errors if each["loc"] == ("format",)), errors[0])
    if first["loc"] == ("format",) and first["type"] == "missing":
        return "it has no format number, since an older longtake wrote it: begin a new run"
    place = ".".join(map(str, first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    return f"{place[:200]}: {text}" if place and place != "format" else text
