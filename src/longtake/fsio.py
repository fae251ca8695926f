"""Reads and writes files that several processes share: atomic writes, JSON lines, typed records.

Files are written beside their place and renamed, or appended line by line. Readers trust nothing:
only regular files are read, lines and nesting are limited, and pydantic validates every record.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, BinaryIO, Final, Generic, Literal, Self, TypeVar, Union

import pydantic

from longtake.errors import DataError, RecordError, RunError

MAX_LINE_BYTES: Final = 64 * 2**10
MAX_LINE_DEPTH: Final = 8
MAX_FILE_BYTES: Final = 256 * 2**20
MAX_FILE_DEPTH: Final = 32
CACHE_MARK: Final = "longtake_cache.json"
"""The file that marks the folder of a cache."""

_IS_LINK = "it is a symbolic link; links are not followed when writing"
_PICTURE_STARTS = {
    ".png": (0, b"\x89PNG"),
    ".mp4": (4, b"ftyp"),
    ".html": (0, b"<!doctype html>"),
}  # offset and bytes
_BLOCK_BYTES = 2**18
_TAIL_BYTES, _MAX_TAIL_BYTES = 2**14, 2**26
_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_only_below: ContextVar[Path | None] = ContextVar("only_below", default=None)
_num_skipped: dict[Path, int] = {}


# --- Types of fields --------------------------------------------------------------------------
# A record is a TypedDict, a frozen dataclass or a `TypeAdapter`; the package that owns a format
# declares its type. Validation is strict: 5.0 and "5" are not integers. Fields that a TypedDict
# does not name are dropped, unless it is decorated with `@with_other_fields`.

_T = TypeVar("_T")
Kind = type[_T] | pydantic.TypeAdapter[_T]

with_other_fields: Final[Callable[[type[_T]], type[_T]]] = pydantic.with_config(
    pydantic.ConfigDict(extra="allow")
)


def is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def _check_name(text: str) -> str:
    if not is_file_name(text):
        raise ValueError("expected a file name without a folder")
    return text


def _check_time(text: str) -> str:
    with suppress(ValueError, OverflowError):
        datetime.fromisoformat(text).timestamp()
        return text
    raise ValueError("expected a time such as 2026-05-01T12:00:00+00:00")


def _check_inner_path(text: str) -> str:
    if "\0" in text or text.startswith("/") or not {"", ".", ".."}.isdisjoint(text.split("/")):
        raise ValueError("expected a path to a file below the folder")
    return text


def _check_span(span: list[int]) -> list[int]:
    if span[0] > span[1]:
        raise ValueError(f"expected [first, end), got {span}")
    return span


Count = Annotated[int, pydantic.Field(ge=0, le=2**53)]
"""A number of steps, samples or bytes; a float holds it exactly."""
Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Timestamp = Annotated[float, pydantic.Field(ge=0, le=1e11)]
"""Seconds since 1970."""
NumberOrText = Finite | Literal["nan", "inf", "-inf"]
"""A float as `json_number` writes it, since JSON has finite numbers only."""
Span = Annotated[
    list[Count], pydantic.Field(min_length=2, max_length=2), pydantic.AfterValidator(_check_span)
]
"""[first, end)"""
FileName = Annotated[str, pydantic.Field(max_length=255), pydantic.AfterValidator(_check_name)]
InnerPath = Annotated[
    str, pydantic.Field(max_length=4096), pydantic.AfterValidator(_check_inner_path)
]
"""Of a file below a folder, such as a checkpoint's."""
Time = Annotated[str, pydantic.Field(max_length=64), pydantic.AfterValidator(_check_time)]
"""As `now` writes it."""


def format_number(number: int) -> Any:
    """The type of a field `format` that accepts this number only."""

    def check(found: int) -> int:
        if found != number:
            raise ValueError(
                f"it has format {found}, and this longtake reads format {number}: use the "
                "longtake that wrote it"
            )
        return found

    return Annotated[int, pydantic.AfterValidator(check)]


