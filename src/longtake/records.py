"""Files that several processes read: written as a whole and renamed, or appended line by line.

Reading trusts nothing. A record is a type that pydantic validates (a TypedDict, a frozen dataclass,
or a `TypeAdapter`), and the package that owns a format declares its type:

    read_record(path, Manifest)     a JSON file: the record, or None if there is no file
    require_record(path, Manifest)  likewise; a missing file is an error
    read_records(path, Metrics)     a JSON lines file: its records; other lines are counted
    read_last_record(path, Metrics) the last of them
    read_records_on(...)            those that were appended since
    parse_record(data, Manifest)    bytes that are at hand already
    read_json(path)                 any JSON object; empty if there is none

All of them raise `RecordError`, with the path and one sentence, and never anything else. They read
regular files only (`open_regular`): a named pipe or a device would make a reader wait forever.
A line longer than `MAX_LINE_BYTES` or nested deeper than `MAX_LINE_DEPTH` is no record.

Types are validated strictly: 5.0 and "5" are no integers. The types below serve for fields; fields
that a TypedDict does not name are dropped, unless it is decorated with `@with_other_fields`.
"""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar, Union

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    with_config,
)

from longtake.aside import no_follow, written_aside
from longtake.errors import RecordError, RunError

MAX_LINE_BYTES: Final = 64 * 2**10
MAX_LINE_DEPTH: Final = 8
MAX_FILE_BYTES: Final = 256 * 2**20
MAX_FILE_DEPTH: Final = 32

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of steps, samples or bytes; a float holds it exactly."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Timestamp = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since 1970."""
NumberOrText = Finite | Literal["nan", "inf", "-inf"]
"""A float as `json_number` writes it, since JSON has finite numbers only."""


def is_file_name(text: str) -> bool:
    """Whether a text can name a file in a folder: it leads nowhere else, and has no NUL."""
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def _is_name(text: str) -> str:
    if not is_file_name(text):
        raise ValueError("expected a file name without a folder")
    return text


def _is_time(text: str) -> str:
    with suppress(ValueError, OverflowError):
        datetime.fromisoformat(text).timestamp()
        return text
    raise ValueError("expected a time such as 2026-05-01T12:00:00+00:00")


def _is_inside(text: str) -> str:
    if "\0" in text or text.startswith("/") or not {"", ".", ".."}.isdisjoint(text.split("/")):
        raise ValueError("expected a path to a file below the folder")
    return text


def format_number(number: int) -> Any:
    """The type of a field `format`: this number, or a sentence that says which it is."""

    def check(found: int) -> int:
        if found != number:
            raise ValueError(
                f"it has format {found}, and this longtake reads format {number}: use the "
                "longtake that wrote it"
            )
        return found

    return Annotated[int, AfterValidator(check)]


def _is_span(span: list[int]) -> list[int]:
    if span[0] > span[1]:
        raise ValueError(f"expected [first, end), got {span}")
    return span


Span = Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(_is_span)]
"""[first, end)"""
FileName = Annotated[str, Field(max_length=255), AfterValidator(_is_name)]
InnerPath = Annotated[str, Field(max_length=4096), AfterValidator(_is_inside)]
"""Of a file below a folder, such as a checkpoint's."""
Time = Annotated[str, Field(max_length=64), AfterValidator(_is_time)]
"""As `now` writes it."""

_T = TypeVar("_T")
Kind = type[_T] | TypeAdapter[_T]

with_other_fields: Final[Callable[[type[_T]], type[_T]]] = with_config(ConfigDict(extra="allow"))

_BEGINNINGS = {".png": (0, b"\x89PNG"), ".mp4": (4, b"ftyp")}
_BLOCK_BYTES = 2**18
_TAIL_BYTES, _MOST_TAIL_BYTES = 2**14, 2**26
_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_skipped: dict[Path, int] = {}


def by_field(name: str, kinds: Mapping[str, Any], other: Any) -> TypeAdapter[dict[str, Any]]:
    """The type of records, such as events, that depends on one of their fields.

    Args:
        name: of the field.
        kinds: types by the field's value.
        other: the type with any other value.
    """

    def tag(record: Any) -> str:
        value = record.get(name) if isinstance(record, dict) else None
        return value if isinstance(value, str) and value in kinds else ""

    tagged = [Annotated[kind, Tag(value)] for value, kind in {**kinds, "": other}.items()]
    union: Any = Annotated[Union[tuple(tagged)], Discriminator(tag)]  # noqa: UP007
    return TypeAdapter(union)


