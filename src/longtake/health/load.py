"""What the node's processors and memory are busy with, and what waits for them."""

from collections.abc import Mapping
from pathlib import Path

from longtake.health.check import Numbers, read_text

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


class Load:
    """Reads what the kernel says of the whole node.

    Args:
        proc: where it says so.
    """

    name = "load"
    numbers: Mapping[str, str] = {
        "pressure_cpu_share": "Of the last 10 s, when somebody waited for a processor",
        "pressure_memory_share": "Of the last 10 s, when everybody waited for memory",
        "pressure_io_share": "Of the last 10 s, when everybody waited for disks",
        "load_average": "Processes that ran or waited, over the last minute",
        "memory_available_bytes": "Memory that processes can still have",
        "memory_size_bytes": "All memory",
        "page_cache_bytes": "Memory that holds files",
        "memory_dirty_bytes": "Of it, what has yet to be written to disk",
        "shared_memory_bytes": "Memory of /dev/shm and the like",
        "open_files_node": "Files that all processes of the node have open",
    }

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def sample(self) -> Numbers:
        """The numbers now."""
        return {**self._pressures(), **self._memory(), **self._counts()}

    def close(self) -> None:
        """Nothing is held."""

    def _pressures(self) -> Numbers:
        """Pressure stall information: kernels may have none."""
        found: Numbers = {}
        for name, (file, kind) in _PRESSURES.items():
            for line in (read_text(self._proc / "pressure" / file) or "").splitlines():
                if line.startswith(f"{kind} avg10="):
                    found[name] = float(line.split()[1].partition("=")[2]) / 100
        return found

    def _memory(self) -> Numbers:
        lines = (read_text(self._proc / "meminfo") or "").splitlines()
        kibibytes = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
        return {
            name: float(kibibytes[key][0]) * 1024
            for name, key in _MEMORY.items()
            if kibibytes.get(key)
        }

    def _counts(self) -> Numbers:
        found: Numbers = {}
        averages = (read_text(self._proc / "loadavg") or "").split()
        files = (read_text(self._proc / "sys/fs/file-nr") or "").split()
        if averages:
            found["load_average"] = float(averages[0])
        if files:
            found["open_files_node"] = float(files[0])
        return found