def by_field(
    name: str, kinds: Mapping[str, Any], other: Any
) -> pydantic.TypeAdapter[dict[str, Any]]:
    """The type of records, such as events, whose type depends on the value of one field.

    With a value that `kinds` does not have, it is `other`.
    """

    def tag(record: Any) -> str:
        value = record.get(name) if isinstance(record, dict) else None
        return value if isinstance(value, str) and value in kinds else ""

    tagged = [Annotated[kind, pydantic.Tag(value)] for value, kind in {**kinds, "": other}.items()]
    union: Any = Annotated[Union[tuple(tagged)], pydantic.Discriminator(tag)]  # noqa: UP007
    return pydantic.TypeAdapter(union)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def file_time() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%S_%f")


# --- Writing ----------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path, *, by_many: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` to write to, and rename it to `path` when the block succeeds.

    Nothing half-written is left, and an existing file stays until the new one is complete. The
    name begins with a dot and keeps the suffix, by which some libraries choose a format.

    `by_many`: several processes may write it at a time, so that each takes a unique name. With one
    writer, the next write overwrites what a killed one left.

    Raises:
        OSError: it cannot be renamed.
    """
    partial = partial_path(path, f".{secrets.token_hex(4)}" if by_many else "")
    partial.unlink(missing_ok=True)  # left by a writer that was killed; or a link to another file
    try:
        yield partial
        if partial.is_symlink():
            raise OSError(errno.ELOOP, _IS_LINK, str(partial))
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """`atomic_write` of a folder, which is made; the block fills it.

    Raises:
        OSError: it cannot be made or renamed, or `path` is a folder with files.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove_tree(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(path)
    finally:
        remove_tree(partial)


def partial_path(path: Path, unique: str = "") -> Path:
    return path.with_name(f".{path.stem}{unique}.partial{path.suffix}")


def append_json(path: Path, record: Mapping[str, Any], *, durably: bool = False) -> None:
    """Append a record as one line, after ending a line that an interrupted write left half.

    `durably`: return when it is on disk.

    Raises:
        OSError: it cannot be written, or `path` is a link.
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
    write_text(path, _as_text(record), by_many=by_many)


def write_text(path: Path, text: str, *, by_many: bool = False) -> None:
    with atomic_write(path, by_many=by_many) as partial:
        _write_durably(partial, text, path)


def write_once(path: Path, record: Mapping[str, Any]) -> bool:
    """Create a JSON file unless there is one; whether this call created it.

    It is on disk before it has its name: a machine that loses its power leaves no empty file.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_durably(partial, _as_text(record), path)
        os.link(partial, path)  # fails where rename would overwrite
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # whether the file is there is what counts
            partial.unlink()
    return True


def _as_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


def _write_durably(partial: Path, text: str, path: Path) -> None:
    try:
        with partial.open("x", encoding="utf-8") as file:  # never through a link
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # the error of a full disk names no file
            error.filename = str(path)
        raise


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, so that they survive a power cut.

    Raises:
        OSError: it cannot be opened or flushed; a disk that cannot flush folders is no error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot
            raise
    finally:
        os.close(descriptor)


def no_follow(path: str, flags: int) -> int:
    """An `opener` for `open` that does not follow a link of this name.

    Raises:
        OSError: the path is a link, or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _IS_LINK, path) from None
        raise


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it, if possible; of a link, only the link."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_oldest(folder: Path, num_kept: int) -> None:
    """Remove the oldest files of a folder of a cache, if there are more; OSError: it cannot be."""
    with os.scandir(folder) as entries:
        by_age = sorted((each.stat().st_mtime, each.path) for each in entries)
    for _, path in by_age[:-num_kept]:
        Path(path).unlink(missing_ok=True)


def is_linked(path: Path, top: Path) -> bool:
    return any(each.is_symlink() for each in (path, *path.parents) if each.is_relative_to(top))


def make_writable(folder: Path) -> None:
    """Make a folder if it does not exist, and write a temporary file in it.

    Raises:
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def claim_folder(folder: Path, names: Sequence[str] = ()) -> None:
    """Make the folder of a cache and mark it as longtake's, or find the mark.

    Files of others may have the names that a cache uses. So a folder without a mark that holds
    anything is refused before anything in it is overwritten or removed.

    Args:
        folder: of the cache; it may be reached by a link.
        names: of what the cache keeps in it, which may be no links.

    Raises:
        DataError: it holds files and no mark, or one of `names` is a link.
        OSError: a folder without a mark cannot be made or written to.
    """
    refuse_links(folder, (CACHE_MARK, *names))
    if is_there(folder / CACHE_MARK):
        return
    make_writable(folder)
    found = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    if found and not is_there(folder / CACHE_MARK):  # another process may have marked it
        raise DataError(
            f"{folder} is no cache of longtake: it has no file {CACHE_MARK}, and holds "
            f"{found[0][:200]!r}. Nothing in it was changed; name an empty or a new folder."
        )
    write_once(folder / CACHE_MARK, {"made_by": "longtake"})


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse links in a folder whose files longtake removes or writes to.

    Raises:
        DataError: one of the names is that of a link.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise DataError(
                f"{folder / name} is a symbolic link, which is not followed in a cache. Remove it, "
                "or choose another folder for the cache."
            )


def is_there(path: Path | str) -> bool:
    """Whether a file or folder exists; False if the name is impossible or forbidden."""
    try:
        os.stat(path)  # noqa: PTH116 - millions of times: a Path would take longer than the call
    except (OSError, ValueError):  # such as a name of more than 255 letters, or with a NUL
        return False
    return True


def check_picture_name(out: Path, suffixes: Sequence[str] = (".png",)) -> None:
    """Refuse a path for a picture or video (`--out`) that has another suffix or holds other data.

    Raises:
        RunError: the name ends otherwise, or is that of a folder, a device or another kind of file.
    """
    wanted = " or ".join(f"name{suffix}" for suffix in suffixes)
    suffix = out.suffix.lower()
    if suffix not in suffixes:
        raise RunError(f"--out {str(out)[:200]}: expected a file name such as {wanted}.")
    try:
        mode = out.stat().st_mode
        is_alike = stat.S_ISREG(mode) and _starts_like(out, suffix)
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


def _starts_like(path: Path, suffix: str) -> bool:
    start, expected = _PICTURE_STARTS[suffix]
    with open_regular(path) as file:
        data = file.read(start + len(expected))
    return not data or data[start:] == expected


# --- Reading ----------------------------------------------------------------------------------


@contextmanager
def reading_below(top: Path) -> Iterator[None]:
    """Within it `open_regular` opens files below a folder only, and follows no links there.

    Files in `cache_folder` are opened too: they are this program's own.
    """
    token = _only_below.set(top)
    try:
        yield
    finally:
        _only_below.reset(token)


def cache_folder() -> Path:
    """Longtake's in the user's cache folder.

    Raises:
        RuntimeError: the user has no home.
    """
    top = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(top) if top.startswith("/") else Path.home() / ".cache") / "longtake"


