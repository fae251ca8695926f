"""Atomic and appending writes of files, never through a symbolic link."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longtake.errors import RunError
from longtake.fsio.opening import open_regular

_IS_LINK = "it is a symbolic link; links are not followed when writing"
_PICTURE_STARTS = {
    ".png": (0, b"\x89PNG"),
    ".mp4": (4, b"ftyp"),
    ".html": (0, b"<!doctype html>"),
}  # offset and bytes that tell the kind of a file


@contextmanager
def atomic_write(path: Path, *, by_many: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when the block succeeds.

    Nothing half-written is left, and an existing file stays until the new one is complete. The
    temporary name begins with a dot and keeps the suffix, by which some libraries choose a format.

    Args:
        path: the file to create or replace.
        by_many: several processes may write it at the same time, so the temporary name is unique.
            With a single writer the name is fixed, and the next write removes the remains of a
            writer that was killed.

    Raises:
        OSError: the file cannot be renamed.
    """
    partial = partial_path(path, f".{secrets.token_hex(4)}" if by_many else "")
    partial.unlink(missing_ok=True)  # left by a writer that was killed; or a link to another file
    try:
        yield partial
        # Somebody may have replaced the file by a link, which would then get the final name.
        if partial.is_symlink():
            raise OSError(errno.ELOOP, _IS_LINK, str(partial))
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def partial_path(path: Path, unique: str = "") -> Path:
    return path.with_name(f".{path.stem}{unique}.partial{path.suffix}")


def append_json(path: Path, record: Mapping[str, Any], *, durably: bool = False) -> None:
    """Append a record to a file of JSON lines.

    If an interrupted write has left half a line, that line is ended first.

    Args:
        path: the file of JSON lines.
        record: the record.
        durably: flush the file to disk before returning.

    Raises:
        OSError: the file cannot be written, or `path` is a symbolic link.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with open(path, "ab+", opener=no_follow) as file:
        # Mode "a" opens at the end of the file: 0 means that the file is empty.
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
    """Write a text file that is on disk before it has its name; see `atomic_write`."""
    with atomic_write(path, by_many=by_many) as partial:
        _write_durably(partial, text, path)


def write_once(path: Path, record: Mapping[str, Any]) -> bool:
    """Create a JSON file unless it exists, and return True if this call created it.

    The content is on disk before the file has its name, so a power failure leaves no empty file.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    # A unique name, as several processes may try to create the file at the same time.
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_durably(partial, _as_text(record), path)
        os.link(partial, path)  # fails where rename would overwrite
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):  # the link exists; a leftover temporary file does no harm
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
        OSError: the file cannot be opened or flushed. File systems that cannot flush folders are
            ignored.
    """
    # A folder can only be opened for reading, and fsync accepts such a descriptor of a file too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot
            raise
    finally:
        os.close(descriptor)


def no_follow(path: str, flags: int) -> int:
    """Open a path without following a symbolic link; pass this function to `open` as `opener`.

    Raises:
        OSError: the path is a symbolic link, or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # The system would say "Too many levels of symbolic links", though there is one.
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _IS_LINK, path) from None
        raise


def is_there(path: Path | str) -> bool:
    """Return True if a file or folder exists; False also for an invalid or unreadable path."""
    try:
        os.stat(path)  # noqa: PTH116 - millions of times: a Path would take longer than the call
    except (OSError, ValueError):  # such as a name of more than 255 letters, or with a NUL
        return False
    return True


def check_picture_name(out: Path, suffixes: Sequence[str] = (".png",)) -> None:
    """Refuse a path for a picture or video (`--out`) with a wrong suffix or other content.

    Raises:
        RunError: the suffix is none of `suffixes`, or the path is a folder, a device or a file of
            another kind, which would be overwritten.
    """
    wanted = " or ".join(f"name{suffix}" for suffix in suffixes)
    suffix = out.suffix.lower()
    if suffix not in suffixes:
        raise RunError(f"--out {str(out)[:200]}: expected a file name such as {wanted}.")
    try:
        mode = out.stat().st_mode
        is_alike = stat.S_ISREG(mode)
        if is_alike:
            start, expected = _PICTURE_STARTS[suffix]
            with open_regular(out) as file:
                content = file.read(start + len(expected))
            is_alike = not content or content[start:] == expected
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
