"""By fsspec: from any store that it knows, and from a folder here where there is no rsync.

A store that needs a package of its own (s3fs, gcsfs, adlfs, ...) says which. What is here already
is known by its size and, where the store tells it, the time of its last change.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from longtake.errors import RunError
from longtake.evaluation.sync.address import Address
from longtake.evaluation.sync.rules import Rules, chosen
from longtake.evaluation.sync.transport import GoneError

_CHUNK = 8 * 2**20
_SMALL = 2**20  # below it, a file whose time is not known is read again
_INSTANT = 1e-3
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_APPENDED = ".jsonl"
_DIRECTORY = "directory"


@dataclass(frozen=True)
class _There:
    """A file of the store: its name below the folder, its path, size and time (None: unknown)."""

    name: str
    path: str
    bytes: int
    time: float | None


class Filesystem:
    """Carries by fsspec.

    Args:
        address: a URL, or a folder of this machine.

    Raises:
        RunError: fsspec knows no such protocol, or its package is not installed.
    """

    def __init__(self, address: Address) -> None:
        import fsspec

        self._address = address
        try:
            self._store, self._top = fsspec.core.url_to_fs(address.path, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise RunError(f"--source {address.text} cannot be read: {error}.") from error
        self._renames = type(self._store).mv is not fsspec.AbstractFileSystem.mv
        self._is_interrupted = threading.Event()

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """See `Transport.fetch`."""
        into.mkdir(parents=True, exist_ok=True)
        with self._explained():
            found = list(self._files(self._join(folder), rules))
            for there in found:
                if not _is_here(there, into / there.name, exactly=exactly):
                    self._bring(there, into / there.name)
        if exactly:
            names = {there.name for there in found}
            for name in [each for each in names_in(into, rules) if each not in names]:
                (into / name).unlink(missing_ok=True)

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        """See `Transport.send`."""
        top = self._join(to)
        names = list(names_in(folder, rules))
        with self._explained():
            self._store.makedirs(top, exist_ok=True)
            there = {each.name: each for each in self._files(top, rules)}
            for name in names:
                if exactly or not _is_there(there.get(name), folder / name):
                    self._put(folder / name, f"{top}/{name}")
            for name in there.keys() - set(names) if exactly else ():
                self._store.rm_file(there[name].path)

    def interrupt(self) -> None:
        """See `Transport.interrupt`; it is noticed between pieces of a file."""
        self._is_interrupted.set()

    def close(self) -> None:
        """See `Transport.close`; there is nothing to give up."""

    def _files(self, top: str, rules: Rules, below: str = "") -> Iterator[_There]:
        """Files that the rules mean; folders that they do not mean are not listed."""
        for about in self._store.ls(f"{top}/{below}".rstrip("/"), detail=True):
            last = about["name"].rstrip("/").rpartition("/")[2]
            if last in ("", ".", "..") or "\0" in last:
                raise RunError(
                    f"{self._address.text}: {about['name']!r} is no name of a file that can be "
                    "mirrored. Rename or remove it there."
                )
            name = f"{below}{last}"
            is_folder = about["type"] == _DIRECTORY
            if not chosen(rules, name, is_folder=is_folder):
                continue
            if is_folder:
                yield from self._files(top, rules, f"{name}/")
            else:
                yield _There(name, about["name"], about["size"] or 0, _time(about))

    def _bring(self, there: _There, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{there.bytes}-{there.time or 0:.3f}.partial")
        if path.suffix == _APPENDED and path.exists() and path.stat().st_size < there.bytes:
            aside = path  # such files only grow: what is here is their beginning
        self._copy(there, aside)
        _set_time(aside, there)
        aside.replace(path)

    def _copy(self, there: _There, path: Path) -> None:
        """Append what is missing."""
        with self._store.open(there.path, "rb") as source, path.open("ab") as target:
            source.seek(target.tell())
            while target.tell() < there.bytes:
                if self._is_interrupted.is_set():
                    raise RunError(f"{self._address.text}: copying was interrupted.")
                piece = source.read(min(_CHUNK, there.bytes - target.tell()))
                if not piece:
                    raise FileNotFoundError(there.path)  # replaced by a shorter one
                target.write(piece)

    def _put(self, path: Path, to: str) -> None:
        """Send a file as a whole: where the store can rename files, under a hidden name first."""
        folder, _, name = to.rpartition("/")
        self._store.makedirs(folder, exist_ok=True)
        if not self._renames:  # what keeps objects shows none before it has all of it
            self._store.put_file(str(path), to)
            return
        aside = f"{folder}/.{name}.partial"
        self._store.put_file(str(path), aside)
        self._store.mv(aside, to)

    def _join(self, folder: str) -> str:
        return f"{self._top.rstrip('/')}/{folder}".rstrip("/")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what stores raise, each its own, into errors of ours."""
        try:
            yield
        except RunError:
            raise
        except FileNotFoundError as error:
            raise GoneError(
                f"{self._address.text}: there is no {error.filename or error}."
            ) from error
        except Exception as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(f"{self._address.text}: it could not be copied ({said[-1]}).") from error


def names_in(top: Path, rules: Rules) -> Iterator[str]:
    """Files here that the rules mean."""
    for folder, folders, names in os.walk(top):
        below = Path(folder).relative_to(top)
        folders[:] = [
            name for name in folders if chosen(rules, (below / name).as_posix(), is_folder=True)
        ]
        for name in names:
            if (Path(folder) / name).is_symlink():
                continue  # it could bring any file of this host there
            if chosen(rules, (below / name).as_posix(), is_folder=False):
                yield (below / name).as_posix()


def _is_here(there: _There, path: Path, *, exactly: bool) -> bool:
    """Whether a file is here as it is there; or, unless it must be that one, newer."""
    if not path.exists():
        return False
    bytes_here, time = path.stat().st_size, path.stat().st_mtime
    if there.time is None:
        return bytes_here == there.bytes and bytes_here > _SMALL
    if not exactly and time > there.time + _INSTANT:
        return True
    return bytes_here == there.bytes and abs(time - there.time) < _INSTANT


def _is_there(there: _There | None, path: Path) -> bool:
    """Whether a file was sent already: stores have the time of sending, not the file's own."""
    if there is None or there.bytes != path.stat().st_size:
        return False
    return there.time is None or there.time > path.stat().st_mtime - _INSTANT


def _time(about: dict[str, Any]) -> float | None:
    """When the store says that a file was last changed, in seconds since 1970."""
    found = next((about[key] for key in _TIMES if about.get(key) is not None), None)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    return found.timestamp() if isinstance(found, datetime) else found


def _set_time(path: Path, there: _There) -> None:
    if there.time is not None:
        os.utime(path, (there.time, there.time))
