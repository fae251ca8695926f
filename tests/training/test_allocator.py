"""Freed memory stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys, torch
from longtake.training.allocator import keep_freed_memory
print(keep_freed_memory())
def touch(): return torch.ones(4 * 2**20)  # 16 MiB: between glibc's threshold and its limit
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(**variables: str) -> tuple[str, int]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", _FAULTS]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, faults = printed.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_blocks_are_used_again_unless_the_user_decides() -> None:
    """Of twenty blocks of 4,096 pages in turn all are cleared by default, and few when kept."""
    decided, default_faults = _run(MALLOC_TRIM_THRESHOLD_="131072")
    kept, faults = _run()
    assert (decided, kept) == ("False", "True")
    assert faults < default_faults / 2
