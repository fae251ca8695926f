"""TensorBoard: event files below the run's folder `tensorboard`.

tensorboard/          train/...           a scalar for each number of each row
tensorboard/eval/     eval/<preset>/...   measures, pictures and alarms of evaluations
tensorboard/events/   events/<event>      other events, as text
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from longtake.config import TrackingSection
from longtake.fsio import open_regular
from longtake.run_dir import RunDirectory
from longtake.tracking.tracker import TrackedRecord, wait_for_unused_second

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # number of channels by PNG's colour type
_MAX_PICTURE_BYTES = 16 * 2**20
_CRC_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_CRC_MASK = 0xA282EAD8  # of LevelDB, as the CRC of data that contains CRCs is problematic


class TensorBoard:
    """Tracker for TensorBoard; each opening begins new event files at their first event."""

    def __init__(self, run: RunDirectory, section: TrackingSection) -> None:
        self._path = run.tensorboard_path
        self._files: dict[str, _EventFile] = {}
        self._next = 0

    def open(self, first: int) -> int:
        """Begin new event files of TensorBoard; see `Tracker.open`."""
        self._path.mkdir(exist_ok=True)  # no parents: a deleted run must not come back
        self._files = {
            "train": _EventFile(self._path, has_steps=True),
            "eval": _EventFile(self._path / "eval"),
            "events": _EventFile(self._path / "events"),
        }
        self._next = first
        return first

    def write(self, number: int, record: TrackedRecord) -> bool:
        """Write a run's record as one event of TensorBoard; see `Tracker.write`."""
        values = [Summary.Value(tag=tag, simple_value=each) for tag, each in record.scalars.items()]
        values += [_text(tag, each) for tag, each in record.texts.items()]
        for tag, file in record.media.items():
            values += _picture(tag, file.path)
        event = Event(summary=Summary(value=values), step=record.step, wall_time=record.time)
        is_new = self._files[record.kind].write(event)
        self._next = number + is_new
        return is_new

    def flush(self) -> int:
        for file in self._files.values():
            file.flush()
        return self._next

    def close(self) -> int:
        """Flush and close all event files of TensorBoard; see `Tracker.close`."""
        try:
            return self.flush()
        finally:
            for file in self._files.values():
                file.close()
            self._files = {}


class _EventFile:
    """TensorBoard's file of events (TFRecord): length, protobuf and checksums of each event.

    `tensorboard.summary.writer` writes the same, but importing it takes more memory than all else
    here. The file is created with its first event.

    Args:
        folder: folder of the file.
        has_steps: steps may be run again: a session log then makes TensorBoard discard later steps
            in this folder. False: each event is written once, in any order of steps.
    """

    def __init__(self, folder: Path, has_steps: bool = False) -> None:
        self._folder, self._has_steps = folder, has_steps
        self._file: BinaryIO | None = None
        self._last = float("inf")
        # A process that was killed has written to the newest file, perhaps beyond its cursor.
        paths = [] if has_steps else event_files(folder)[-1:]
        self._there = {
            name for path in paths for event in events_in(path) for name in _names(event)
        }

    def write(self, event: Event) -> bool:
        """Append an event of TensorBoard; returns False if it is empty or exists already."""
        names = _names(event)
        if not self._has_steps and (not names or names <= self._there):
            return False
        if self._file is None:
            self._begin()
        # A step that is not later than the last one was run again, after a resume or a rollback.
        if self._has_steps and event.step <= self._last:
            start = SessionLog(status=SessionLog.START)
            self._put(Event(session_log=start, step=event.step, wall_time=event.wall_time))
        self._last = event.step
        self._put(event)
        return True

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        second = wait_for_unused_second(self._folder, "events.out.tfevents.{second}.*")
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("wb")
        try:
            self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.flush()
        except OSError:
            self.close()
            self._file = None
            (self._folder / name).unlink()
            raise

    def _put(self, event: Event) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        assert self._file is not None
        self._file.write(length + _checksum(length) + data + _checksum(data))


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def events_in(path: Path) -> Iterator[Event]:
    """Yield the complete events of an event file, up to the first that is cut off or damaged."""
    with open_regular(path) as file:
        while len(header := file.read(12)) == 12:
            if _checksum(header[:8]) != header[8:]:
                return
            (length,) = struct.unpack_from("<Q", header)
            data = file.read(length + 4)
            if len(data) < length + 4:
                return
            # The checksum of the data is not compared: in Python that is slow for pictures.
            try:
                event = Event.FromString(data[:-4])
            except Exception:
                return
            yield event


def _names(event: Event) -> set[tuple[str, int, float]]:
    time_ms = round(event.wall_time, 3)
    return {(value.tag, event.step, time_ms) for value in event.summary.value}


def _text(tag: str, lines: str) -> Summary.Value:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[lines.encode()], tensor_shape=shape)
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _picture(tag: str, path: Path) -> list[Summary.Value]:
    """Build TensorBoard's summary of a PNG file; empty for other files and above 16 MiB."""
    if path.suffix != ".png" or path.stat().st_size > _MAX_PICTURE_BYTES:
        return []
    data = path.read_bytes()
    if not data.startswith(_PNG) or len(data) < 26:
        return []
    # The header chunk IHDR comes first: 8 bytes of signature, 8 of length and type, then these.
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    size = {"width": width, "height": height, "colorspace": _PNG_CHANNELS.get(colour, 3)}
    return [Summary.Value(tag=tag, image=Summary.Image(**size, encoded_image_string=data))]


_CRC_TABLE = list(range(256))
for _ in range(8):
    _CRC_TABLE = [(each >> 1) ^ (_CRC_POLYNOMIAL if each & 1 else 0) for each in _CRC_TABLE]


def _checksum(data: bytes) -> bytes:
    """Compute the checksum of TFRecord files, the masked CRC-32C of their data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFFFFFF)