def now() -> str:
    """Wall-clock time for people to read, ISO 8601 in UTC; never subtracted from another."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def file_time() -> str:
    """Wall-clock time as a part of file names, in UTC."""
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S_%f")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; links are followed.

    Raises:
        OSError: it cannot be opened, or is a folder, a named pipe, a device or a socket.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "the name contains a NUL character", str(path))
    _refuse_irregular(path.stat().st_mode, path)  # a device may react to being opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _refuse_irregular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as `open_regular`; or the file has more than `max_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
        return file.read()


def is_missing(error: OSError) -> bool:
    """Whether an error says that there is no such file or folder."""
    return isinstance(error, FileNotFoundError | NotADirectoryError)


def read_record(path: Path, kind: Kind[_T], max_bytes: int = MAX_FILE_BYTES) -> _T | None:
    """The record in a JSON file; None if there is no file.

    Raises:
        RecordError: the file cannot be read, or holds no such record.
    """
    try:
        data = read_regular(path, max_bytes)
    except OSError as error:
        if is_missing(error):
            return None
        raise RecordError(path, error.strerror or str(error)) from error
    return parse_record(data, kind, path)


def require_record(path: Path, kind: Kind[_T], max_bytes: int = MAX_FILE_BYTES) -> _T:
    """The record in a JSON file.

    Raises:
        RecordError: there is no file, it cannot be read, or holds no such record.
    """
    found = read_record(path, kind, max_bytes)
    if found is None:
        raise RecordError(path, "there is no such file")
    return found


def parse_record(data: bytes, kind: Kind[_T], path: Path, max_depth: int = MAX_FILE_DEPTH) -> _T:
    """The record that JSON text holds; `path`: where it is from, for the error.

    Raises:
        RecordError: it holds no such record.
    """
    if is_nested_deeper(data, max_depth):
        raise RecordError(path, f"it is nested deeper than {max_depth} levels")
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def check_record(value: Any, kind: Kind[_T], path: Path) -> _T:
    """A value that was read from a file, if it is such a record.

    Raises:
        RecordError: it is none.
    """
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, or it cannot be read."""
    with suppress(RecordError):
        return read_record(path, dict[str, Any]) or {}
    return {}


def read_records(path: Path, kind: Kind[_T], max_line_bytes: int = MAX_LINE_BYTES) -> list[_T]:
    """The records of a JSON lines file, in its order; none if there is no file.

    A last line without a newline is still being written, and left out. Other lines that are no
    records are left out and counted: `skipped_lines`.

    Raises:
        RecordError: the file cannot be read.
    """
    found, num_skipped, validate = [], 0, _adapter(kind).validate_json
    for line in read_lines(path, max_line_bytes):
        if line:
            with suppress(ValidationError):
                found.append(validate(line, strict=True))
                continue
        num_skipped += line is None or bool(line.strip())
    _skipped[path] = num_skipped
    return found


def read_json_lines(path: Path) -> list[Any]:
    """As `read_records`, of any JSON objects."""
    return read_records(path, dict[str, Any])


