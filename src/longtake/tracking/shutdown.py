"""When a follower ends: on request of its parent, at its parent's end, or by a signal."""

import os
import signal
import sys
import threading
import time

from longtake.process import StopSignal

_LOOK_SECONDS = 0.05  # after the request somebody waits


class Shutdown(StopSignal):
    """A request to send what there is, and to end.

    Args:
        parent: the process whose end is this one's; it holds the other end of standard input.
            None: only signals end this process.

    Attributes:
        is_at_once: a signal came: a tracker that cannot be reached now is not tried again.
    """

    def __init__(self, parent: int | None) -> None:
        # A scheduler's warning is for the parent, which ends soon by it.
        super().__init__(
            ignored=(signal.SIGUSR1,), on_signal=self._end_at_once, keeps_ignored=False
        )
        self.is_at_once = False
        self._parent = parent
        if parent is not None:
            threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the request; shorter after it."""
        if self._parent is not None and os.getppid() != self._parent:
            self.request("the parent has ended")
        if self.is_requested:
            time.sleep(min(seconds, _LOOK_SECONDS))
            return True
        return super().wait(seconds)

    def _listen(self) -> None:
        sys.stdin.buffer.read(1)  # a byte, or the end of the pipe
        self.request("the parent has asked")

    def _end_at_once(self, received: signal.Signals, is_first: bool) -> None:
        self.is_at_once = True
