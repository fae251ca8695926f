"""Content hashes of files, remembered while path, size and time of change stay the same."""

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longtake.data.clip import Media
from longtake.data.indexing.probe import content_hash
from longtake.errors import ClipError, RecordError
from longtake.fsio import make_writable, read_records

_Stamp = tuple[int, int]


class ContentHashes:
    """Remembers in a folder what files held, so that no later process reads them again.

    Each process appends to a file of its own and reads those of all, once.

    Args:
        folder: of the files; where it cannot be written, nothing is remembered.
        hash_of: from a path to what is remembered: BLAKE2b-128 of the content unless given. Those
            of one folder are of one kind.
    """

    def __init__(self, folder: Path, hash_of: Callable[[str], str] | None = None) -> None:
        self._folder = folder
        self._hash_of = hash_of or (lambda path: content_hash(Media(path)))
        self._mine = folder / f"{secrets.token_hex(8)}.jsonl"
        self._known: dict[str, tuple[_Stamp, str]] | None = None
        self._lock = threading.Lock()

    def of(self, path: str) -> str:
        """A file's hash, as hex digits.

        Raises:
            ClipError: there is no such file, it is empty or cannot be read.
        """
        known, stamp = self._remembered(), _stamp(path)
        if (found := known.get(path)) and found[0] == stamp:
            return found[1]
        content = self._hash_of(path)
        with self._lock:
            known[path] = stamp, content
            with suppress(OSError):  # then somebody reads it again
                self._write(path, stamp, content)
        return content

    def _remembered(self) -> dict[str, tuple[_Stamp, str]]:
        with self._lock:
            if self._known is None:
                self._known = {}
                for file in sorted(self._folder.glob("*.jsonl")):
                    self._read(file, self._known)
            return self._known

    def _read(self, file: Path, known: dict[str, tuple[_Stamp, str]]) -> None:
        with suppress(RecordError):
            for path, num_bytes, mtime_ns, content in read_records(file, tuple[str, int, int, str]):
                known[path] = (num_bytes, mtime_ns), content

    def _write(self, path: str, stamp: _Stamp, content: str) -> None:
        if not self._mine.exists():
            make_writable(self._folder)
        with self._mine.open("ab") as file:
            file.write(json.dumps([path, *stamp, content]).encode() + b"\n")


def _stamp(path: str) -> _Stamp:
    try:
        status = Path(path).stat()
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ClipError(path, f"{reason or error}") from error
    return status.st_size, status.st_mtime_ns
