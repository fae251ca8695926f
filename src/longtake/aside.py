"""Files that are whole or not there: written aside, renamed into place."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to, and rename it there when the block ends well.

    However the block ends, nothing half-written is left, and a file that was there before stays
    until the new one is whole. The name begins with a dot and keeps the suffix, by which some
    libraries choose a format.

    Raises:
        OSError: it cannot be renamed; and whatever the block raises.
    """
    aside = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield aside
        aside.replace(path)
    finally:
        with suppress(OSError):
            aside.unlink()


def make_writable(folder: Path) -> None:
    """Make a folder if it is not there, and try whether a file can be written in it.

    Raises:
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
