"""Mirrors a run directory's metrics to TensorBoard; torch-free.

No mirror is worth a run: where it cannot be written, it ends. `metrics.jsonl` has all of it.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from longtake.run_dir import RunDirectory

_NOT_SCALARS = ("step", "time")


class TensorBoardMirror:
    """Follows metrics.jsonl from where this launch begins.

    Each launch writes an event file of its own, which begins by telling TensorBoard to forget the
    steps that it is about to run again; so does each rollback.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._source: Path = run.metrics_path
        self._offset = self._source.stat().st_size if self._source.exists() else 0
        self._last_step: int | None = None
        self._last_time = time.monotonic()
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = _begin(run.tensorboard_path)

    def catch_up(self, *, now: bool = True) -> None:
        """Write what metrics.jsonl has gained; a line that is still being written waits.

        Not `now`: only if a second has passed since the last time.
        """
        if self._file is None or not self._source.exists():
            return
        if now or time.monotonic() > self._last_time + 1.0:
            self._last_time = time.monotonic()
            try:
                self._follow()
                self._file.flush()
            except OSError:
                self._give_up()

    def close(self) -> None:
        """Catch up, flush and close the event file."""
        self.catch_up()
        self._give_up()

    def _follow(self) -> None:
        with self._source.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(ValueError):  # the rest of a line that an earlier launch left half
                    self._write(json.loads(line))

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it still had to write
                file.close()

    def _write(self, row: dict[str, Any]) -> None:
        step, seconds = row["step"], row["time"]
        if self._last_step is None or step <= self._last_step:
            start = SessionLog(status=SessionLog.START)
            self._put(Event(session_log=start, step=step, wall_time=seconds))
        self._last_step = step
        values = [
            Summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in _scalars(row)
            if name not in _NOT_SCALARS
        ]
        self._put(Event(summary=Summary(value=values), step=step, wall_time=seconds))

    def _put(self, event: Event) -> None:
        RecordWriter(self._file).write(event.SerializeToString())


def _begin(folder: Path) -> BinaryIO:
    """A new event file, with what each begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    _wait_for_a_second_of_its_own(folder)
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    file = (folder / name).open("wb")
    event = Event(wall_time=time.time(), file_version="brain.Event:2")
    RecordWriter(file).write(event.SerializeToString())
    file.flush()
    return file


def _scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a row, those inside others by the names of both; without what is none."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _wait_for_a_second_of_its_own(folder: Path) -> None:
    """TensorBoard reads a folder's event files in the order of the seconds in their names."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
