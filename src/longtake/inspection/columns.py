"""Rows of numbers as columns: the first rows in a cache file, those that follow in memory.

A column of the file is read with `preadv` when it is needed, and not mapped: a file on NFS that
another host replaces would end this process with SIGBUS.
"""

import errno
import os
import weakref
import zlib
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from longtake.metrics import METRICS

Column = NDArray[Any]
Numbers = NDArray[np.float64]

DTYPE: Final = np.dtype(
    [
        ("offset", "<i8"),  # byte at which the line begins in the file
        *((name, metric.dtype) for name, metric in METRICS.items()),
        ("has_verdict", "?"),
    ]
)
ABSENT: Final = -np.inf
"""Marks a metric that a line of metrics.jsonl lacks: JSON has finite numbers only, and null is
NaN."""

_NAMES: Final = DTYPE.names or ()
_CHUNK_ROWS = 2**16
_COPIED_BYTES = 2**20


class _File:
    """The open cache file that holds the first rows of metrics, one column after the other."""

    def __init__(self, file: IO[bytes] | None, first_byte: int, num_rows: int) -> None:
        self.num_rows, self._places = num_rows, dict[str, int]()
        if file is not None:
            # A descriptor of its own, as the caller closes the file.
            self._descriptor = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._descriptor)
        for name in _NAMES:
            self._places[name] = first_byte
            first_byte += num_rows * DTYPE[name].itemsize

    def read(self, name: str, first: int, last: int) -> Column:
        column = np.empty(max(0, min(last, self.num_rows) - first), DTYPE[name])
        if len(column):
            octets, begin = column.view(np.uint8).data, self._places[name] + first * column.itemsize
            if os.preadv(self._descriptor, [octets], begin) != len(octets):
                raise OSError(errno.EIO, "the cache of metrics is shorter than it was")
        return column


class ColumnStore:
    """Rows of metrics that one thread appends, and that any thread reads column by column.

    Existing rows do not change while more are appended.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._stored: tuple[_File, list[Column]] = _File(None, 0, 0), []
        """The file with the first rows of metrics, and the later rows in arrays of
        `_CHUNK_ROWS`."""

    def append(self, rows: Column) -> None:
        file, chunks = self._stored
        while len(rows):
            place = (self.num_rows - file.num_rows) % _CHUNK_ROWS
            if place == 0:
                chunks.append(np.empty(_CHUNK_ROWS, DTYPE))
            added = rows[: _CHUNK_ROWS - place]
            # Copied before they are counted: a reader never sees rows that are not complete.
            chunks[-1][place : place + len(added)] = added
            self.num_rows, rows = self.num_rows + len(added), rows[len(added) :]

    def read(self, name: str, first: int, last: int) -> Column:
        """Return the values of one metric in the rows from `first` up to but not including `last`.

        Raises:
            OSError: the cache file cannot be read.
        """
        file, chunks = self._stored
        parts = [file.read(name, first, last)]
        begin, end = max(0, first - file.num_rows), max(0, last - file.num_rows)
        for number in range(begin // _CHUNK_ROWS, -(-end // _CHUNK_ROWS)):
            before = number * _CHUNK_ROWS
            parts.append(chunks[number][name][max(0, begin - before) : end - before])
        return np.concatenate(parts)

    def write(self, file: IO[bytes]) -> int:
        """Write all columns to a cache file at its current position, and return their CRC-32."""
        checksum = 0
        for name in _NAMES:
            octets = self.read(name, 0, self.num_rows).view(np.uint8).data
            checksum = zlib.crc32(octets, checksum)
            file.write(octets)
        return checksum

    def read_from(self, file: IO[bytes], first_byte: int) -> None:
        """Read rows from the cache file that `write` has just filled, and free their memory."""
        # One assignment, so that no reader combines the file with chunks that are in it already.
        self._stored = _File(file, first_byte, self.num_rows), []

    @classmethod
    def load(cls, file: IO[bytes], num_rows: int, checksum: int) -> "ColumnStore | None":
        """Return the rows that `write` wrote to the rest of a cache file; None if it is damaged."""
        first_byte, found, size = file.tell(), 0, 0
        while data := file.read(_COPIED_BYTES):
            found, size = zlib.crc32(data, found), size + len(data)
        if size != num_rows * DTYPE.itemsize or found != checksum:
            return None
        store = cls()
        store.num_rows = num_rows
        store.read_from(file, first_byte)
        return store
