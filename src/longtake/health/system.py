"""The protocol of health probes, and the probes of disks, memory, CPUs and open files.

A number is called `name` or `name:device`, with its unit in the name.
"""

import errno
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

Numbers = dict[str, float]
"""Measured health numbers by `name` or `name:device`."""

HANGS = "check_hangs_seconds"
HANGING_SECONDS = 5.0
"""Seconds after which the earlier numbers of a probe that hangs are dropped."""
_NO_LIMIT = 2.0**60  # version 1 of cgroups has a number near 2**63 for "no limit"
_PROBE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


class HealthProbe:
    """Base of health probes, each of which measures one aspect of a node's health."""

    name: str
    numbers: Mapping[str, str]  # explanation of each number, by its name without device

    def sample(self) -> Numbers:
        """Return the probe's numbers, without any that cannot be measured; it never raises."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the files or handles that the probe holds."""


class ThreadedProbe(HealthProbe):
    """Health probe around one that may hang: gives its newest numbers, and how long it has hung.

    Args:
        probe: the probe; it is called in a thread of its own.
        patience_seconds: limit of the wait for it in `sample` and `close`.
    """

    numbers: Mapping[str, str] = {HANGS: "Time for which this probe of the node has been hanging"}

    def __init__(self, probe: HealthProbe, patience_seconds: float = 0.2) -> None:
        self.name = probe.name
        self._probe, self._patience_seconds = probe, patience_seconds
        self._found: Numbers = {}
        self._asked, self._answered = threading.Event(), threading.Event()
        self._is_closing = False
        self._since = math.inf  # time of the call that is under way; inf: there is none
        self._thread = threading.Thread(target=self._serve, name=f"probe {self.name}", daemon=True)
        self._thread.start()

    def sample(self) -> Numbers:
        if self._since == math.inf:
            self._answered.clear()
            self._since = time.monotonic()
            self._asked.set()
        # A probe that works answers within milliseconds, so its numbers are of this call.
        self._answered.wait(self._patience_seconds)
        # A sample that is late is returned by the next call; only one is ever under way.
        seconds = max(0.0, time.monotonic() - self._since)
        found = self._found if seconds < HANGING_SECONDS else {}
        return {**found, f"{HANGS}:{self.name}": round(seconds, 3)}

    def close(self) -> None:
        self._is_closing = True
        self._asked.set()
        self._thread.join(self._patience_seconds)

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_closing:
                self._probe.close()
                return
            try:
                self._found = self._probe.sample()
            except Exception:  # one failure must not end the probe for good
                self._found = {}
            # First the time, then the event: `sample` reads the time when the event wakes it.
            self._since = math.inf
            self._answered.set()


class Rates:
    """Converts counters of events that only rise to events per second."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def rate(self, name: str, device: str, count: float | None) -> Numbers:
        """Return a counter's rate since the last call with this name and device, as {name: rate}.

        It is rounded to 0.001. Empty: this is the first call, or the counter has fallen because the
        device was reset.
        """
        if count is None:
            return {}
        key, now = f"{name}:{device}", time.monotonic()
        before = self._before.get(key)
        self._before[key] = (now, count)
        if before is None or count < before[1] or now <= before[0]:
            return {}
        return {name: round((count - before[1]) / (now - before[0]), 3)}


def read_text(path: Path) -> str | None:
    """Read a small file of the kernel (/proc, /sys), stripped; None: it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> float | None:
    """Read a number from a small file of the kernel (/proc, /sys); None: it has none."""
    try:
        return float(read_text(path) or "")
    except ValueError:
        return None