def _is_cached(path: Path) -> bool:
    with suppress(RuntimeError):
        return path.is_relative_to(cache_folder()) and ".." not in path.parts
    return False


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read; links are followed, except within `reading_below`.

    A named pipe or a device would make a reader wait forever.

    Raises:
        OSError: it cannot be opened, or is a folder, a named pipe, a device or a socket.
    """
    top = _only_below.get()
    if top is not None and not _is_cached(path):
        if not path.is_relative_to(top):
            raise OSError(errno.EACCES, f"it is not in {top}", str(path))
        return open_below(top, str(path.relative_to(top)))
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "the name contains a NUL character", str(path))
    _refuse_irregular(path.stat().st_mode, path)  # a device may react to being opened
    descriptor = os.open(path, _READING)
    return _opened(descriptor, path)


def open_below(top: Path, name: str) -> BufferedReader:
    """Open a regular file by its path below a folder; no part of the path may be a link.

    Each part is opened from the one before it, so that a link that is made meanwhile is not
    followed either. `top` itself may be reached by links.

    Raises:
        OSError: as `open_regular`.
    """
    path, parts = top / name, PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise OSError(errno.EACCES, "it is not below the folder", str(path))
    with open_folder_below(top, parts[:-1]) as folder:
        _refuse_irregular(os.lstat(parts[-1], dir_fd=folder).st_mode, path)
        descriptor = os.open(parts[-1], _READING | os.O_NOFOLLOW, dir_fd=folder)
    return _opened(descriptor, path)


@contextmanager
def open_folder_below(top: Path, parts: Sequence[str]) -> Iterator[int]:
    """The descriptor of a folder, of whose path below `top` no part is a link.

    Raises:
        OSError: there is none.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folder = os.open(top, flags)
    try:
        for part in parts:
            if stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                raise OSError(errno.ELOOP, f"{part} is a symbolic link", str(top.joinpath(*parts)))
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _opened(descriptor: int, path: Path) -> BufferedReader:
    try:
        _refuse_irregular(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_irregular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _FILE_TYPES.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


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
    """`read_record` for a file that must exist.

    Raises:
        RecordError: there is no file, it cannot be read, or holds no such record.
    """
    found = read_record(path, kind, max_bytes)
    if found is None:
        raise RecordError(path, "there is no such file")
    return found


def parse_record(data: bytes, kind: Kind[_T], path: Path, max_depth: int = MAX_FILE_DEPTH) -> _T:
    """The record in JSON text; `path` is for the error.

    Raises:
        RecordError: it is no such record.
    """
    if is_nested_deeper(data, max_depth):
        raise RecordError(path, f"it is nested deeper than {max_depth} levels")
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except pydantic.ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def check_record(value: Any, kind: Kind[_T], path: Path) -> _T:
    """A value that was read from a file, as a record.

    Raises:
        RecordError: it is no such record.
    """
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        raise RecordError(path, _reason(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    with suppress(RecordError):
        return read_record(path, dict[str, Any]) or {}
    return {}


def read_records(path: Path, kind: Kind[_T], max_line_bytes: int = MAX_LINE_BYTES) -> list[_T]:
    """The records of a JSON lines file, in its order; none if there is no file.

    A last line without a newline is still being written, and left out. Other lines that are not
    records are left out and counted; see `skipped_lines`.

    Raises:
        RecordError: the file cannot be read.
    """
    return list(_records(read_lines(path, max_line_bytes), kind, path))


def _records(lines: Iterable[bytes | None], kind: Kind[_T], path: Path) -> Iterator[_T]:
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
    """The complete lines of a JSON lines file, without newlines; none if there is no file.

    None stands for a line that is too long or nested too deeply to be given to a JSON reader.

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
    _num_skipped[path] = num_skipped


def skipped_lines() -> list[str]:
    """A sentence for each file in which `read_records` has skipped lines, since the last call."""
    counts = [(path, count) for path, count in _num_skipped.items() if count]
    _num_skipped.clear()
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
                        with suppress(pydantic.ValidationError):
                            return validate(line, strict=True)
                if reach >= min(size, _MAX_TAIL_BYTES):
                    return None
                reach *= 8
    except OSError as error:
        if is_missing(error):
            return None
        raise RecordError(path, error.strerror or str(error)) from error


def read_new_records(
    path: Path, kind: Kind[_T], offset: int, limit: int = sys.maxsize
) -> tuple[list[_T], int]:
    """At most `limit` records from the byte `offset` on, and the byte after them.

    Lines that are not records are left out. A file shorter than `offset` is another one, and is
    read from its start.

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
    """Follows a JSON lines file that grows: no line is read twice.

    A file that was replaced or shortened is read from its start.
    """

    def __init__(self, path: Path, kind: Kind[_T], offset: int = 0) -> None:
        self.offset = offset  # the byte up to which it was read
        self.has_restarted = False  # the last `read` began at the start, or there was no file
        self._path, self._kind = path, kind
        self._inode: int | None = None

    def read(self, limit: int = sys.maxsize) -> list[_T]:
        """At most `limit` records that were appended since the last call.

        Raises:
            OSError: the file cannot be read; that there is none is no error.
        """
        try:
            status = self._path.stat()
            is_same = self._inode in (None, status.st_ino) and status.st_size >= self.offset
            if is_same and status.st_size == self.offset:
                found: list[_T] = []
            else:
                start = self.offset if is_same else 0
                found, self.offset = read_new_records(self._path, self._kind, start, limit)
            self._inode, self.has_restarted = status.st_ino, not is_same
        except FileNotFoundError:
            found, self.offset, self._inode, self.has_restarted = [], 0, None, True
        return found


class Journal(Generic[_T]):
    """JSON lines about a result that is being made: an interrupted command resumes from them.

    Each item is safe from this process's end as soon as it was added. `remove` it once the result
    is written. Items under another header, which is all that they follow from, are not used.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind[_T],
        *,
        header: Mapping[str, str] | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._path, self._kind, self._max_line_bytes = path, kind, max_line_bytes
        self._header = None if header is None else dict(header)
        self._file: IO[str] | None = None

    def read(self) -> list[_T]:
        """The items that an interrupted command has finished."""
        return list(self.entries())

    def entries(self) -> Iterator[_T]:
        """The same, read as they are needed."""
        lines = read_lines(self._path, self._max_line_bytes)
        if self._header is not None:
            first = next(filter(None, lines), b"{}")
            if list(_records([first], dict[str, Any], self._path)) != [self._header]:
                self._path.unlink(missing_ok=True)
                return
        yield from _records(lines, self._kind, self._path)

    def add(self, item: Mapping[str, Any] | Sequence[Any]) -> None:
        """Append an item.

        Raises:
            DataError: it cannot be written.
        """
        try:
            if self._file is None:
                self._file = self._begin()
            self._file.write(json.dumps(item) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written: {error.strerror or error}. Make room or make it "
                "writable, and run the same command again: it resumes from what is written."
            ) from error

    def close(self) -> None:
        """Leave the file for the next command."""
        if self._file is not None:
            with suppress(OSError):  # what is not written by now was raised as an error
                self._file.close()
            self._file = None

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> IO[str]:
        is_new = not self._path.exists()
        file = open(self._path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115 - kept
        # A newline in case the last line was cut off.
        file.write(f"{json.dumps(self._header)}\n" if is_new and self._header is not None else "\n")
        return file


def is_nested_deeper(data: bytes, max_depth: int) -> bool:
    """Whether JSON text has arrays and objects nested at more than so many levels."""
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


def _split_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    rest, is_too_long = b"", False
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line if _is_readable(line, max_bytes) and not is_too_long else None
            is_too_long = False
        if len(rest) > max_bytes:
            rest, is_too_long = b"", True


def _next_line(file: BinaryIO) -> tuple[bytes, int]:
    """The next complete line and its length; empty if it is too long; (b"", 0): there is none."""
    line = file.readline(MAX_LINE_BYTES + 1)
    length, piece = len(line), line
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(_BLOCK_BYTES)
        length += len(piece)
        line = b""
    return (line, length) if piece else (b"", 0)


def _is_readable(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> bool:
    return len(line) <= max_bytes and not is_nested_deeper(line, MAX_LINE_DEPTH)


def _adapter(kind: Kind[_T]) -> pydantic.TypeAdapter[_T]:
    return kind if isinstance(kind, pydantic.TypeAdapter) else _adapter_of(kind)  # type: ignore[arg-type]


@cache
def _adapter_of(kind: type[_T]) -> pydantic.TypeAdapter[_T]:
    return pydantic.TypeAdapter(kind)


def _reason(error: pydantic.ValidationError) -> str:
    """What is wrong with a record, such as: launches.0.host: Field required."""
    errors = error.errors(include_url=False, include_input=False)
    # Another format explains whatever else is wrong.
    first = next((each for each in errors if each["loc"] == ("format",)), errors[0])
    if first["loc"] == ("format",) and first["type"] == "missing":
        return "it has no format number, since an older longtake wrote it: begin a new run"
    place = ".".join(map(str, first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    return f"{place[:200]}: {text}" if place and place != "format" else text
