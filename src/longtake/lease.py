"""Leases: one at a time works on something, and whoever dies or hangs over it loses it.

A folder holds a file for each who has had the lease so far: 0.json, 1.json, ... The newest has it.
Each file is made once, by whoever gets the lease, and written by nobody else; its `beat` rises as
long as its holder lives. No clocks are compared: who wants a lease sees by its own whether the
beat has changed; and where it runs on the holder's machine, whether that process still exists.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtake.records import now, read_json, write_json, write_once
from longtake.repeated import repeated

_BEATS_PER_LEASE = 4


def history(folder: Path) -> list[dict[str, Any]]:
    """The records of all who have had a lease, the first one first.

    Each has `host`, `pid`, `time` (when it was taken), `seconds` (within which it promises a new
    `beat`), `ended` (None, or how), and whatever its holder has added.
    """
    found = (read_json(folder / f"{number}.json") for number in range(_count(folder)))
    return [each for each in found if each]


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

    @property
    def is_held(self) -> bool:
        """Whether nobody has taken it over."""
        return _count(self.folder) == self.number + 1

    def renew(self, **facts: Any) -> None:
        """Tell the others that this process lives, and whatever else there is to say.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if self.record["ended"] is None:
                self._write(beat=self.record["beat"] + 1, **facts)

    def moved(self) -> None:
        """Note that the work goes on: `kept` renews no lease over which its holder hangs."""
        self._moved = time.monotonic()

    def end(self, how: str, **facts: Any) -> None:
        """Give it back, and say how it ended.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            self._write(ended=how, **facts)

    def still_seconds(self) -> float:
        """How long ago the work last moved."""
        return time.monotonic() - self._moved

    def _write(self, **facts: Any) -> None:
        self.record = {**self.record, **facts}
        write_json(self.folder / f"{self.number}.json", self.record)


class Leases:
    """Takes leases for one process, and remembers for how long others' have not changed.

    Args:
        seconds: within which this process promises signs of life.
        owner: what else the others may want to know of it.
    """

    def __init__(self, seconds: float, owner: Mapping[str, Any]) -> None:
        self._seconds, self._owner = seconds, dict(owner)
        self._seen: dict[Path, tuple[int, float]] = {}

    def take(self, folder: Path) -> Lease | None:
        """The lease, if nobody has it, or whoever had it has lost it; else None.

        Raises:
            OSError: it cannot be written.
        """
        count = _count(folder)
        if count and not self._is_free(folder / f"{count - 1}.json"):
            return None
        record = {**_this_process(), **self._owner, "time": now(), "seconds": self._seconds}
        record |= {"beat": 0, "ended": None}
        is_first = write_once(folder / f"{count}.json", record)
        return Lease(folder, count, record) if is_first else None

    def _is_free(self, path: Path) -> bool:
        record = read_json(path)
        if record.get("ended") is not None:
            self._seen.pop(path, None)
            return True
        if _is_gone(record):
            return True
        beat, at = int(record.get("beat", 0)), time.monotonic()
        before = self._seen.setdefault(path, (beat, at))
        if before[0] != beat:
            self._seen[path] = before = (beat, at)
        return at - before[1] > float(record.get("seconds", self._seconds))


@contextmanager
def kept(lease: Lease, stuck_seconds: float = float("inf")) -> Iterator[Lease]:
    """Renew a lease from a thread of its own, until the block ends.

    It is renewed no more when the work has not `moved` for `stuck_seconds`.
    """

    def renew() -> None:
        if lease.still_seconds() < stuck_seconds:
            with suppress(OSError):  # a full disk: it is lost, if that lasts
                lease.renew()

    lease.moved()
    with repeated("lease", renew, lease.record["seconds"] / _BEATS_PER_LEASE):
        yield lease


def _count(folder: Path) -> int:
    """How many files a lease has; they are numbered without gaps."""
    names = (path.stem for path in folder.glob("[!.]*.json")) if folder.is_dir() else ()
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "place": _place(),
        "started": _started(pid),
    }


def _is_gone(record: Mapping[str, Any]) -> bool:
    """Whether the holder was a process of this very machine (or container), and has ended."""
    pid, started = record.get("pid"), record.get("started")
    if not isinstance(pid, int) or started is None or record.get("place") != _place():
        return False
    return bool(_started(pid) != started)


def _place() -> str | None:
    """What all processes that see each other's numbers have in common; None where unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return None


def _started(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if stat[0] in (b"Z", b"X") else int(stat[19])
    return None