class CgroupMemory(HealthProbe):
    """Health probe of the memory of this process's cgroup, version 1 or 2.

    Args:
        groups: file in which the kernel lists this process's cgroups.
        root: folder in which cgroups are mounted.
    """

    name = "cgroup"
    numbers: Mapping[str, str] = {
        "cgroup_memory_bytes": "Memory of the job's cgroup, its page cache included",
        "cgroup_memory_limit_bytes": "Memory that the cgroup may use; missing: no limit",
        "cgroup_memory_limit_hits_total": "Times that the cgroup reached its limit",
        "cgroup_oom_kills_total": "Processes that the kernel killed for lack of memory",
    }

    def __init__(
        self, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ) -> None:
        lines = [line.split(":", 2) for line in (read_text(groups) or "").splitlines()]
        paths = {controllers: path for _, controllers, path in lines}
        controllers = next((name for name in paths if "memory" in name.split(",")), None)
        self._files = _CGROUP_FILES[2 if controllers is None else 1]
        top = root if controllers is None else root / "memory"
        folder = top / paths.get(controllers or "", "/").lstrip("/")
        # In a container the listed path is often that of the host; then the container's own group
        # is at the root of the mount.
        is_there = (folder / self._files["cgroup_memory_bytes"][0]).exists()
        self._folder = folder if is_there else top

    def sample(self) -> Numbers:
        found: Numbers = {}
        for name, (file, key) in self._files.items():
            for line in (read_text(self._folder / file) or "").splitlines():
                word, _, value = line.rpartition(" ")
                # Without a limit version 2 says "max", and version 1 a number near 2**63.
                if word == key and value.isdecimal() and float(value) < _NO_LIMIT:
                    found[name] = float(value)
        return found


# Files by version of cgroups, and the first word of the line; empty: the file has one line.
_CGROUP_FILES: dict[int, dict[str, tuple[str, str]]] = {
    1: {
        "cgroup_memory_bytes": ("memory.usage_in_bytes", ""),
        "cgroup_memory_limit_bytes": ("memory.limit_in_bytes", ""),
        "cgroup_memory_limit_hits_total": ("memory.failcnt", ""),
        "cgroup_oom_kills_total": ("memory.oom_control", "oom_kill"),
    },
    2: {
        "cgroup_memory_bytes": ("memory.current", ""),
        "cgroup_memory_limit_bytes": ("memory.max", ""),
        "cgroup_memory_limit_hits_total": ("memory.events", "max"),
        "cgroup_oom_kills_total": ("memory.events", "oom_kill"),
    },
}


def oom_kills(machine: Path = Path("/proc/vmstat")) -> int:
    """Return the number of the job's processes that the kernel has killed for lack of memory.

    If this process's cgroup has no such count, it is that of the whole machine; 0: unknown.
    """
    found = CgroupMemory().sample().get("cgroup_oom_kills_total")
    if found is None:
        counts = dict(line.split(" ", 1) for line in (read_text(machine) or "").splitlines())
        found = float(counts.get("oom_kill", 0))
    return int(found)


class DiskProbe(HealthProbe):
    """Health probe of disks: latency of a small file in the run directory, and free space.

    It blocks while the disk hangs: use it through `ThreadedProbe`.

    Args:
        folder: folder in which the file is written and removed.
        spaces: folders whose free space is measured, by name.
    """

    name = "disk"
    numbers: Mapping[str, str] = {
        "disk_write_seconds": "Time to write and sync a file of 4 KiB (fsync)",
        "disk_read_seconds": "Time to read that file without the page cache",
        "disk_is_full": "1: that file could not be written for lack of space or quota",
        "disk_is_failing": "1: that file could not be written or read for another reason",
        "disk_free_bytes": "Space that this user may still fill",
        "disk_size_bytes": "Size of the disk",
        "disk_free_inodes": "Number of files that can still be created; missing: no limit",
        "disk_inodes": "Largest possible number of files",
    }

    def __init__(self, folder: Path, spaces: Mapping[str, Path]) -> None:
        self._folder, self._spaces = folder, dict(spaces)

    def sample(self) -> Numbers:
        path = self._folder / f".disk_probe.{os.getpid()}"
        found: Numbers = {"disk_is_full:run": 0.0, "disk_is_failing:run": 0.0}
        try:
            found["disk_write_seconds:run"] = round(write_sync_seconds(path), 6)
            found["disk_read_seconds:run"] = round(read_seconds(path), 6)
        except OSError as error:
            is_full = error.errno in _FULL
            found["disk_is_full:run" if is_full else "disk_is_failing:run"] = 1.0
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for name, folder in self._spaces.items():
            found |= {f"{each}:{name}": value for each, value in disk_space(folder).items()}
        return found


