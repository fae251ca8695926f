"""Mirrors a run directory's metrics to TensorBoard; torch-free."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

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
        _wait_for_a_second_of_its_own(run.tensorboard_path)
        self._writer = EventFileWriter(str(run.tensorboard_path))
        self._last_step: int | None = None
        self._last_time = time.monotonic()

    def catch_up(self, *, now: bool = True) -> None:
        """Write what metrics.jsonl has gained; a line that is still being written waits.

        Not `now`: only if a second has passed since the last time.
        """
        if not self._source.exists() or not (now or time.monotonic() > self._last_time + 1.0):
            return
        self._last_time = time.monotonic()
        with self._source.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(ValueError):  # the rest of a line that an earlier launch left half
                    self._write(json.loads(line))
        self._writer.flush()

    def close(self) -> None:
        """Catch up, flush and close the event file."""
        self.catch_up()
        self._writer.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._last_step is None or row["step"] <= self._last_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(session_log=start, step=row["step"], wall_time=row["time"])
            )
        self._last_step = row["step"]
        values = [
            Summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in _scalars(row)
            if name not in _NOT_SCALARS
        ]
        event = Event(summary=Summary(value=values), step=row["step"], wall_time=row["time"])
        self._writer.add_event(event)


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
