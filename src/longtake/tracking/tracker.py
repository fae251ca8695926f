"""What a tracker is: where rows, events and evaluations are written to."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from longtake.tracking.cursor import Position
from longtake.tracking.news import Evaluation


class Tracker(Protocol):
    """One tracker; used by one thread. All of it may raise whatever its library raises."""

    name: str
    """Such as `tensorboard`; that of its cursor too."""

    def open(self, position: Position) -> int:
        """Make ready; returns the number of the next row, not less than `position.rows`.

        What of the time after `position` has arrived all the same is not taken a second time.
        """

    def write_row(self, number: int, row: Mapping[str, Any]) -> bool:
        """Take a line of metrics.jsonl; whether it was taken, and its number is used up."""

    def write_event(self, number: int, event: Mapping[str, Any]) -> bool:
        """Take a line of events.jsonl, likewise."""

    def write_evaluation(self, number: int, evaluation: Evaluation) -> bool:
        """Take a result, likewise."""

    def flush(self) -> int:
        """Send on its way what was taken.

        Returns:
            The number below which all rows will be there whatever becomes of this process.
        """

    def close(self) -> int:
        """Flush and end; returns what `flush` does. It can be opened again."""


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a row, those inside others by the names of both; without what is none."""
    for name, value in row.items():
        if isinstance(value, list):
            value = {str(place): each for place, each in enumerate(value)}
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def words(event: Mapping[str, Any]) -> str:
    """What an event says, in a line."""
    facts = {name: value for name, value in event.items() if name not in ("event", "time")}
    message = facts.pop("message", None)
    listed = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    return f"{message} ({listed})" if message else listed


def wait_for_a_second_of_its_own(folder: Path, pattern: str) -> int:
    """Return the second (since 1970) that it is, when no file's name has it.

    Trackers name files by seconds, and read them in that order.

    Args:
        folder: of the files.
        pattern: of their names; `{second}` is replaced, and time.strftime's directives are.
    """
    while True:
        second = int(time.time())
        name = time.strftime(pattern, time.localtime(second)).replace("{second}", f"{second:010d}")
        if not any(folder.glob(name)):
            return second
        time.sleep(0.05)
