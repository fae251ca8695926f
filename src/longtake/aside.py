"""Files that are whole or not there: written aside, renamed into place."""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def aside_of(path: Path, own: str = "") -> Path:
    """Where a file is written before it has its name; `own`: what tells writers apart."""
    return path.with_name(f".{path.stem}{own}.partial{path.suffix}")


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
