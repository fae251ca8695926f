"""Reads W&B's `.wandb` files, also while they are being written.

After 7 bytes, the framing of LevelDB's logs: blocks of 32 KiB, chunks of checksum, length, kind and
data; a record, a protobuf, is one chunk or several. (leveldb/doc/log_format.md)
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

# Its types say nothing of what is made at run time.
_RECORD: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
_BLOCK = 32 * 1024
_FILE_HEADER = 7
_CHUNK_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


class WandbFile:
    """One file; each reading gives what has come since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _FILE_HEADER

    def new_rows(self) -> Iterator[dict[str, Any]]:
        for record in self._new_records():
            if record.WhichOneof("record_type") == "history":
                yield _row(record.history.item)

    def _new_records(self) -> Iterator[Any]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            parts: list[bytes] = []
            for kind, data, end in _chunks(file, self._offset):
                parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
                if kind in (_FULL, _LAST):
                    self._offset = end
                    yield _RECORD.FromString(b"".join(parts))


def rows_from(number: int, folder: Path, run_id: str) -> list[dict[str, Any]]:
    """The rows of a run in a folder `wandb` whose number is not less than one."""
    files = list(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    found: list[dict[str, Any]] = []
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        rows = list(WandbFile(path).new_rows())
        found += [row for row in rows if row["_step"] >= number]
        if any(row["_step"] < number for row in rows):
            break  # all of the older files' are less
    return found


def _row(items: Iterable[Any]) -> dict[str, Any]:
    """A row by its keys; what one of them holds by its own."""
    row: dict[str, Any] = {}
    for item in items:
        *above, name = item.nested_key or [item.key]
        place = row
        for key in above:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return row


def _chunks(file: Any, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """Kind, data and end of each whole chunk from an offset on."""
    while True:
        left = _BLOCK - offset % _BLOCK
        if left < _CHUNK_HEADER.size:
            offset += left
            continue
        file.seek(offset)
        header = file.read(_CHUNK_HEADER.size)
        if len(header) < _CHUNK_HEADER.size:
            return
        _, length, kind = _CHUNK_HEADER.unpack(header)
        if kind == 0:  # the rest of a block that is not used, or not yet
            return
        data = file.read(length)
        if len(data) < length:
            return
        offset += _CHUNK_HEADER.size + length
        yield kind, data, offset
