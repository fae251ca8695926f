"""Finds runs, and whether they go on; torch-free."""

import sys
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from longtake.fsio import read_new_records
from longtake.run_dir import RunDirectory

_BEGINNINGS = ("launched", "resumed")
_ENDINGS = ("finished", "diverged")


def find_runs(places: Iterable[Path]) -> list[RunDirectory]:
    """The run directories that the places are, or that lie in them; each once."""
    found: dict[Path, RunDirectory] = {}
    for place in places:
        inside = sorted(place.iterdir()) if place.is_dir() else []
        folders = [place] if RunDirectory(place).exists() else inside
        for folder in folders:
            run = RunDirectory(folder)
            if run.exists() and not folder.name.startswith("."):
                found.setdefault(folder.resolve(), run)
    return list(found.values())


def is_over(run: RunDirectory) -> bool:
    """Whether a run has ended by itself, and nobody has begun to go on with it.

    Any thread may ask, as often as it likes: no line of the run's events is read twice.

    Raises:
        OSError: they cannot be read.
    """
    return _course_of(run).is_over()


class _Course:
    """The newest beginning or ending of a run, and up to where its events were read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: str | None = None
        self._file, self._offset = 0, 0
        self._lock = threading.Lock()

    def is_over(self) -> bool:
        with self._lock:
            try:
                self._read()
            except FileNotFoundError:
                self._newest, self._offset = None, 0
            return self._newest in _ENDINGS

    def _read(self) -> None:
        """Read on. Another file, or a shorter one, is read from its beginning."""
        stat = self._path.stat()
        if (stat.st_ino, stat.st_size) == (self._file, self._offset):
            return
        if stat.st_ino != self._file or stat.st_size < self._offset:
            self._newest, self._file, self._offset = None, stat.st_ino, 0
        events, self._offset = read_new_records(
            self._path, dict[str, Any], self._offset, sys.maxsize
        )
        kinds = [event.get("event") for event in events]
        told = [kind for kind in kinds if kind in (*_BEGINNINGS, *_ENDINGS)]
        self._newest = told[-1] if told else self._newest


@cache
def _course_of(run: RunDirectory) -> _Course:
    return _Course(run.events_path)
