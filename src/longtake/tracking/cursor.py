"""How far a tracker has been told: a small file that is replaced after what it counts has arrived.

Whoever writes to the tracker next goes on from there, so that nothing is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.fsio import read_json, write_json

Result = tuple[str, int, str]
"""Preset, step and key: what tells an evaluation from all others."""


@dataclass(frozen=True)
class Position:
    """Up to where a tracker has been told.

    Attributes:
        metrics_offset: bytes of metrics.jsonl.
        events_offset: bytes of events.jsonl.
        evaluations: those it has.
        rows: how many rows it has been given, over all its files; the number of the next one.
    """

    metrics_offset: int = 0
    events_offset: int = 0
    evaluations: frozenset[Result] = frozenset()
    rows: int = 0

    def as_record(self) -> dict[str, Any]:
        """What `position_of` reads."""
        return {
            "metrics_offset": self.metrics_offset,
            "events_offset": self.events_offset,
            "rows": self.rows,
            "evaluations": sorted(self.evaluations),
        }


def position_of(record: Mapping[str, Any]) -> Position:
    """The position that a record holds; the beginning, if it holds none."""
    try:
        results = [(str(name), int(step), str(key)) for name, step, key in record["evaluations"]]
        return Position(
            int(record["metrics_offset"]),
            int(record["events_offset"]),
            frozenset(results),
            int(record["rows"]),
        )
    except (LookupError, TypeError, ValueError):
        return Position()


def load(path: Path) -> Position:
    """The position in a file; the beginning, if there is no such file."""
    return position_of(read_json(path))


def save(path: Path, position: Position) -> None:
    """Replace the file, on disk when this returns.

    Raises:
        OSError: it cannot be written; the run may be gone, and is not made anew.
    """
    path.parent.mkdir(exist_ok=True)
    write_json(path, position.as_record())
