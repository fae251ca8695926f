"""Reads a run's nodes: heartbeats as they are now, and measurements over the past.

If there are many nodes, only the ends of health.jsonl and a few earlier lines are read; later calls
read what is new.
"""

import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from io import BufferedReader
from typing import Annotated, Any, Final, NotRequired

import numpy as np
import pydantic_core
from pydantic import Field
from typing_extensions import TypedDict

from longtake import fsio
from longtake.errors import RecordError
from longtake.formatting import natural_key, one_line
from longtake.fsio import open_below
from longtake.inspection.columns import Numbers
from longtake.inspection.files import folder_names, read_below
from longtake.inspection.nodes import NodeState, state_of_node
from longtake.node_dir import NodeDirectory, nodes_path
from longtake.node_numbers import COLUMNS, by_device, columns_of, links_down, numbers_of
from longtake.run_dir import RunDirectory

_HEARTBEAT_BYTES = 2**22
_MOST_NODES, _MOST_RANKS = 20_000, 100_000
_MOST_PROBLEMS = 5

_Name = Annotated[str, Field(max_length=300)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _Rank(TypedDict):
    """A rank's entry in the list `ranks` of a node's heartbeat.json."""

    rank: fsio.Count
    local_rank: NotRequired[fsio.Count]
    step: fsio.Count
    phase: _Name
    seconds: NotRequired[_Seconds]


class _Means(TypedDict):
    """A rank's entry in the list `phase_means` of a node's heartbeat.json: seconds by phase."""

    rank: fsio.Count
    local_rank: fsio.Count
    step: fsio.Count
    work_seconds: NotRequired[_Seconds]
    phases: NotRequired[dict[_Name, _Seconds]]


class _Beat(TypedDict):
    """The keys of nodes/<host>/heartbeat.json that pages of the board use."""

    ranks: NotRequired[list[_Rank]]
    phase_means: NotRequired[list[_Means]]
    health: NotRequired[dict[str, Any]]
    ended: NotRequired[bool]


@dataclass(frozen=True)
class RankNow:
    """The state of a rank when its node's watcher last wrote a heartbeat."""

    host: str
    rank: int
    local_rank: int
    step: int | None
    phase: str  # empty if it has ended or is not known
    seconds: float | None  # since the phase began
    work_seconds: float | None  # its own work for a step
    step_seconds: float | None  # from step to step
    phases: Mapping[str, float]  # mean seconds by phase in a step
    health: Mapping[str, float]  # measurements of its node

    def of_gpu(self, name: str) -> float | None:
        """Return a health number of the rank's GPU; its number is the local rank."""
        return self.health.get(f"{name}:{self.local_rank}")


@dataclass(frozen=True)
class NodeNow:
    """The state of a node when its watcher last wrote a heartbeat."""

    host: str
    state: NodeState
    silent_seconds: float | None
    ranks: Sequence[RankNow]
    health: Mapping[str, float]
    numbers: Mapping[str, float]  # the worst device's value, by column of the table
    links_down: Sequence[str]


def read_nodes(run: RunDirectory, *, is_live: bool) -> tuple[list[NodeNow], list[str]]:
    """Return a run's nodes sorted by name, and sentences about heartbeats that cannot be read.

    If the run is not being trained (`is_live` is false), a node that writes nothing has ended.
    """
    found, problems, num_ranks = list[NodeNow](), list[str](), 0
    for host in hosts_of(run):
        node = NodeDirectory(run, host)
        beat: _Beat = {}
        try:
            name = node.heartbeat_path.relative_to(run.path).as_posix()
            beat = read_below(run.path, name, _Beat, _HEARTBEAT_BYTES) or {}
        except RecordError as error:
            problems.append(one_line(error))
        state, silent = state_of_node(node, beat, is_live=is_live)
        health = numbers_of(beat.get("health", {}))
        ranks = tuple(_ranks(host, beat, health))
        now = NodeNow(
            host=host,
            state=state if beat else "unread",
            silent_seconds=silent,
            ranks=ranks,
            health=health,
            numbers=columns_of(health),
            links_down=links_down(health),
        )
        num_ranks += len(ranks)
        found.append(now)
        if num_ranks > _MOST_RANKS:
            problems.append(f"Only the first {len(found):,} nodes are shown.")
            break
    left = len(problems) - _MOST_PROBLEMS
    return found, problems[:_MOST_PROBLEMS] + ([f"And {left} more files."] if left > 0 else [])


def hosts_of(run: RunDirectory) -> list[str]:
    return sorted(folder_names(run.path, nodes_path(run).name), key=natural_key)[:_MOST_NODES]


def _ranks(host: str, beat: _Beat, health: Mapping[str, float]) -> Iterator[RankNow]:
    """Yield a node's ranks, running or ended, with what its watcher's heartbeat says of each."""
    work, speed = by_device(health, "step_work_seconds"), by_device(health, "steps_per_second")
    living = {each["rank"]: each for each in beat.get("ranks", ())}
    means = {each["rank"]: each for each in beat.get("phase_means", ())}
    measured = {int(each) for each in work if each.isdecimal() and len(each) < 10}
    # A heartbeat without entries for ranks may still have measurements of them.
    for place, rank in enumerate(sorted({*living, *means} or measured)):
        now, mean = living.get(rank), means.get(rank)
        known: Mapping[str, Any] = now or mean or {}
        steps = speed.get(str(rank), 0.0)
        yield RankNow(
            host=host,
            rank=rank,
            local_rank=int(known.get("local_rank", place)),
            step=known.get("step"),
            phase=now["phase"] if now else "",
            seconds=now.get("seconds") if now else None,
            work_seconds=work.get(str(rank), mean.get("work_seconds") if mean else None),
            step_seconds=1 / steps if steps > 0 else None,
            phases=mean.get("phases", {}) if mean else {},
            health=health,
        )


# --- The past ---------------------------------------------------------------------------------

DRAWN: Final = tuple(label for label, column in COLUMNS.items() if column.is_drawn)
"""Labels of the health numbers of nodes that a page draws over time."""
_LABELS: Final = {COLUMNS[label].number: label for label in DRAWN}
# Bytes of the ends of files that are read at first: of all nodes; of each node at least.
_END_BYTES, _LEAST_END_BYTES = 8 * 2**20, 2**13
# Lines before these ends that are read: of all nodes; of each node at most.
_SPREAD_LINES, _MOST_SPREAD = 2000, 60
_LINE_BYTES = 2**16
_MOST = 1e300
# Points that are kept: of all nodes; of each node at least.
_KEPT_POINTS, _LEAST_KEPT = 300_000, 64


@dataclass
class _Past:
    """Measurements over the past that were read from one node's health.jsonl."""

    offset: int = 0
    inode: int = 0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    values: dict[str, "array[float]"] = field(
        default_factory=lambda: {label: array("d") for label in DRAWN}
    )

    def add(self, line: bytes) -> None:
        record: Any = None
        with suppress(ValueError):
            record = pydantic_core.from_json(line, allow_inf_nan=False)
        at = _time_of(record) if isinstance(record, dict) else None
        if at is None:
            return
        self.times.append(at)
        found: dict[str, list[float]] = {}
        for key, value in record.items():
            label = _LABELS.get(key.partition(":")[0])
            if label and type(value) in (int, float) and abs(value) < _MOST:
                found.setdefault(label, []).append(value)
        for label, values in self.values.items():
            own = found.get(label)
            values.append(COLUMNS[label].worst(own) if own else np.nan)

    def thin(self, most: int) -> None:
        """Remove every second point in the past's older half if it has over `most` points."""
        if len(self.times) <= most:
            return
        half = len(self.times) // 2
        for each in (self.times, *self.values.values()):
            # The newest half keeps its resolution.
            each[:half] = each[:half:2]


def _time_of(record: Mapping[str, Any]) -> float | None:
    text = record.get("time")
    with suppress(ValueError, OverflowError):
        if isinstance(text, str) and len(text) < 64:
            at = datetime.fromisoformat(text).timestamp()
            return at if 0 <= at < 1e11 else None
    return None


class HealthHistory:
    """Measurements of a run's nodes over time; each line is read at most once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, _Past] = {}
        self.is_thin = False
        """True if some lines of the nodes' health.jsonl files were left out."""

    def update(self, run: RunDirectory, hosts: Sequence[str]) -> None:
        with self._lock:
            count = max(1, len(hosts))
            # All nodes share one budget, so that a page of many takes no longer than one of few.
            end = max(_LEAST_END_BYTES, _END_BYTES // count)
            spread = min(_MOST_SPREAD, _SPREAD_LINES // count)
            for host in hosts:
                with suppress(OSError):
                    self._read(run, host, end, spread)
                past = self._of.get(host)
                if past is not None:
                    past.thin(max(_LEAST_KEPT, _KEPT_POINTS // count))

    def _read(self, run: RunDirectory, host: str, end: int, spread: int) -> None:
        name = f"{nodes_path(run).name}/{host}/{NodeDirectory(run, host).health_path.name}"
        with open_below(run.path, name) as file:
            status = os.fstat(file.fileno())
            past = self._of.get(host)
            # A file that was replaced or has shrunk is read from its beginning.
            if past is None or past.inode != status.st_ino or status.st_size < past.offset:
                past = self._of[host] = _Past(inode=status.st_ino)
            begin = max(past.offset, status.st_size - end)
            if begin > past.offset:
                self.is_thin = True
                for line in _spread(file, past.offset, begin, spread):
                    past.add(line)
                # Seek to the byte before, so that a line that begins exactly here is not skipped.
                file.seek(begin - 1)
                begin += len(file.readline(_LINE_BYTES)) - 1
            file.seek(begin)
            data = file.read(status.st_size - begin)
        # The watcher may be writing the last line: it is read next time.
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            past.add(line)
        past.offset = begin + whole

    def of(self, host: str, label: str) -> tuple[Numbers, Numbers]:
        """Return times (seconds since 1970) and values of one health number of a node, in order."""
        with self._lock:
            past = self._of.get(host)
            if past is None:
                return np.empty(0), np.empty(0)
            times, values = np.array(past.times), np.array(past.values[label])
        order = np.argsort(times, kind="stable")
        return times[order], values[order]


def _spread(file: BufferedReader, first: int, end: int, count: int) -> Iterable[bytes]:
    """Yield `count` whole lines of a health.jsonl, evenly spread between two byte offsets."""
    for number in range(count):
        file.seek(first + (end - first) * number // count)
        # Any offset but 0 may be inside a line.
        if number or first:
            file.readline(_LINE_BYTES)
        line = file.readline(_LINE_BYTES)
        if file.tell() > end:
            return
        yield line
