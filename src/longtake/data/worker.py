"""A decoding process: takes windows from a connection, writes pixels to shared memory.

    python -m longtake.data.worker DECODER PARENT CONNECTION MEMORY...

The pool starts it so; the numbers are its parent's process id and inherited file descriptors. It
imports neither torch nor the user's program, and ends when its parent does, however that happens.
"""

import ctypes
import faulthandler
import mmap
import os
import signal
import sys
from itertools import count
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from longtake.data.references import Reference, read
from longtake.data.window import Decoder, Window
from longtake.errors import ClipError

# What a worker sends: that it is ready, once; then for each window `DONE` or (FAILED, reason).
READY, DONE, FAILED = "ready", "done", "failed"

_TRIM_EVERY = 100  # windows

# From linux/prctl.h
_SET_PARENT_DEATH_SIGNAL, _SET_PTRACER, _ANYONE = 1, 0x59616D61, ctypes.c_ulong(-1)


def main() -> None:
    """Decode one window after the other until the parent closes the connection."""
    if len(sys.argv) < 5:
        raise SystemExit("This is a part of longtake's decoding pool, which starts it itself.")
    decoder: Decoder = "torchcodec" if sys.argv[1] == "torchcodec" else "pyav"
    parent, connection_fd, *memory = (int(argument) for argument in sys.argv[2:])
    _bind_to(parent)
    _allow_inspection()
    connection: Connection[tuple[str, str], tuple[Window | Reference, int]] = Connection(
        connection_fd
    )
    with connection:
        try:
            connection.send((READY, ""))
            for number in count(1):
                window, slot = connection.recv()
                connection.send(_answer(window, memory[slot], decoder))
                if number % _TRIM_EVERY == 0:
                    _trim()
        except (EOFError, ConnectionError):
            return


def _answer(window: Window | Reference, memory: int, decoder: Decoder) -> tuple[str, str]:
    try:
        read(window, _shared(memory, window), decoder=decoder)
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


def _bind_to(parent: int) -> None:
    """End with the parent, however it ends."""
    # Closing the connection is not enough: a decoder that hangs does not look at it.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster; or something stands between
        raise SystemExit(f"the pool's process is {parent}, but the parent is {os.getppid()}")


def _allow_inspection() -> None:
    """Let py-spy in where Yama forbids it, and write stacks to stderr on SIGUSR1 or a crash."""
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANYONE)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


if __name__ == "__main__":
    main()