def write_sync_seconds(path: Path, num_bytes: int = _PROBE_BYTES) -> float:
    """Write a small random file with fsync, and return the seconds this took; the file stays.

    Raises:
        OSError: the file cannot be written.
    """
    content = os.urandom(num_bytes)  # a disk that compresses gains nothing
    start = time.monotonic()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - start


def read_seconds(path: Path, max_bytes: float = math.inf) -> float:
    """Read a file, or its first bytes, from the disk, and return the seconds that it took.

    Its pages are dropped from the page cache before, if the file system supports that.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, left = time.monotonic(), max_bytes
        while left > 0 and (piece := file.read(2**20)):
            left -= len(piece)
        return time.monotonic() - start


def disk_space(folder: Path) -> Numbers:
    """Measure size and free space of a folder's disk, without a device's name; empty: unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    # f_bavail and not f_bfree, which includes blocks that are reserved for root.
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    numbers = {"disk_free_bytes": float(free), "disk_size_bytes": float(size)}
    # File systems that create inodes as needed (btrfs, many network disks) report 0.
    if found.f_files:
        numbers["disk_free_inodes"] = float(found.f_favail)
        numbers["disk_inodes"] = float(found.f_files)
    return numbers


_PRESSURES = {
    "pressure_cpu_share": ("cpu", "some"),
    "pressure_memory_share": ("memory", "full"),
    "pressure_io_share": ("io", "full"),
}
_MEMORY = {
    "memory_available_bytes": "MemAvailable",
    "memory_size_bytes": "MemTotal",
    "page_cache_bytes": "Cached",
    "memory_dirty_bytes": "Dirty",
    "shared_memory_bytes": "Shmem",
}


class LoadProbe(HealthProbe):
    """Health probe of load and memory of the whole node; `proc` is procfs's mount point."""

    name = "load"
    numbers: Mapping[str, str] = {
        "pressure_cpu_share": "Share of the last 10 s in which a process waited for a processor",
        "pressure_memory_share": "Share of the last 10 s in which all waited for memory",
        "pressure_io_share": "Share of the last 10 s in which all waited for disks",
        "load_average": "Processes that ran or waited, over the last minute",
        "memory_available_bytes": "Memory that processes can still use",
        "memory_size_bytes": "Size of the memory",
        "page_cache_bytes": "Memory of the page cache, which holds files",
        "memory_dirty_bytes": "Memory of the page cache that is not written to disk yet",
        "shared_memory_bytes": "Memory of /dev/shm and the like",
        "open_files_node": "Number of open files of all processes of the node",
    }

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def sample(self) -> Numbers:
        found: Numbers = {}
        for name, (file, kind) in _PRESSURES.items():  # kernels may have none
            for line in (read_text(self._proc / "pressure" / file) or "").splitlines():
                if line.startswith(f"{kind} avg10="):
                    found[name] = float(line.split()[1].partition("=")[2]) / 100
        lines = (read_text(self._proc / "meminfo") or "").splitlines()
        kibibytes = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
        for name, key in _MEMORY.items():
            if kibibytes.get(key):
                found[name] = float(kibibytes[key][0]) * 1024
        for name, path in (("load_average", "loadavg"), ("open_files_node", "sys/fs/file-nr")):
            if words := (read_text(self._proc / path) or "").split():
                found[name] = float(words[0])
        return found


OPEN_FILES: Mapping[str, str] = {
    "open_files": "Open files of the run's process on this node that is nearest to its limit",
    "open_files_limit": "Number of files that this process may have open",
}
_OPEN_LIMIT = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


def open_files(pids: Sequence[int]) -> Numbers:
    """Return open files and limit of the process that is nearest to its limit; empty: unknown."""
    found: list[tuple[int, int]] = []
    for folder in (Path(f"/proc/{pid}") for pid in pids):
        with suppress(OSError):
            if limit := _OPEN_LIMIT.search(read_text(folder / "limits") or ""):
                found.append((len(list((folder / "fd").iterdir())), int(limit[1])))
    count, most = max(found, key=lambda each: each[0] / max(each[1], 1), default=(0, 0))
    return {"open_files": float(count), "open_files_limit": float(most)} if most else {}