def read_lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """The whole lines of a JSON lines file, without newlines; none if there is no file.

    None stands for a line that is too long or nested too deeply to be given to a JSON reader.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            yield from _lines(file, max_line_bytes)
    except OSError as error:
        if not is_missing(error):
            raise RecordError(path, error.strerror or str(error)) from error


def skipped_lines() -> list[str]:
    """A sentence for each file in which `read_records` has skipped lines, since the last call."""
    counts = [(path, count) for path, count in _skipped.items() if count]
    _skipped.clear()
    return [
        f"{path}: {count} lines are no records and were left out."
        if count > 1
        else f"{path}: 1 line is no record and was left out."
        for path, count in counts
    ]


def read_last_record(path: Path, kind: Kind[_T]) -> _T | None:
    """The last record of a JSON lines file, however long that is; None if there is none.

    Raises:
        RecordError: the file cannot be read.
    """
    validate = _adapter(kind).validate_json
    try:
        with open_regular(path) as file:
            reach, size = _TAIL_BYTES, file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, size - reach))
                lines = file.read(reach).splitlines(keepends=True)
                for line in reversed(lines[reach < size :]):  # the first may be a part of one
                    if line.endswith(b"\n") and _is_readable(line):
                        with suppress(ValidationError):
                            return validate(line, strict=True)
                if reach >= min(size, _MOST_TAIL_BYTES):
                    return None
                reach *= 8
    except OSError as error:
        if is_missing(error):
            return None
        raise RecordError(path, error.strerror or str(error)) from error


def read_records_on(path: Path, kind: Kind[_T], offset: int, at_most: int) -> tuple[list[_T], int]:
    """The next records of a JSON lines file, and the byte after them.

    Args:
        path: of the file.
        kind: type of the records; lines that are none are passed over.
        offset: the byte to read on from; of a shorter file, which is another one, all is read.
        at_most: so many records; the rest is for the next time.

    Raises:
        OSError: it cannot be read.
    """
    found: list[_T] = []
    validate = _adapter(kind).validate_json
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size == offset:
            return found, offset
        offset = file.seek(offset if offset < size else 0)
        while len(found) < at_most:
            line, length = _next_line(file)
            if not length:
                break
            offset += length
            if line and _is_readable(line):
                with suppress(ValidationError):
                    found.append(validate(line, strict=True))
    return found, offset


def is_nested_deeper(data: bytes, max_depth: int) -> bool:
    """Whether JSON text has arrays and objects in each other at more than so many levels."""
    if data.count(b"[") + data.count(b"{") <= max_depth:
        return False
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


def _refuse_irregular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _TYPES.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    rest, is_too_long = b"", False
    while block := file.read(_BLOCK_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line if _is_readable(line, max_bytes) and not is_too_long else None
            is_too_long = False
        if len(rest) > max_bytes:
            rest, is_too_long = b"", True


def _next_line(file: BinaryIO) -> tuple[bytes, int]:
    """The next whole line and its length; empty if it is too long; (b"", 0): there is none."""
    line = file.readline(MAX_LINE_BYTES + 1)
    length, piece = len(line), line
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(_BLOCK_BYTES)
        length += len(piece)
        line = b""
    return (line, length) if piece else (b"", 0)


def _is_readable(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> bool:
    return len(line) <= max_bytes and not is_nested_deeper(line, MAX_LINE_DEPTH)


def _adapter(kind: Kind[_T]) -> TypeAdapter[_T]:
    return kind if isinstance(kind, TypeAdapter) else _adapter_of(kind)  # type: ignore[arg-type]


@cache
def _adapter_of(kind: type[_T]) -> TypeAdapter[_T]:
    return TypeAdapter(kind)


def _reason(error: ValidationError) -> str:
    """What is wrong with a record, such as: launches.0.host: Field required."""
    errors = error.errors(include_url=False, include_input=False)
    # Another format explains whatever else is wrong.
    first = next((each for each in errors if each["loc"] == ("format",)), errors[0])
    if first["loc"] == ("format",) and first["type"] == "missing":
        return "it has no format number, since an older longtake wrote it: begin a new run"
    place = ".".join(map(str, first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    return f"{place[:200]}: {text}" if place and place != "format" else text


def append_json(path: Path, record: Mapping[str, Any], *, durably: bool = False) -> None:
    """Append a record as one line, after ending a line that an interrupted write left half.

    `durably`: it is on disk, and not only on its way, when this returns.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with open(path, "ab+", opener=no_follow) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        if durably:
            file.flush()
            os.fsync(file.fileno())


def write_json(path: Path, record: Mapping[str, Any], *, by_many: bool = False) -> None:
    """Replace a JSON file as a whole; `by_many`: several processes may do so at a time."""
    write_text(path, _as_text(record), by_many=by_many)


def write_text(path: Path, text: str, *, by_many: bool = False) -> None:
    """Replace a file as a whole: written aside, flushed to disk, renamed into place."""
    with written_aside(path, by_many=by_many) as aside:
        _write_durably(aside, text, path)


def write_once(path: Path, record: Mapping[str, Any]) -> bool:
    """Write a JSON file whole if there is none; whether it was this call that did.

    It is on disk before it has its name: a machine that loses its power leaves no empty file.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_durably(aside, _as_text(record), path)
        os.link(aside, path)  # fails where rename would overwrite
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # whether the file is there is what counts
            aside.unlink()
    return True


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _write_durably(path: Path, text: str, whole: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:  # never through a link
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # a full disk is told of no file
            error.filename = str(whole)
        raise


def check_picture_name(out: Path, suffixes: Sequence[str] = (".png",)) -> None:
    """Refuse a picture or video to write (`--out`) whose name means something else.

    Raises:
        RunError: the name ends otherwise, or is that of a folder, a device or another kind of file.
    """
    wanted = " or ".join(f"name{suffix}" for suffix in suffixes)
    suffix = out.suffix.lower()
    if suffix not in suffixes:
        raise RunError(f"--out {str(out)[:200]}: expected a file name such as {wanted}.")
    try:
        mode = out.stat().st_mode
        is_alike = stat.S_ISREG(mode) and _begins_alike(out, suffix)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"--out {str(out)[:200]} cannot be written: {why}. Choose another folder."
        ) from error
    if not is_alike:
        raise RunError(
            f"--out {out} is there already, and is no {suffix} file. It was not overwritten; "
            "choose another name."
        )


def _begins_alike(path: Path, suffix: str) -> bool:
    start, beginning = _BEGINNINGS[suffix]
    with open_regular(path) as file:
        data = file.read(start + len(beginning))
    return not data or data[start:] == beginning
