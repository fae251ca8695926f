"""Safe opening of files: regular ones only, and below a folder without following links."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final

MAX_FILE_BYTES: Final = 256 * 2**20
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
# O_NONBLOCK: opening a named pipe would otherwise wait for a writer. O_NOCTTY: a terminal that is
# opened must not become the one that controls this process.
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
# A context variable, since the threads of a server read below different folders.
_only_below: ContextVar[Path | None] = ContextVar("only_below", default=None)


@contextmanager
def reading_below(top: Path) -> Iterator[None]:
    """Restrict `open_regular` in the context to files below `top`, and follow no links there.

    Files in `cache_folder` can still be opened: longtake wrote them.
    """
    token = _only_below.set(top)
    try:
        yield
    finally:
        _only_below.reset(token)


def cache_folder() -> Path:
    """Return longtake's folder in the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    top = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path in this variable.
    return (Path(top) if top.startswith("/") else Path.home() / ".cache") / "longtake"


def _is_cached(path: Path) -> bool:
    with suppress(RuntimeError):
        # `is_relative_to` compares text only, so ".." could lead out of the folder.
        return path.is_relative_to(cache_folder()) and ".." not in path.parts
    return False


FileVersion = tuple[int, int, int]
"""Inode, size and modification time (ns) of a file, by which a change is noticed."""


def version_of(status: os.stat_result) -> FileVersion:
    """Return a file's inode, size and modification time, which change with every write."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file, folder or link itself; None: it does not exist."""
    with suppress(OSError):
        return version_of(path.lstat())
    return None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; links are followed, except within `reading_below`.

    Other kinds of files are refused: a named pipe or a device could block the reader for ever.

    Raises:
        OSError: the file cannot be opened, or is a folder, a named pipe, a device or a socket.
    """
    top = _only_below.get()
    if top is not None and not _is_cached(path):
        if not path.is_relative_to(top):
            raise OSError(errno.EACCES, f"it is not in {top}", str(path))
        return open_below(top, str(path.relative_to(top)))
    # `stat` would raise ValueError, which callers that handle OSError do not expect.
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "the name contains a NUL character", str(path))
    _refuse_irregular(path.stat().st_mode, path)  # a device may react to being opened
    descriptor = os.open(path, _READING)
    return _opened(descriptor, path)


def open_below(top: Path, name: str) -> BufferedReader:
    """Open a regular file by its path below a folder; no part of that path may be a link.

    Each part is opened relative to the descriptor of its parent, so a link created in the meantime
    is not followed either. The path of `top` itself may contain links.

    Raises:
        OSError: the file cannot be opened, is not regular, is not below `top` or is reached by a
            link.
    """
    path, parts = top / name, PurePosixPath(name).parts
    # ".." is no link: O_NOFOLLOW would not keep it inside of the folder.
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise OSError(errno.EACCES, "it is not below the folder", str(path))
    with open_folder_below(top, parts[:-1]) as folder:
        _refuse_irregular(os.lstat(parts[-1], dir_fd=folder).st_mode, path)
        descriptor = os.open(parts[-1], _READING | os.O_NOFOLLOW, dir_fd=folder)
    return _opened(descriptor, path)


@contextmanager
def open_folder_below(top: Path, parts: Sequence[str]) -> Iterator[int]:
    """Yield the descriptor of the folder `parts` below `top`; no part may be a link.

    Raises:
        OSError: the folder does not exist, or a part of its path is a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folder = os.open(top, flags)
    try:
        for part in parts:
            if stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                raise OSError(errno.ELOOP, f"{part} is a symbolic link", str(top.joinpath(*parts)))
            # lstat gives the better message; O_NOFOLLOW closes the race between the two calls.
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _opened(descriptor: int, path: Path) -> BufferedReader:
    try:
        # Checked again on the descriptor: the file may have been replaced before it was opened.
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
    """Read a whole regular file.

    Raises:
        OSError: the file cannot be opened by `open_regular`, or has more than `max_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
        return file.read()


def is_missing(error: OSError) -> bool:
    """Return True if an error says that a file, or a folder of its path, does not exist."""
    return isinstance(error, FileNotFoundError | NotADirectoryError)
