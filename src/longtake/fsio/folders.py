"""Creation, marking and removal of longtake's own folders."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from longtake.errors import DataError
from longtake.fsio.writing import is_there, write_once

CACHE_MARK: Final = "longtake_cache.json"
"""Name of the file that marks a folder as a cache of longtake."""


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new temporary folder to fill, and rename it to `path` when the block succeeds.

    Raises:
        OSError: the folder cannot be created or renamed, or `path` is a folder with files.
    """
    partial = path.with_name(f".{path.name}.partial")
    remove_tree(partial)  # left by a process that was killed while it filled the folder
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(path)
    finally:
        remove_tree(partial)


def remove_tree(path: Path) -> None:
    """Delete a folder and its content, or a symbolic link without its target, ignoring errors."""
    if path.is_symlink():
        # `rmtree` refuses a link, and with `ignore_errors` it would leave the link without a word.
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_oldest(folder: Path, num_kept: int) -> None:
    """Remove all but the `num_kept` newest files of a cache folder.

    Raises:
        OSError: the folder cannot be read, or a file cannot be removed.
    """
    by_age = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another process may clean the same cache at the same time.
            with suppress(FileNotFoundError):
                by_age.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(by_age)[:-num_kept]:
        Path(path).unlink(missing_ok=True)


def is_linked(path: Path, top: Path) -> bool:
    """Return True if `path`, `top` or a folder between them is a symbolic link."""
    return any(each.is_symlink() for each in (path, *path.parents) if each.is_relative_to(top))


def make_writable(folder: Path) -> None:
    """Create a folder if it does not exist, and check that files can be written in it.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Only a trial is sure: permission bits say nothing of a disk that is mounted read-only.
    tempfile.TemporaryFile(dir=folder).close()


def claim_folder(folder: Path, names: Sequence[str] = ()) -> None:
    """Create a cache folder and mark it as longtake's, or check that it is marked.

    A user's own files can have the names that a cache uses. A folder with files but without the
    mark is refused, before anything in it is overwritten or removed.

    Args:
        folder: the cache folder; the path may contain links.
        names: files and folders of the cache in it, none of which may be a link.

    Raises:
        DataError: the folder has files and no mark, or one of `names` is a link.
        OSError: a folder without a mark cannot be created or written to.
    """
    # First, because all that follows would follow the links.
    refuse_links(folder, (CACHE_MARK, *names))
    if is_there(folder / CACHE_MARK):
        return
    make_writable(folder)
    # Names with a dot are ignored: `write_once` of another process has such a file for a moment.
    found = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    if found and not is_there(folder / CACHE_MARK):  # another process may have marked it
        raise DataError(
            f"{folder} is no cache of longtake: it has no file {CACHE_MARK}, and holds "
            f"{found[0][:200]!r}. Nothing in it was changed; name an empty or a new folder."
        )
    write_once(folder / CACHE_MARK, {"made_by": "longtake"})


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse symbolic links in a folder in which longtake writes or removes files.

    Raises:
        DataError: one of `names` is a symbolic link.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise DataError(
                f"{folder / name} is a symbolic link, which is not followed in a cache. Remove it, "
                "or choose another folder for the cache."
            )
