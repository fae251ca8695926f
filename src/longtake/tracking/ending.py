"""When a follower is to end: its parent says so, is gone, or somebody sends a signal."""

import os
import signal
import sys
import threading
import time

_LOOK_SECONDS = 0.05  # near the end somebody waits


class Ending:
    """Set by whatever ends this process.

    Args:
        parent: the process whose end is this one's; it holds the other end of standard input.
            None: only signals end it.

    Attributes:
        is_near: what there is is to be sent, and nothing to be waited for besides.
        is_at_once: by a signal: whoever cannot be reached now is not tried again.
    """

    def __init__(self, parent: int | None) -> None:
        self.is_near = threading.Event()
        self.is_at_once = False
        self._parent = parent
        self._near_since: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what ends soon by it is the parent
        if parent is not None:
            threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Return after so long, or as soon as the end is near; look for the parent."""
        if self._parent is not None and os.getppid() != self._parent:
            self.is_near.set()
        if self.is_near.is_set():
            self._near_since = self._near_since or time.monotonic()
            time.sleep(min(seconds, _LOOK_SECONDS))
        else:
            self.is_near.wait(seconds)

    @property
    def seconds(self) -> float:
        """For how long the end has been near."""
        return time.monotonic() - self._near_since if self._near_since is not None else 0.0

    def _listen(self) -> None:
        sys.stdin.buffer.read(1)  # a byte, or the end of the pipe
        self.is_near.set()

    def _signalled(self, number: int, frame: object) -> None:
        self.is_at_once = True
        self.is_near.set()
