"""Reader of a run directory's new records (metrics, events, evaluations) for a tracker.

A cursor is the position up to which a tracker has got them. It is a small file, replaced after the
records before it have arrived, so that the next process continues from there.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from longtake import errors, fsio
from longtake.evaluation_dir import SCORES, EvaluationDirectory, Scores, note_of_video
from longtake.run_dir import RunDirectory
from longtake.tracking.tracker import MediaFile, TrackedRecord

EVENTS = frozenset({"resumed", "data_changed", "anomaly_detected", "update_skipped"})
EVENTS |= {"rolled_back", "diverged", "interrupted"}
"""Kinds of events that trackers get; other facts are in rows and evaluations."""

_MAX_LINES = 1000  # lines read at a time, which limits the memory
_RESCAN_SECONDS = 30.0
_SPEEDS = ("tokens_per_second", "step_seconds", "mfu")
_MAX_SECONDS_INCOMPLETE = 60.0

Result = tuple[str, int, str]
"""Identity of an evaluation result: preset, step and key of the weights."""


@dataclass(frozen=True)
class Cursor:
    """Position in a run directory up to which a tracker has got the run's records."""

    metrics_offset: fsio.Count = 0  # byte offset in metrics.jsonl
    events_offset: fsio.Count = 0  # byte offset in events.jsonl
    rows: fsio.Count = 0  # number of the next record
    evaluations: frozenset[Result] = frozenset()  # evaluations that the tracker has

    @staticmethod
    def load(path: Path) -> "Cursor":
        # A damaged cursor must not end the following: everything is then sent again.
        with suppress(errors.RecordError):
            return fsio.read_record(path, Cursor) or Cursor()
        return Cursor()

    def save(self, path: Path) -> None:
        """Write this position of the tracker to a file, and flush the file to disk.

        Raises:
            OSError: the file cannot be written; the folder of a deleted run is not created again.
        """
        path.parent.mkdir(exist_ok=True)
        fsio.write_json(path, {**asdict(self), "evaluations": sorted(self.evaluations)})


@dataclass(frozen=True)
class Updates:
    """New records of a run for one tracker, in the order of sending, and the position after."""

    records: list[TrackedRecord]
    cursor: Cursor


class UpdateReader:
    """Reader of a run's new records for one tracker; `warnings` are lines for the log."""

    def __init__(self, run: RunDirectory) -> None:
        self.warnings: list[str] = []
        self._run, self._folder = run, EvaluationDirectory(run).path
        self._warned: set[str] = set()
        self._seen: dict[Path, int] = {}
        self._scanned = float("-inf")
        self._damaged: dict[Path, tuple[int, ...]] = {}  # versions of damaged files
        self._incomplete: dict[Result, float] = {}

    def read(self, cursor: Cursor, *, thoroughly: bool = False) -> Updates:
        """Read the run's records since a position, without lines that are still being written.

        Args:
            cursor: the position of the tracker.
            thoroughly: look for evaluations even if no folder seems to have changed.
        """
        rows, metrics_offset = _lines_after(self._run.metrics_path, cursor.metrics_offset)
        events, events_offset = _lines_after(self._run.events_path, cursor.events_offset)
        # A line without step and time cannot be placed on any axis of a tracker.
        found = [
            _row_record(row)
            for row in rows
            if isinstance(row.get("step"), int) and isinstance(row.get("time"), int | float)
        ]
        for event in events:
            if str(event.get("event")) in EVENTS:
                if _is_event(event):
                    found.append(_event_record(event))
                else:
                    self._warn(f"{self._run.events_path}: lines that are no events are left out.")
        results: dict[Result, TrackedRecord] = {}
        is_due = self._may_have_come() or thoroughly
        for path in sorted(self._folder.glob("*/step_*/scores.json")) if is_due else ():
            scores = self._scores(path)
            if scores is not None:
                result = scores["preset"], scores["step"], scores["key"]
                if result not in cursor.evaluations and self._may_be_sent(result, scores, path):
                    results[result] = _evaluation_record(scores, path.parent)
        found += sorted(results.values(), key=lambda each: each.time)
        # No copy if nothing came: a long run has thousands of evaluations.
        evaluations = cursor.evaluations | results.keys() if results else cursor.evaluations
        return Updates(found, Cursor(metrics_offset, events_offset, cursor.rows, evaluations))

    def forget(self) -> None:
        self._scanned = float("-inf")

    def _may_be_sent(self, result: Result, scores: Scores, path: Path) -> bool:
        """Return True if all files of an evaluation exist, or have been missing for a minute.

        Files come late when another machine copies them; after a minute they were deleted.
        """
        if all((path.parent / name).is_file() for name in _files(scores)):
            self._incomplete.pop(result, None)
            return True
        # Timed by this process's clock, as a copy may keep the file times of its source.
        began = self._incomplete.setdefault(result, time.monotonic())
        is_long = time.monotonic() > began + _MAX_SECONDS_INCOMPLETE
        if is_long:
            del self._incomplete[result]
        return is_long

    def _scores(self, path: Path) -> Scores | None:
        """Read the scores.json of an evaluation; None if it cannot be read.

        A damaged file is not read again until it changes.
        """
        try:
            status = path.stat()
            # ctime too: a copy may have the size and the mtime of the damaged file.
            now = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            if self._damaged.get(path) == now:
                return None
            return fsio.parse_record(fsio.read_regular(path), SCORES, path)
        except FileNotFoundError:  # it was just replaced by a newer result
            return None
        except OSError as error:  # of the disk or network: the next attempt may succeed
            self._warn(f"{path} cannot be read now: {error!r}")
            return None
        except errors.RecordError as error:
            self._damaged[path] = now
            self._warn(f"{error} It is left out.")
            return None

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.warnings.append(text)

    def _may_have_come(self) -> bool:
        """Return True if a folder of evaluations has changed, or was not scanned for 30 s.

        Modification times are coarse, so a change can leave them equal.
        """
        seen = {}
        # A preset's folder changes when a result is renamed into it, which is when it is complete.
        with suppress(OSError):
            seen = {each: each.stat().st_mtime_ns for each in self._folder.iterdir()}
        is_late = time.monotonic() > self._scanned + _RESCAN_SECONDS
        if seen == self._seen and not self._incomplete and not is_late:
            return False
        self._seen, self._scanned = seen, time.monotonic()
        return True


