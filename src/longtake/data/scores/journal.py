"""Remembers scores while a catalog is being scored, so that a call that was stopped goes on.

JSON lines beside the catalog that is being written: first what is scored by what, then the row and
the value of each clip as soon as it is known. It is removed once the catalog is written.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from longtake.errors import DataError
from longtake.fsio import Count, read_records

_LINE: TypeAdapter[dict[str, str] | tuple[Count, float]] = TypeAdapter(
    dict[str, str] | tuple[Count, float]
)


class Journal:
    """The values of one score that is being made.

    Args:
        out: the catalog that is being written.
        name: of the score.
        facts: all that the values follow from; with others, nothing is believed.
    """

    def __init__(self, out: Path, name: str, facts: Mapping[str, str]) -> None:
        self._path = out.with_name(f".{out.name}.{name}.journal.jsonl")
        self._facts = dict(facts)
        self._file: IO[str] | None = None

    def read(self) -> dict[int, float]:
        """What an earlier call had finished, by row."""
        lines = read_records(self._path, _LINE)
        if next(iter(lines), None) != self._facts:
            self._path.unlink(missing_ok=True)
            return {}
        return dict(line for line in lines if isinstance(line, tuple))

    def add(self, row: int, value: float) -> None:
        """Write down a clip's value; it is safe from this process's end at once."""
        try:
            if self._file is None:
                is_new = not self._path.exists()
                self._file = self._path.open("a", encoding="utf-8")
                # In case the last line was cut off.
                self._file.write(f"{json.dumps(self._facts)}\n" if is_new else "\n")
            self._file.write(f"{json.dumps([row, value])}\n")
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written: {error.strerror or error}. Make room, and run "
                "the same command again: it goes on from what is written."
            ) from error

    def close(self) -> None:
        """Leave it as it is."""
        if self._file is not None:
            with suppress(OSError):  # what is not written by now was told as an error
                self._file.close()
            self._file = None

    def remove(self) -> None:
        """Forget it all."""
        self.close()
        self._path.unlink(missing_ok=True)
