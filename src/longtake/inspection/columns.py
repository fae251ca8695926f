"""Rows of numbers as columns, in blocks; full blocks may lie in a file and are read when asked for.

The file is a cache in the user's cache folder. A column of it is read with `pread`, not mapped: a
file on NFS that another host replaces would end this process with SIGBUS.
"""

import errno
import os
import weakref
import zlib
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
Numbers = NDArray[np.float64]

DTYPE: Final = np.dtype(
    [
        ("offset", "<i8"),  # of the line in the file
        ("step", "<i8"),
        ("batch", "<i8"),
        ("time", "<f8"),
        # NaN, from here on: it was not finite. -inf: the line does not have it.
        ("loss", "<f8"),
        ("grad_norm", "<f8"),
        ("weight_norm", "<f8"),
        ("step_seconds", "<f8"),
        ("data_seconds", "<f4"),
        ("learning_rate", "<f4"),
        ("update_ratio", "<f4"),
        ("tflops_per_second", "<f4"),
        ("mfu", "<f4"),
        ("peak_memory_bytes", "<f4"),
        ("num_samples", "<f4"),
        ("loss_sigma_1", "<f4"),
        ("loss_sigma_2", "<f4"),
        ("loss_sigma_3", "<f4"),
        ("loss_sigma_4", "<f4"),
        ("has_verdict", "?"),
    ]
)
SIGMA_NAMES: Final = tuple(f"loss_sigma_{quarter}" for quarter in (1, 2, 3, 4))
ABSENT: Final = -np.inf
"""Stands for a number that a line does not have; JSON has finite numbers only."""

_BLOCK_ROWS = 2**16
_NAMES: Final = DTYPE.names or ()
_BLOCK: Final = np.dtype([(name, DTYPE[name], (_BLOCK_ROWS,)) for name in _NAMES])
_OFFSETS: Final = {name: place[1] for name, place in (_BLOCK.fields or {}).items()}
_COPIED_BYTES = 2**20


class _Blocks:
    """Blocks in a file, the first of which begins at a byte of it."""

    def __init__(self, file: IO[bytes], first_byte: int) -> None:
        self.first_byte = first_byte
        self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, number: int, name: str, place: int, out: Column) -> None:
        begin = self.first_byte + number * _BLOCK.itemsize + _OFFSETS[name]
        octets = out.view(np.uint8).data
        if os.preadv(self.descriptor, [octets], begin + place * out.itemsize) != len(octets):
            raise OSError(errno.EIO, "the cache of metrics is shorter than it was")

    def write(self, number: int, block: Column) -> None:
        octets = block.reshape(1).view(np.uint8).data
        begin, done = self.first_byte + number * _BLOCK.itemsize, 0
        while done < len(octets):
            done += os.pwrite(self.descriptor, octets[done:], begin + done)


class ColumnStore:
    """Rows that are appended, and read column by column.

    Rows that are there do not change while more are appended, and are read meanwhile.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._blocks: dict[int, Column] = {}  # by their numbers; the others are in the file
        self._file: _Blocks | None = None
        self._takes_more = False  # the file, that is

    def append(self, rows: Column) -> None:
        done = 0
        while done < len(rows):
            number, place = divmod(self.num_rows, _BLOCK_ROWS)
            if place == 0:
                self._blocks[number] = np.zeros((), _BLOCK)
            some = rows[done : done + _BLOCK_ROWS - place]
            for name in _NAMES:
                self._blocks[number][name][place : place + len(some)] = some[name]
            self.num_rows += len(some)
            done += len(some)
            if place + len(some) == _BLOCK_ROWS:
                self._move(number)

    def _move(self, number: int) -> None:
        """Move a full block to the file; if there is no room, it stays in memory."""
        if self._file is not None and self._takes_more:
            try:
                self._file.write(number, self._blocks[number])
            except OSError:
                self._takes_more = False
            else:
                del self._blocks[number]

    def read(self, name: str, first: int, last: int) -> Column:
        """A column's rows from `first` to before `last`; they are not kept in memory.

        Raises:
            OSError: the file cannot be read.
        """
        found = np.empty(max(0, last - first), DTYPE[name])
        begin = first
        while begin < last:
            number, place = divmod(begin, _BLOCK_ROWS)
            end = min(last, (number + 1) * _BLOCK_ROWS)
            self._read(number, name, place, found[begin - first : end - first])
            begin = end
        return found

    def write(self, file: IO[bytes]) -> int:
        """Write all blocks from the file's position on; returns their checksum."""
        checksum = 0
        for number in range(-(-self.num_rows // _BLOCK_ROWS)):
            block = np.zeros((), _BLOCK)
            for name in _NAMES:
                self._read(number, name, 0, block[name])
            octets = block.reshape(1).view(np.uint8).data
            checksum = zlib.crc32(octets, checksum)
            file.write(octets)
        return checksum

    def spill_to(self, file: IO[bytes]) -> None:
        """Keep blocks that become full in an empty file, instead of in memory."""
        if self._file is None:
            self._file, self._takes_more = _Blocks(file, 0), True

    def keep_in(self, file: IO[bytes], first_byte: int) -> None:
        """Read full blocks from a file, to which `write` has written, and forget them here."""
        self._file, self._takes_more = _Blocks(file, first_byte), False
        num_full = self.num_rows // _BLOCK_ROWS
        self._blocks = {n: block for n, block in self._blocks.items() if n >= num_full}

    @classmethod
    def load(cls, file: IO[bytes], num_rows: int, checksum: int) -> "ColumnStore | None":
        """The store that was written to the rest of a file; None: it is damaged."""
        store, first_byte = cls(), file.tell()
        found = size = 0
        while data := file.read(_COPIED_BYTES):
            found, size = zlib.crc32(data, found), size + len(data)
        if size != -(-num_rows // _BLOCK_ROWS) * _BLOCK.itemsize or found != checksum:
            return None
        store._file = _Blocks(file, first_byte)
        store.num_rows = num_rows
        if num_rows % _BLOCK_ROWS:  # the last block is not full: more rows may come
            block, last = np.zeros((), _BLOCK), num_rows // _BLOCK_ROWS
            for name in _NAMES:
                store._read(last, name, 0, block[name])
            store._blocks[last] = block
        return store

    def _read(self, number: int, name: str, place: int, out: Column) -> None:
        """Fill `out` with rows of one block, from its row `place` on."""
        block = self._blocks.get(number)
        if block is not None:
            out[:] = block[name][place : place + len(out)]
            return
        assert self._file is not None
        self._file.read(number, name, place, out)