def _row_record(row: Mapping[str, Any]) -> TrackedRecord:
    identity = {"train/step": row["step"], "train/time": row["time"]}
    row = dict(row)
    shape = row.pop("bucket", None)
    if isinstance(shape, list):
        # Buckets differ in speed, so that each has a curve: frames x height x width.
        bucket = "x".join(map(str, shape))
        row |= {f"{name}/{bucket}": row[name] for name in _SPEEDS if name in row}
        row.pop("tokens_per_second", None)
    scalars = {f"train/{name}": value for name, value in _scalars(row)}
    rest = {name: value for name, value in scalars.items() if name not in identity}
    return TrackedRecord("train", row["step"], row["time"], identity, rest)


def _event_record(event: Mapping[str, Any]) -> TrackedRecord:
    facts = {name: value for name, value in event.items() if name not in ("event", "time")}
    message = facts.pop("message", None)
    text = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    text = f"{message} ({text})" if message else text
    step, seconds = event.get("step") or 0, datetime.fromisoformat(event["time"]).timestamp()
    identity = {"events/step": step, "events/time": seconds}
    return TrackedRecord(
        "events", step, seconds, identity, texts={f"events/{event['event']}": text}
    )


def _evaluation_record(scores: Scores, folder: Path) -> TrackedRecord:
    """Build the tracker's record of an evaluation, with those of its files that exist."""
    preset, step = scores["preset"], scores["step"]
    prefix = f"eval/{preset}"
    measured: dict[str, float | None] = {**scores["measures"]}
    measured |= {f"held_out/{sigma}": loss for sigma, loss in scores.get("held_out", {}).items()}
    alarms = "\n\n".join(alarm["message"] for alarm in scores["alarms"])
    return TrackedRecord(
        "eval",
        step,
        datetime.fromisoformat(scores["time"]).timestamp(),
        {"eval/preset": preset, "eval/checkpoint_step": step, "eval/key": scores["key"]},
        {f"{prefix}/{name}": float(value) for name, value in measured.items() if value is not None},
        {f"{prefix}/alarms": alarms} if alarms else {},
        {
            f"{prefix}/{Path(name).stem}": MediaFile(folder / name, caption)
            for name, caption in _files(scores).items()
            if (folder / name).is_file()
        },
    )


def _files(scores: Scores) -> dict[str, str]:
    videos = {
        each["file"]: f"{each['prompt']} ({note_of_video(each['seed'], each.get('settings', {}))})"
        for each in scores["videos"]
    }
    return {**videos, "sheet.png": ""}


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield name and value of each number of a metrics row; nested ones are called outer/inner."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def _is_event(event: Mapping[str, Any]) -> bool:
    """Return True if a record is an event: it has a valid time, and an integer step or none."""
    if not isinstance(event.get("step"), int | None):
        return False
    try:
        datetime.fromisoformat(event["time"]).timestamp()
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return False
    return True


def _lines_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a file from a byte offset on, and the offset after them."""
    try:
        return fsio.read_new_records(path, dict[str, Any], offset, _MAX_LINES)
    except FileNotFoundError:
        return [], offset
