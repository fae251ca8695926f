"""Files that are whole or not there: written aside, renamed into place."""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_IS_LINK = "it is a symbolic link; links are not followed when writing"


@contextmanager
def written_aside(path: Path, *, by_many: bool = False) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it there when the block ends well.

    However the block ends, nothing half-written is left, and a file that was there before stays
    until the new one is whole. The name begins with a dot and keeps the suffix, by which some
    libraries choose a format.

    Args:
        path: the file.
        by_many: several processes may write it at a time: each takes a name that no other does.
            Where one alone does, what it leaves when it is killed is written over the next time.

    Raises:
        OSError: it cannot be renamed; and whatever the block raises.
    """
    aside = aside_of(path, f".{secrets.token_hex(4)}" if by_many else "")
    aside.unlink(missing_ok=True)  # left by a writer that was killed; or a link to another file
    try:
        yield aside
        if aside.is_symlink():
            raise OSError(errno.ELOOP, _IS_LINK, str(aside))
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def aside_of(path: Path, own: str = "") -> Path:
    """Where a file is written before it has its name; `own`: what tells writers apart."""
    return path.with_name(f".{path.stem}{own}.partial{path.suffix}")


def no_follow(path: str, flags: int) -> int:
    """An `opener` for `open`, which does not follow a link of this name.

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
    """Delete a folder with all that is in it, if it can be; of a link, only the link."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def is_linked(path: Path, top: Path) -> bool:
    """Whether a path, or a folder between it and `top`, is a link."""
    return any(each.is_symlink() for each in (path, *path.parents) if each.is_relative_to(top))


def make_writable(folder: Path) -> None:
    """Make a folder if it is not there, and try whether a file can be written in it.

    Raises:
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of this name; no if the name is impossible or forbidden."""
    try:
        path.stat()
    except (OSError, ValueError):  # such as a name of more than 255 letters, or with a NUL
        return False
    return True
