"""Keeps memory that a CPU step frees, for the next step to use again."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # glibc refuses more
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc not to hand freed blocks back to the kernel; returns whether it listens.

    Each training step frees what the next one allocates again. By default glibc gives larger
    blocks back, and the kernel then has to clear every page anew: a third of the demo's step
    (`benchmarks/allocator.py`). Blocks above 32 MiB still go back. Where there is no glibc, or the
    user has set MALLOC_* variables, nothing changes.
    """
    is_users_choice = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_users_choice or mallopt is None:
        return False
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_TRIM_THRESHOLD, _NEVER)
    return all(kept)
