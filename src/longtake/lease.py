"""Leases in a shared folder: at most one process holds one; a dead or hung holder loses it.

The folder has one file per holder so far: 0.json, 1.json, ... The newest is the current holder's.
Only the process that takes the lease creates and writes its file; it increments `beat` while it
lives. Clocks of different machines are never compared: a waiting process measures by its own clock
for how long the beat has not changed. On the holder's machine it also checks that the holder runs.
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
    """One holder of a lease: the content of the holder's file. A holder may add fields."""

    host: str
    pid: Count
    place: str | None
    """Boot id and pid namespace of the holder's machine, within which `pid` and `started` are
    valid."""
    started: Count | None
    """Start of the holder's process, in clock ticks since boot."""
    time: Time
    """Time at which the holder took the lease."""
    seconds: Annotated[float, Field(gt=0, le=86400)]
    """Seconds after which the lease is lost if `beat`, which its holder counts up, has not
    changed."""
    beat: Count
    ended: str | None
    """The reason for which the holder gave the lease back; None: it has not."""


def history(folder: Path) -> list[dict[str, Any]]:
    found = (_read(folder / f"{number}.json") for number in range(_count(folder)))
    return [dict(each) for each in found if each]


def newest(folder: Path) -> dict[str, Any] | None:
    number = _count(folder)
    record = _read(folder / f"{number - 1}.json") if number else None
    return None if record is None else dict(record)


def is_alive(record: Mapping[str, Any]) -> bool | None:
    """Return True if a lease's holder runs on this machine, False if it has ended there.

    None: it cannot be known, because the holder runs on another machine or in another container.
    """
    if record["started"] is None or record["place"] != pid_namespace():
        return None
    return bool(start_ticks(record["pid"]) == record["started"])


def has_same_owner(record: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
    return any(value and record.get(name) == value for name, value in owner.items())


@dataclass
class Lease:
    """A lease (the sole right to a work in a shared folder) that this process has taken.

    Attributes:
        folder: the lease's folder.
        number: number of earlier holders, and name of this holder's file.
        record: content of this holder's file.
    """

    folder: Path
    number: int
    record: dict[str, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _moved: float = field(default_factory=time.monotonic)
    # Unlike `_moved` by CLOCK_BOOTTIME: other machines count on while this one is suspended.
    _renewed: float = field(default_factory=boot_seconds)

    @property
    def is_held(self) -> bool:
        return _count(self.folder) == self.number + 1

    def renew(self, **facts: Any) -> None:
        """Renew the lease: increment its `beat`, and write `facts` into its record.

        Raises:
            OSError: the lease's file cannot be written.
        """
        with self._lock:
            # A thread that renews may come just after `end`, and must not undo it.
            if self.record["ended"] is None:
                self._write(beat=self.record["beat"] + 1, **facts)
                self._renewed = boot_seconds()

    def moved(self) -> None:
        self._moved = time.monotonic()

    def end(self, how: str, **facts: Any) -> None:
        """Give the lease back, and record in its file how the work ended.

        Raises:
            OSError: the lease's file cannot be written.
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
    """Takes leases for this process, and remembers how long others' leases have not changed.

    Args:
        seconds: time within which this process promises to renew a lease.
        owner: further fields of this process's lease records.
        inherits: names of fields in `owner`. A lease with the same, non-empty value in one of them
            is free at once unless its holder is known to run: it was left by this job's
            predecessor.
    """

    def __init__(
        self, seconds: float, owner: Mapping[str, Any], inherits: Sequence[str] = ()
    ) -> None:
        self._seconds, self._owner = seconds, dict(owner)
        self._inherits = {name: owner[name] for name in inherits}
        self._seen: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> Lease | None:
        """Take the lease of a folder if it is free or was lost by its holder; else return None.

        Raises:
            OSError: the folder cannot be written.
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
        # Two processes may both find the lease free. write_once creates the file exclusively, so
        # only one of them gets this number.
        is_first = write_once(folder / f"{number}.json", record)
        return Lease(folder, number, record) if is_first else None

    def _is_free(self, path: Path) -> bool:
        record = _read(path)
        if record is not None and record["ended"] is not None:
            self._seen.pop(path, None)
            return True
        # On this machine /proc decides at once; `alive` is None for a holder elsewhere.
        if record is not None:
            alive = is_alive(record)
            if alive is False or (has_same_owner(record, self._inherits) and not alive):
                return True
        # The holder is elsewhere, or its record cannot be read: it loses the lease once this
        # process has seen the same beat for the promised time.
        beat, at = record["beat"] if record else 0, time.monotonic()
        before = self._seen.setdefault(path, (beat, at))
        if before[0] != beat:
            self._seen[path] = before = (beat, at)
        # The time that the holder promised, which may differ from this process's own.
        return at - before[1] > (record["seconds"] if record else self._seconds)


@contextmanager
def kept(lease: Lease, stuck_seconds: float = float("inf")) -> Iterator[Lease]:
    """Renew a lease of this process in a thread until the block ends.

    It is not renewed while the work has not `moved` for `stuck_seconds`, or once another process
    has taken the lease.
    """

    def renew() -> None:
        if lease.still_seconds() < stuck_seconds and lease.is_held:
            with suppress(OSError):  # a full disk: it is lost, if that lasts
                lease.renew()

    # Several beats per lease, so that a single late one does not lose it.
    lease.moved()
    with periodic("lease", renew, lease.record["seconds"] / _BEATS_PER_LEASE):
        yield lease


def _read(path: Path) -> LeaseRecord | None:
    with suppress(RecordError):
        return read_record(path, LeaseRecord)
    return None


def _count(folder: Path) -> int:
    # One listing, then the first free number: looking up each name asks a network disk each time.
    names = {path.name for path in folder.glob("[!.]*.json")} if folder.is_dir() else set()
    return next(number for number in count() if f"{number}.json" not in names)
