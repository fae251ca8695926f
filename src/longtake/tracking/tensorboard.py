"""TensorBoard: event files below the run's `tensorboard`.

    tensorboard/          train/...           a scalar for each number of each row
    tensorboard/eval/     eval/<preset>/...   what was measured, its sheet, its alarms
    tensorboard/events/   events/<kind>       what the run did besides, as text

Whenever steps are about to be seen again (in a new file, after a rollback) TensorBoard is told to
forget them; that goes for one folder only, so evaluations have one of their own.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from longtake.run_dir import RunDirectory
from longtake.tracking import summaries
from longtake.tracking.cursor import Position
from longtake.tracking.event_file import EventFile, event_files, events_in
from longtake.tracking.news import Evaluation
from longtake.tracking.tracker import scalars, words

_NOT_SCALARS = ("step", "time")


class TensorBoard:
    """Each opening begins a new event file, when there is something to be written to it."""

    name = "tensorboard"

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.tensorboard_path
        self._rows: _StepsFile | None = None
        self._evaluations: _LastingFile | None = None
        self._events: _LastingFile | None = None
        self._next = 0

    def open(self, position: Position) -> int:
        """Begin; see `Tracker`."""
        self._path.mkdir(exist_ok=True)  # not that of the run, which may be deleted now
        self._rows = _StepsFile(self._path)
        self._evaluations = _LastingFile(self._path / "eval")
        self._events = _LastingFile(self._path / "events")
        self._next = position.rows
        return self._next

    def write_row(self, number: int, row: Mapping[str, Any]) -> bool:
        """A scalar for each number of a row."""
        assert self._rows is not None
        values = {f"train/{name}": value for name, value in scalars(row) if _is_shown(name)}
        self._rows.write(row["step"], row["time"], summaries.numbers(values))
        self._next = number + 1
        return True

    def write_event(self, number: int, event: Mapping[str, Any]) -> bool:
        """A line of text."""
        assert self._events is not None
        shown = summaries.text(f"events/{event['event']}", words(event))
        at = datetime.fromisoformat(event["time"]).timestamp()
        is_new = self._events.write(event.get("step") or 0, at, [shown])
        self._next = number + is_new
        return is_new

    def write_evaluation(self, number: int, evaluation: Evaluation) -> bool:
        """Its numbers, its sheet and its alarms, at the step of the checkpoint."""
        assert self._evaluations is not None
        preset, step, _ = evaluation.identity
        is_new = self._evaluations.write(step, evaluation.time, _shown(preset, evaluation))
        self._next = number + is_new
        return is_new

    def flush(self) -> int:
        """Hand everything over to the operating system."""
        for file in filter(None, (self._rows, self._evaluations, self._events)):
            file.flush()
        return self._next

    def close(self) -> int:
        """Flush and close the event files."""
        try:
            return self.flush()
        finally:
            for file in filter(None, (self._rows, self._evaluations, self._events)):
                file.close()
            self._rows = self._evaluations = self._events = None


class _OnDemand:
    """An event file that is made when there is something to be written to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: EventFile | None = None

    def put(self, event: Event) -> None:
        if self._file is None:
            self._file = EventFile(self._folder)
        self._file.put(event)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _StepsFile(_OnDemand):
    """Of steps, some of which may be run again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._last: int | None = None

    def write(self, step: int, seconds: float, values: Iterable[Summary.Value]) -> None:
        if self._last is None or step <= self._last:
            start = SessionLog(status=SessionLog.START)
            self.put(Event(session_log=start, step=step, wall_time=seconds))
        self._last = step
        self.put(Event(summary=Summary(value=values), step=step, wall_time=seconds))


class _LastingFile(_OnDemand):
    """Of what is written once, in any order of steps: all of one thing is one event."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._there = {
            (value.tag, event.step, round(event.wall_time, 3))
            for path in event_files(folder)[-1:]
            for event in events_in(path)
            for value in event.summary.value
        }

    def write(self, step: int, seconds: float, values: list[Summary.Value]) -> bool:
        """Whether it was written; not if it was there, of a writer that was killed."""
        names = {(value.tag, step, round(seconds, 3)) for value in values}
        if not values or names <= self._there:
            return False
        self.put(Event(summary=Summary(value=values), step=step, wall_time=seconds))
        return True


def _is_shown(name: str) -> bool:
    return name not in _NOT_SCALARS


def _shown(preset: str, evaluation: Evaluation) -> list[Summary.Value]:
    prefix = f"eval/{preset}"
    values = {f"{prefix}/{name}": value for name, value in evaluation.scalars().items()}
    shown = summaries.numbers(values)
    alarms = [alarm["message"] for alarm in evaluation.scores["alarms"]]
    if alarms:
        shown.append(summaries.text(f"{prefix}/alarms", "\n\n".join(alarms)))
    images = [(path.stem, path) for path, _ in evaluation.videos() if path.suffix == ".png"]
    if evaluation.sheet is not None:
        images.append(("sheet", evaluation.sheet))
    pictures = (summaries.picture(f"{prefix}/{name}", path) for name, path in images)
    return [*shown, *(each for each in pictures if each is not None)]
