"""A decoding process: takes windows from a connection, writes pixels to shared memory.

    python -m longtake.data.worker MEMORY_GIB HEARTS RANK PARENT CONNECTION MEMORY...

The pool starts it so; MEMORY_GIB limits what decoding one window may take; HEARTS is the folder in
which it says what it does, or empty; the other numbers are its rank, its parent's process id and
inherited file descriptors. It imports neither torch nor the user's program, and ends when its
parent does, however that happens.
"""

import ctypes
import mmap
import sys
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake.data.limits import memory_limited
from longtake.data.references import Reference, read
from longtake.data.window import Window
from longtake.errors import ClipError
from longtake.heartbeat import HeartbeatWriter
from longtake.process import end_with
from longtake.stacks import enable_stack_dumps

# What a worker sends: that it is ready, once; then for each window `DONE` or (FAILED, reason).
READY, DONE, FAILED = "ready", "done", "failed"

_TRIM_EVERY = 100  # windows


def main() -> None:
    """Decode one window after the other until the parent closes the connection."""
    if len(sys.argv) < 7:
        raise SystemExit("This is a part of longtake's decoding pool, which starts it itself.")
    memory_gib, hearts = float(sys.argv[1]), sys.argv[2]
    rank, parent, connection_fd, *memory = (int(argument) for argument in sys.argv[3:])
    end_with(parent)
    enable_stack_dumps()
    connection: Connection[tuple[str, str], tuple[Window | Reference, int]] = Connection(
        connection_fd
    )
    heart = HeartbeatWriter(Path(hearts), "decode", rank=rank) if hearts else None
    with connection:
        try:
            connection.send((READY, ""))
            for number in count(1):
                if heart:
                    heart.set_phase("idle", "")
                window, slot = connection.recv()
                if heart:
                    heart.set_phase("decode", window.identity, str(window.media))
                connection.send(_answer(window, memory[slot], memory_gib))
                if number % _TRIM_EVERY == 0:
                    _trim()
        except (EOFError, ConnectionError):
            return


def _answer(window: Window | Reference, memory: int, memory_gib: float) -> tuple[str, str]:
    try:
        with memory_limited(memory_gib):
            read(window, _shared(memory, window))
    except ClipError as error:
        return FAILED, error.reason
    except Exception as error:  # whatever it is, it belongs to this sample
        return FAILED, f"decoding raised {type(error).__name__}: {error}"
    return DONE, ""


def _shared(memory: int, window: Window | Reference) -> NDArray[np.uint8]:
    """The window's pixels in the shared memory, which the parent has made large enough."""
    mapped = mmap.mmap(memory, int(np.prod(window.shape)))
    return np.frombuffer(mapped, np.uint8).reshape(window.shape)


def _trim() -> None:
    """Hand freed memory back, in 2 ms: frames of ever other sizes leave holes, which add up."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's own
        trim(0)


if __name__ == "__main__":
    main()
