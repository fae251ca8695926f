"""Journals: JSON lines from which an interrupted command resumes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar

from longtake.errors import DataError
from longtake.fsio.records import MAX_LINE_BYTES, Kind, read_lines, validate_lines
from longtake.fsio.writing import no_follow

_T = TypeVar("_T")


class Journal(Generic[_T]):
    """The finished items of a command as JSON lines, from which it resumes after an interruption.

    An added item survives the end of this process. `remove` the journal once the result is written.

    Args:
        path: the journal's file.
        kind: type of the items.
        header: everything that the items depend on; a journal with another header is discarded.
            None: no header.
        max_line_bytes: limit of an item's size.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind[_T],
        *,
        header: Mapping[str, str] | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._path, self._kind, self._max_line_bytes = path, kind, max_line_bytes
        self._header = None if header is None else dict(header)
        self._file: IO[str] | None = None

    def read(self) -> list[_T]:
        """Return the items that an interrupted command has finished."""
        return list(self.entries())

    def entries(self) -> Iterator[_T]:
        """Yield the items that an interrupted command has finished."""
        lines = read_lines(self._path, self._max_line_bytes)
        if self._header is not None:
            # A missing or damaged header counts as another one: the items may belong to other
            # arguments.
            first = next(filter(None, lines), b"{}")
            if list(validate_lines([first], dict[str, Any], self._path)) != [self._header]:
                self._path.unlink(missing_ok=True)
                return
        yield from validate_lines(lines, self._kind, self._path)

    def add(self, item: Mapping[str, Any] | Sequence[Any]) -> None:
        """Append a finished item to the journal.

        Raises:
            DataError: the journal cannot be written.
        """
        try:
            if self._file is None:
                # Opened at the first item, so that a command without work leaves no empty journal.
                is_new = not self._path.exists()
                self._file = open(self._path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115 - kept
                # A newline in case the last line was cut off.
                has_header = is_new and self._header is not None
                self._file.write(f"{json.dumps(self._header)}\n" if has_header else "\n")
            self._file.write(json.dumps(item) + "\n")
            # Flushed, not synchronized: items must survive a killed process but no power failure,
            # and an fsync for each would take longer than many items.
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be written: {error.strerror or error}. Make room or make it "
                "writable, and run the same command again: it resumes from what is written."
            ) from error

    def close(self) -> None:
        """Close the journal's file, and keep it for the next command."""
        if self._file is not None:
            with suppress(OSError):  # `add` has flushed every item, or has raised
                self._file.close()
            self._file = None

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
