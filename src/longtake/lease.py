"""Leases: one at a time works on something, and a process that dies or hangs loses it.

A folder holds a file for each who has had the lease so far: 0.json, 1.json, ... The newest has it.
Each file is made once, by the process that gets the lease, and written by no other; its `beat`
rises as long as its holder lives. No clocks are compared: who wants a lease sees by its own whether
the beat has changed; and where it runs on the holder's machine, whether that process still exists.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from longtake.errors import RecordError
from longtake.fsio import Count, Time, now, read_record, with_other_fields, write_json, write_once
from longtake.process import boot_seconds, periodic, pid_namespace, start_ticks

_BEATS_PER_LEASE = 4


@with_other_fields
class LeaseRecord(TypedDict):
    """One holder of a lease; a holder may add fields of its own."""

    host: str
    pid: Count
    place: str | None
    """Boot and pid namespace of the holder: `pid` and `started` mean something there only."""
    started: Count | None
    """When the process was started, in clock ticks since boot."""
    time: Time
    """When the lease was taken."""
    seconds: Annotated[float, Field(gt=0, le=86400)]
    """The holder promises a new `beat` within this time."""
    beat: Count
    ended: str | None
    """How the holder gave the lease back; None: it has not."""


def history(folder: Path) -> list[dict[str, Any]]:
    found = (_read(folder / f"{number}.json") for number in range(_count(folder)))
    return [dict(each) for each in found if each]


def newest(folder: Path) -> dict[str, Any] | None:
    number = _count(folder)
    record = _read(folder / f"{number - 1}.json") if number else None
    return None if record is None else dict(record)


def is_alive(record: Mapping[str, Any]) -> bool | None:
    if record["started"] is None or record["place"] != pid_namespace():
        return None
    return bool(start_ticks(record["pid"]) == record["started"])


def has_same_owner(record: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return any(value and record.get(name) == value for name, value in owner.items())


@dataclass
class Lease:
    """A lease that this process has taken.

    Attributes:
        folder: of the lease.
        number: how many had it before.
        record: as it was last written.
    """

    folder: Path
    number: int
    record: dict[str, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _moved: float = field(default_factory=time.monotonic)
    _renewed: float = field(default_factory=boot_seconds)

    @property
    def is_held(self) -> bool:
        return _count(self.folder) == self.number + 1

    def renew(self, **facts: Any) -> None:
        """Tell the others that this process lives, and whatever else there is to say.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if self.record["ended"] is None:
                self._write(beat=self.record["beat"] + 1, **facts)
                self._renewed = boot_seconds()

    def moved(self) -> None:
        self._moved = time.monotonic()

    def end(self, how: str, **facts: Any) -> None:
        """Give it back, and say how it ended.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            self._write(ended=how, **facts)

    def still_seconds(self) -> float:
        return time.monotonic() - self._moved

    def renewed_seconds(self) -> float:
        return boot_seconds() - self._renewed

    def _write(self, **facts: Any) -> None:
        self.record = {**self.record, **facts}
        write_json(self.folder / f"{self.number}.json", self.record)


class Leases:
    """Takes leases for one process, and remembers for how long others' have not changed.

    Args:
        seconds: within which this process promises signs of life.
        owner: what else the others may want to know of it.
        inherits: names in `owner`: a lease of which one has the same value, and is not empty, is
            free unless its holder is known to run.
    """

    def __init__(
        self, seconds: float, owner: Mapping[str, Any], inherits: Sequence[str] = ()
    ) -> None:
        self._seconds, self._owner = seconds, dict(owner)
        self._inherits = {name: owner[name] for name in inherits}
        self._seen: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> Lease | None:
        """The lease, if it is free or its holder has lost it; else None.

        Raises:
            OSError: it cannot be written.
        """
        number = _count(folder)
        if number and not self._is_free(folder / f"{number - 1}.json"):
            return None
        pid, place = os.getpid(), pid_namespace()
        who = {
            "host": socket.gethostname(),
            "pid": pid,
            "place": place,
            "started": start_ticks(pid),
        }
        record = {**who, **self._owner, "time": now(), "seconds": self._seconds}
        record |= {"beat": 0, "ended": None}
        is_first = write_once(folder / f"{number}.json", record)
        return Lease(folder, number, record) if is_first else None

    def _is_free(self, path: Path) -> bool:
        record = _read(path)
        if record is not None and record["ended"] is not None:
            self._seen.pop(path, None)
            return True
        if record is not None:
            alive = is_alive(record)
            if alive is False or (has_same_owner(record, self._inherits) and not alive):
                return True
        beat, at = record["beat"] if record else 0, time.monotonic()
        before = self._seen.setdefault(path, (beat, at))
        if before[0] != beat:
            self._seen[path] = before = (beat, at)
        return at - before[1] > (record["seconds"] if record else self._seconds)


@contextmanager
def kept(lease: Lease, stuck_seconds: float = float("inf")) -> Iterator[Lease]:
    """Renew a lease in a thread, until the block ends.

    It is not renewed when the work has not `moved` for `stuck_seconds`, or another has taken it.
    """

    def renew() -> None:
        if lease.still_seconds() < stuck_seconds and lease.is_held:
            with suppress(OSError):  # a full disk: it is lost, if that lasts
                lease.renew()

    lease.moved()
    with periodic("lease", renew, lease.record["seconds"] / _BEATS_PER_LEASE):
        yield lease


def _read(path: Path) -> LeaseRecord | None:
    with suppress(RecordError):
        return read_record(path, LeaseRecord)
    return None


def _count(folder: Path) -> int:
    names = {path.name for path in folder.glob("[!.]*.json")} if folder.is_dir() else set()
    return next(number for number in count() if f"{number}.json" not in names)
