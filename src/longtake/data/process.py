"""One decoding process as its parent sees it: start it, send it a window, take the pixels."""

import os
import signal
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longtake import heartbeat
from longtake.data.references import Reference
from longtake.data.window import Window
from longtake.process import environment, program

PROGRAM = ("longtake.data.worker",)

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_END_SECONDS = 2.0


class WorkerProcess:
    """A process that runs `longtake.data.worker`.

    Pixels come back through two pieces of nameless shared memory (memfd, of which /dev/shm's size
    is no limit), used in turn: one is copied out while the next window is decoded into the other.

    Args:
        memory_gib: what decoding one window may take.
        hearts: where it says what it does; None: nowhere.

    Attributes:
        pid: the process.
        connection: where it answers.
    """

    def __init__(self, memory_gib: float, hearts: heartbeat.HeartbeatDir | None = None) -> None:
        self.connection: Connection[tuple[Window | Reference, int], tuple[str, str]]
        self.connection, theirs = Pipe()
        self._memory = [os.memfd_create("longtake-window") for _ in range(2)]
        self._stderr = os.memfd_create("longtake-stderr")
        self._slot = 0
        self._hearts = hearts
        where = [str(each) for each in hearts or ("", 0)]
        inherited = [theirs.fileno(), *self._memory]
        arguments = [*where, *(str(number) for number in (os.getpid(), *inherited))]
        # What is blocked here stays so in the process: Ctrl-C and a scheduler's signals go to the
        # whole group, and it is the parent that knows what they mean.
        theirs_not = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, theirs_not)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                program(*PROGRAM, str(memory_gib), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=inherited,
                env=environment(**_ONE_THREAD),
            )
        except OSError:
            self._close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid

    @property
    def stderr(self) -> Path:
        """The file to which it writes its stacks (SIGUSR2, or a crash) and other last words."""
        return Path(f"/proc/self/fd/{self._stderr}")

    def send(self, window: Window | Reference) -> int:
        """Let it decode a window; returns the slot in which the pixels will lie.

        Raises:
            ConnectionError: the process has ended.
        """
        self._slot = 1 - self._slot
        memory, num_bytes = self._memory[self._slot], int(np.prod(window.shape))
        if os.fstat(memory).st_size < num_bytes:
            os.ftruncate(memory, num_bytes)
        self.connection.send((window, self._slot))
        return self._slot

    def receive(self) -> tuple[str, str] | None:
        """What it has to say next, as `worker` explains; None: it has ended."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def take(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy a window's pixels, [3, F, H, W], out of the slot in which they lie."""
        pixels, num_read = out.reshape(-1).data, 0
        while num_read < out.nbytes:  # one read ends at 2 GiB
            num_read += os.preadv(self._memory[slot], [pixels[num_read:]], num_read)

    def end(self) -> tuple[int | None, str]:
        """Kill it if it still runs, and give everything back.

        Returns:
            Its exit status (minus the signal's number, if a signal ended it; None: it waits for a
            device and cannot be killed yet), and what it wrote to stderr.
        """
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        words = self.stderr.read_text(errors="replace")
        if self._hearts is not None:
            heartbeat.page_path(self._hearts.folder, "decode", self._hearts.rank, self.pid).unlink(
                missing_ok=True
            )
        self._close()
        return self._process.returncode, words

    def _close(self) -> None:
        self.connection.close()
        for descriptor in (*self._memory, self._stderr):
            os.close(descriptor)


def how_it_ended(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "cannot be killed: it waits for a device"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = " (by hand, or the machine was out of memory)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
