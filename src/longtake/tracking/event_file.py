"""TensorBoard's event files: records of a length, a protobuf and two checksums.

The same as `tensorboard.summary.writer.record_writer`, whose import takes more memory than all
of the rest of this program.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event

from longtake.fsio import open_regular
from longtake.tracking.tracker import wait_for_a_second_of_its_own

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MASK = 0xA282EAD8


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ _POLYNOMIAL if value & 1 else value >> 1
        table.append(value)
    return table


_TABLE = _table()


class EventFile:
    """A new event file in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        second = wait_for_a_second_of_its_own(folder, "events.out.tfevents.{second}.*")
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        try:
            self.put(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.flush()
        except OSError:
            self.close()
            (folder / name).unlink()
            raise

    def put(self, event: Event) -> None:
        """Append an event."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))

    def flush(self) -> None:
        """Hand over to the operating system what was put."""
        self._file.flush()

    def close(self) -> None:
        """Close it; what cannot be written any more is lost."""
        with suppress(OSError):
            self._file.close()


def event_files(folder: Path) -> list[Path]:
    """A folder's event files, the oldest first."""
    return sorted(folder.glob("events.out.tfevents.*"))


def events_in(path: Path) -> Iterator[Event]:
    """The whole events of a file; what was cut off or is damaged after them is passed over."""
    with open_regular(path) as file:
        while len(header := file.read(12)) == 12:
            if _checksum(header[:8]) != header[8:]:
                return
            (length,) = struct.unpack_from("<Q", header)
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            try:
                event = Event.FromString(data[:-4])
            except Exception:
                return
            yield event


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C, as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF)
