"""How much of this computer's memory a training on its GPU may page-lock."""

import platform
import resource
from collections.abc import Callable
from functools import cache

import psutil
import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from longtake.health.system import CgroupMemory

_GIB = 2**30
_MARGIN_BYTES = 64 * 2**20
_LEAST_PIECE = _GIB // 4  # to which what can be page-locked is found


def usable_ram() -> int:
    """Return the bytes of memory of this computer, or of its container if that has less."""
    limit = CgroupMemory().sample().get("cgroup_memory_limit_bytes")
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, int(limit))


@cache
def lockable_bytes(wanted: int) -> int:
    """Return how many of `wanted` bytes this process can page-lock for its GPU, as it tries out.

    Nothing is tried where nothing is known to be in the way, since locking takes seconds for each
    10 GiB. Under Windows (WSL) a part of the memory can be locked, which nothing tells in advance.
    CUDA's memory need not count towards the limit of locked memory (ulimit -l): a little more than
    that is tried.
    """
    is_windows = "microsoft" in platform.uname().release.lower()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    return lockable(wanted, None if limit == unlimited else limit, is_windows, can_lock)


def lockable(
    wanted: int, limit: int | None, is_windows: bool, can_lock: Callable[[int], bool]
) -> int:
    """Return how many of `wanted` bytes `can_lock` locks, with few tries.

    Args:
        wanted: bytes that a plan would take.
        limit: what a process may lock by its resource limits; None: no limit.
        is_windows: true if another system may grant less than there is.
        can_lock: tries to lock so many bytes, and frees them.
    """
    if is_windows:
        # Halved until it works, then enlarged by half of what is left, to a quarter of a GiB.
        known, piece = 0, wanted
        while piece >= _LEAST_PIECE:
            if known + piece <= wanted and can_lock(known + piece):
                known += piece
            piece //= 2
        return known
    if limit is None or limit >= wanted or can_lock(limit + _MARGIN_BYTES):
        return wanted
    return limit


def can_lock(num_bytes: int) -> bool:
    """Page-lock so much memory for CUDA, and free it again; false if that fails."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        pin_memory(memory.data_ptr(), num_bytes)
    except (RuntimeError, AssertionError):  # torch raises the latter where it has no CUDA
        return False
    unpin_memory(memory.data_ptr())
    return True
