"""Memory of the control group that this process is in: what it may use, and whom that has ended."""

from collections.abc import Mapping
from pathlib import Path

from longtake.health.check import Numbers, read_number, read_text

_LIMITLESS = 2.0**60
"""Limits above it are none: version 1 says so by a number near 2**63."""


class CgroupMemory:
    """Reads control groups of version 2, and of version 1.

    Args:
        groups: which groups this process is in.
        root: where control groups are.
    """

    name = "cgroup"
    numbers: Mapping[str, str] = {
        "cgroup_memory_bytes": "Memory of the job's control group, its page cache included",
        "cgroup_memory_limit_bytes": "What it may have; not there: no limit",
        "cgroup_memory_limit_hits_total": "How often it could have no more",
        "cgroup_oom_kills_total": "Processes that the kernel has ended for want of memory",
    }

    def __init__(
        self, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._folder, self._version = _memory_group(read_text(groups) or "", root)

    def sample(self) -> Numbers:
        """The numbers now."""
        files = _VERSIONS[self._version]
        found = {name: _read(self._folder, *where) for name, where in files.items()}
        limit = found["cgroup_memory_limit_bytes"]
        if limit is not None and limit > _LIMITLESS:
            del found["cgroup_memory_limit_bytes"]
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Nothing is held."""


def oom_kills() -> int | None:
    """Processes of this process's control group that the kernel has ended for want of memory.

    None: it does not say.
    """
    found = CgroupMemory().sample().get("cgroup_oom_kills_total")
    return None if found is None else int(found)


# Files, and in them the line that begins with a word, or the only one.
_VERSIONS: dict[int, dict[str, tuple[str, str]]] = {
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


def _memory_group(groups: str, root: Path) -> tuple[Path, int]:
    """The folder of the group that counts memory, and its version.

    Inside a container the group's path is often that of the machine around it; then what is
    mounted at the root is the container's own.
    """
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in groups.splitlines()}
    controllers = next((name for name in paths if "memory" in name.split(",")), None)
    version, top = (2, root) if controllers is None else (1, root / "memory")
    folder = top / paths.get(controllers or "", "/").lstrip("/")
    return (folder if (folder / _VERSIONS[version]["cgroup_memory_bytes"][0]).exists() else top), (
        version
    )


def _read(folder: Path, file: str, word: str) -> float | None:
    if not word:
        return read_number(folder / file)  # "max": no limit
    for line in (read_text(folder / file) or "").splitlines():
        if line.startswith(f"{word} "):
            return float(line.split()[1])
    return None
