"""What a run directory has gained: rows of metrics, events, evaluations. Reads nothing twice."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from longtake.errors import RecordError
from longtake.evaluation_dir import SCORES, EvaluationDirectory, Scores
from longtake.fsio import parse_record, read_new_records, read_regular
from longtake.run_dir import RunDirectory
from longtake.tracking.cursor import Position, Result

EVENTS = frozenset(
    {"resumed", "data_changed", "suspected", "skipped", "rolled_back", "diverged", "interrupted"}
)
"""Kinds of events that trackers are told of; rows and evaluations say the rest."""

_MOST_LINES = 1000
_RESCAN_SECONDS = 30.0
_SECONDS_TO_BE_WHOLE = 60.0


@dataclass(frozen=True)
class Evaluation:
    """One result: what was measured of a checkpoint, and the files that show it."""

    scores: Scores
    folder: Path

    @property
    def identity(self) -> Result:
        """What tells it from others."""
        return self.scores["preset"], self.scores["step"], self.scores["key"]

    @property
    def time(self) -> float:
        """When it was made, in seconds since 1970, for people to read."""
        return datetime.fromisoformat(self.scores["time"]).timestamp()

    @property
    def sheet(self) -> Path | None:
        """Its videos as one picture, if there is one."""
        path = self.folder / "sheet.png"
        return path if path.is_file() else None

    @property
    def is_whole(self) -> bool:
        """Whether all its files are there; of one that is copied here, they come one by one."""
        videos = (self.folder / video["file"] for video in self.scores["videos"])
        return self.sheet is not None and all(path.is_file() for path in videos)

    def videos(self) -> Iterator[tuple[Path, str]]:
        """Each video file that is there, with the prompt and the seed it was made of."""
        for video in self.scores["videos"]:
            path = self.folder / video["file"]
            if path.is_file():
                yield path, f"{video['prompt']} (seed {video['seed']})"

    def scalars(self) -> dict[str, float]:
        """All that was measured: `<measure>`, and `held_out/<sigma>`."""
        held_out = self.scores.get("held_out", {})
        measured: dict[str, float | None] = {**self.scores["measures"]}
        measured |= {f"held_out/{sigma}": loss for sigma, loss in held_out.items()}
        return {name: float(value) for name, value in measured.items() if value is not None}


Record = tuple[Literal["row", "event"], dict[str, Any]] | tuple[Literal["evaluation"], Evaluation]


@dataclass(frozen=True)
class News:
    """What has come since a position, and the position after it."""

    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluations: list[Evaluation]
    position: Position

    def __bool__(self) -> bool:
        return bool(self.rows or self.events or self.evaluations)

    def records(self) -> Iterator[Record]:
        """All of it, each with what it is, in the order in which it is told."""
        for row in self.rows:
            yield "row", row
        for event in self.events:
            yield "event", event
        for evaluation in self.evaluations:
            yield "evaluation", evaluation


@dataclass
class Reader:
    """Reads a run directory for one tracker.

    At most so many lines at a time that they need no memory to speak of.
    """

    run: RunDirectory
    complaints: list[str] = field(default_factory=list)
    """Of what cannot be read, each once."""
    _seen: dict[Path, int] = field(default_factory=dict)
    _scanned: float = float("-inf")
    _bad: dict[Path, tuple[int, ...]] = field(default_factory=dict)  # as they were when read
    _said: set[str] = field(default_factory=set)
    _waited_for: dict[Result, float] = field(default_factory=dict)

    def read(self, position: Position, *, thoroughly: bool = False) -> News:
        """What has come since; lines that are still being written wait.

        Args:
            position: up to where it was read.
            thoroughly: look at each result's folder, though nothing seems to have come.
        """
        rows, metrics_offset = _lines_after(self.run.metrics_path, position.metrics_offset)
        events, events_offset = _lines_after(self.run.events_path, position.events_offset)
        results = self._results_after(position, thoroughly)
        identities = {each.identity for each in results}
        after = replace(
            position,
            metrics_offset=metrics_offset,
            events_offset=events_offset,
            evaluations=position.evaluations | identities if identities else position.evaluations,
        )
        told = [event for event in events if str(event.get("event")) in EVENTS]
        whole = [event for event in told if _is_event(event)]
        if len(whole) < len(told):
            self._complain(f"{self.run.events_path}: lines that are no events are left out.")
        return News([row for row in rows if _is_row(row)], whole, results, after)

    def forget(self) -> None:
        """Look at all results again at the next reading, whichever position it is from."""
        self._scanned = float("-inf")

    def _results_after(self, position: Position, thoroughly: bool) -> list[Evaluation]:
        if not self._may_have_come() and not thoroughly:
            return []
        found = []
        for path in sorted(EvaluationDirectory(self.run).path.glob("*/step_*/scores.json")):
            each = self._result(path)
            is_new = each is not None and each.identity not in position.evaluations
            if each is not None and is_new and self._may_be_told(each):
                found.append(each)
        return sorted(found, key=lambda each: each.time)

    def _may_be_told(self, evaluation: Evaluation) -> bool:
        """Whether it is whole, or has not become so in a minute: somebody has deleted files."""
        if evaluation.is_whole:
            self._waited_for.pop(evaluation.identity, None)
            return True
        began = self._waited_for.setdefault(evaluation.identity, time.monotonic())
        is_long = time.monotonic() > began + _SECONDS_TO_BE_WHOLE
        if is_long:
            del self._waited_for[evaluation.identity]
        return is_long

    def _result(self, path: Path) -> Evaluation | None:
        """None where it cannot be read: it is tried again when its file is another."""
        try:
            now = _signature(path)
            if self._bad.get(path) == now:
                return None
            scores = parse_record(read_regular(path), SCORES, path)
        except FileNotFoundError:  # it has just given way to a newer one
            return None
        except OSError as error:  # of the disk or the network: the next look may do better
            self._complain(f"{path} cannot be read now: {error!r}")
            return None
        except RecordError as error:
            self._bad[path] = now
            self._complain(f"{error} It is left out.")
            return None
        return Evaluation(scores, path.parent)

    def _complain(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.complaints.append(text)

    def _may_have_come(self) -> bool:
        """Whether a folder of results has changed; now and then yes, as clocks are coarse."""
        folder = EvaluationDirectory(self.run).path
        seen = {}
        with suppress(OSError):
            seen = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
        is_late = time.monotonic() > self._scanned + _RESCAN_SECONDS
        if seen == self._seen and not self._waited_for and not is_late:
            return False
        self._seen, self._scanned = seen, time.monotonic()
        return True


def _is_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("time"), int | float)


def _is_event(event: Mapping[str, Any]) -> bool:
    """Whether it says when it was, and of no step that is none."""
    if not isinstance(event.get("step"), int | None):
        return False
    try:
        datetime.fromisoformat(event["time"]).timestamp()
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return False
    return True


def _signature(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _lines_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Records from a byte on, and the byte after them; what is no record is left out."""
    try:
        return read_new_records(path, dict[str, Any], offset, _MOST_LINES)
    except FileNotFoundError:
        return [], offset
