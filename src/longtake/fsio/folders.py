"""Folders that longtake makes, marks and empties."""

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
"""The file that marks the folder of a cache."""


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
