"""Limits what one file may cost: the memory and the time of decoding it.

A file of some bytes can ask for any amount of either. Three limits hold together: the size of a
picture is checked before it is decoded; the process that decodes has a limit on its memory, so
that an allocation beyond it fails like any other damage of the file; and whoever decodes a whole
file checks the time after each frame. (A decoder that hangs inside one frame is killed from
outside: `longtake.data.workers`.)
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from longtake.data.clip import Media
from longtake.errors import ClipError

MEMORY_GIB = 1.0
"""What decoding one file may take, unless a recipe or an option says more."""
SECONDS = 60.0
"""What decoding one whole file may take, besides what its size allows."""

_BYTES_PER_PIXEL = 16  # RGBA, as decoded, laid over white and converted; or some reference frames
_BYTES_PER_SECOND = 2**16  # a film of 2 hours and 1 GB may take 4.5 hours

_memory_gib: ContextVar[float] = ContextVar("memory_gib", default=MEMORY_GIB)


class OutOfTimeError(ClipError):
    """Decoding a file took longer than it may; another machine may be faster."""


def max_pixels() -> int:
    """Pixels that a picture may have where this is called."""
    return int(_memory_gib.get() * 2**30 / _BYTES_PER_PIXEL)


def check_pixels(media: Media, width: int, height: int) -> None:
    """Refuse a picture that is too large to be decoded.

    Raises:
        ClipError: it has more pixels than the memory limit is enough for.
    """
    if width * height > max_pixels():
        raise ClipError(
            str(media),
            f"has {width}x{height} pixels, and {max_pixels():,} are allowed in {_allowed()}",
        )


def out_of_memory() -> str:
    """What is said of a file that needs more memory than it may take."""
    return f"decoding it takes more than {_allowed()}"


def _allowed() -> str:
    return (
        f"{_memory_gib.get():g} GiB of memory (raise data.sample_memory_gib in a recipe, or "
        "--memory-gib of data index, prepare and score)"
    )


@contextmanager
def pixels_limited(memory_gib: float) -> Iterator[None]:
    """Limit the size of pictures; for threads, which have no memory of their own."""
    token = _memory_gib.set(memory_gib)
    try:
        yield
    finally:
        _memory_gib.reset(token)


@contextmanager
def memory_limited(memory_gib: float) -> Iterator[None]:
    """Limit what this process may allocate beyond what it has, and the size of pictures.

    Shared memory and mapped files do not count. What would go beyond it raises MemoryError, or
    FFmpeg's ENOMEM.
    """
    _, hard = before = resource.getrlimit(resource.RLIMIT_DATA)
    soft = _data_bytes() + int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (_lower(soft, hard), hard))
    try:
        with pixels_limited(memory_gib):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _lower(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process now (proc(5), VmData)."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Limits:
    """What decoding one file may cost."""

    memory_gib: float = MEMORY_GIB
    seconds: float = SECONDS
    """Besides a second for each 64 KiB of the file."""

    def timed(self, media: Media, alive: Callable[[], object]) -> Callable[[], None]:
        """Return `alive`, which raises OutOfTimeError once the file has taken too long."""
        num_bytes = media.num_bytes
        if num_bytes is None:
            num_bytes = 0
            with suppress(OSError):  # who reads it will say so
                num_bytes = Path(media.path).stat().st_size
        seconds = self.seconds + num_bytes / _BYTES_PER_SECOND
        end = time.monotonic() + seconds

        def alive_in_time() -> None:
            if time.monotonic() > end:
                raise OutOfTimeError(
                    str(media),
                    f"was not decoded in {seconds:.0f} s: {self.seconds:g} s (raise "
                    "--timeout-seconds of data index) and 1 s for each "
                    f"{_BYTES_PER_SECOND // 1024} KiB of the file",
                )
            alive()

        return alive_in_time


DEFAULT = Limits()
