"""Do the system's limits leave room: open files, shared memory, locked memory, the cgroup's."""

import os
import resource
from pathlib import Path

import psutil

from longtake.config import Recipe
from longtake.formatting import format_size
from longtake.preflight.finding import Finding, Judged, Measure, Skipped
from longtake.preflight.setting import Facts, Setting

NAME = "limits"

_GIB = 2**30
_FEW_FILES = 4096
_LITTLE_SHARED = _GIB
_UNLIMITED = -1


def measure(setting: Setting) -> Facts:
    """The limits; -1: none."""
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared memory": _size_of("/dev/shm"),  # noqa: S108 - the system's own place
        "memory": _memory_limit(),
        "machine": psutil.virtual_memory().total,
        "has_infiniband": any(Path("/sys/class/infiniband").glob("*")),
    }


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Which limits are too low."""
    judged = Judged()
    few = _below(facts, "open files", _FEW_FILES)
    if few:
        what = f"{facts[few[0]]['open files']} files may be open at once"
        advice = "ulimit -n 65536; for services LimitNOFILE=, for Docker --ulimit nofile=65536."
        judged.findings.append(Finding("warning", NAME, few, what, f"{_FEW_FILES}", advice))
    little = _below(facts, "shared memory", _LITTLE_SHARED)
    if little:
        found = format_size(facts[little[0]]["shared memory"])
        what = f"shared memory has {found}, which NCCL may fill"
        advice = "Docker: --shm-size 16g or --ipc host; Kubernetes: an emptyDir of medium Memory."
        judged.findings.append(Finding("warning", NAME, little, what, "1 GiB", advice))
    judged.add(_judge_locked(facts))
    judged.add(_judge_memory(facts))
    return judged


def _judge_locked(facts: dict[str, Facts]) -> Judged:
    """InfiniBand pins its buffers; without it nothing here is locked."""
    with_cards = {node: each for node, each in facts.items() if each["has_infiniband"]}
    if not with_cards:
        return Judged(skipped=[Skipped("locked memory", "no InfiniBand device")])
    limited = tuple(
        node for node, each in with_cards.items() if each["locked memory"] != _UNLIMITED
    )
    if not limited:
        return Judged()
    what = f"only {format_size(facts[limited[0]]['locked memory'])} may be locked"
    advice = "ulimit -l unlimited; Docker: --ulimit memlock=-1; Slurm: PropagateResourceLimits."
    return Judged([Finding("warning", NAME, limited, what, "unlimited, for InfiniBand", advice)])


def _judge_memory(facts: dict[str, Facts]) -> Judged:
    memory = {
        node: (each["machine"] if each["memory"] == _UNLIMITED else each["memory"]) / _GIB
        for node, each in facts.items()
    }
    return Judged(measures=[Measure("memory that may be used", "GiB", memory)])


def _below(facts: dict[str, Facts], name: str, least: int) -> tuple[str, ...]:
    return tuple(
        node for node, each in facts.items() if each[name] != _UNLIMITED and each[name] < least
    )


def _size_of(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _memory_limit() -> int:
    """Of this process's cgroup, of version 2 or 1; -1: none below the machine's memory."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if limit < psutil.virtual_memory().total:
            return limit
    return _UNLIMITED
