"""Limits of memory, pixels and time for decoding one file."""

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

MEMORY_GIB = 1.0  # default for decoding one file
SECONDS = 60.0  # default for decoding one whole file, plus one second for each 64 KiB
_BYTES_PER_PIXEL = 16  # RGBA: decoded, laid over white and converted; or some reference frames
_BYTES_PER_SECOND = 2**16  # a film of 2 hours and 1 GB gets 4.5 hours
_memory_gib: ContextVar[float] = ContextVar("memory_gib", default=MEMORY_GIB)


class OutOfTimeError(ClipError):
    """Raised when decoding a file took too long; another machine may be faster."""


def max_pixels() -> int:
    """Return the most pixels that one decoded picture may have within the memory limit."""
    return int(_memory_gib.get() * 2**30 / _BYTES_PER_PIXEL)


def check_pixels(media: Media, width: int, height: int) -> None:
    """Raise ClipError if a picture has more pixels than the memory limit allows."""
    if width * height > max_pixels():
        raise ClipError(
            str(media),
            f"has {width}x{height} pixels, and {max_pixels():,} are allowed in {_allowed()}",
        )


def out_of_memory() -> str:
    return f"decoding it takes more than {_allowed()}"


def _allowed() -> str:
    return (
        f"{_memory_gib.get():g} GiB of memory (raise data.sample_memory_gib in a recipe, or "
        "--memory-gib of data index, prepare, score and caption)"
    )


@contextmanager
def pixels_limited(memory_gib: float) -> Iterator[None]:
    """Limit the size of decoded pictures in the context, as threads have no memory limit."""
    token = _memory_gib.set(memory_gib)
    try:
        yield
    finally:
        _memory_gib.reset(token)


@contextmanager
def memory_limited(memory_gib: float) -> Iterator[None]:
    """Limit the memory that this process may allocate in the context, and the size of pictures.

    Memory that it has already, shared memory and mapped files are not counted. An allocation beyond
    the limit raises MemoryError, or FFmpeg's ENOMEM.
    """
    _, hard = before = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])  # as RLIMIT_DATA counts them
    # The limit is on the total, so what the process already has is added.
    soft = pages * os.sysconf("SC_PAGE_SIZE") + int(memory_gib * 2**30)
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    # Not RLIMIT_AS, which counts mapped files, shared memory and reserved addresses too.
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        with pixels_limited(memory_gib):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@dataclass(frozen=True)
class Limits:
    """Limits of memory and time for decoding one file."""

    memory_gib: float = MEMORY_GIB
    seconds: float = SECONDS  # plus one second for each 64 KiB of the file

    def timed(self, media: Media, progress: Callable[[], object]) -> Callable[[], None]:
        """Return a `progress` function that raises OutOfTimeError once decoding takes too long."""
        num_bytes = media.num_bytes
        if num_bytes is None:
            num_bytes = 0
            with suppress(OSError):  # reading the file will fail with the reason
                num_bytes = media.file.stat().st_size
        # In proportion to the size, because whole films are decoded, too.
        seconds = self.seconds + num_bytes / _BYTES_PER_SECOND
        end = time.monotonic() + seconds

        def progress_in_time() -> None:
            if time.monotonic() > end:
                raise OutOfTimeError(
                    str(media),
                    f"was not decoded in {seconds:.0f} s: {self.seconds:g} s (raise "
                    "--timeout-seconds of data index) and 1 s for each "
                    f"{_BYTES_PER_SECOND // 1024} KiB of the file",
                )
            progress()

        return progress_in_time


DEFAULT = Limits()
