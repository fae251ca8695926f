"""SIGTERM and Ctrl-C: a server gives back what it works on, and ends."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):  # noqa: N818 - nothing is wrong
    """Whoever works is to leave it."""


class Stop:
    """Whether somebody wants the server to end.

    Attributes:
        reason: the signal's name; None: nobody does.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether it shall end."""
        return self.reason is not None

    def ask(self, reason: str) -> None:
        """Make it end."""
        self.reason = reason

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond the moment at which it shall end."""
        end = time.monotonic() + seconds
        while not self.wanted and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # an Event's lock is not safe in a signal's handler


@contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Turn the first SIGTERM or SIGINT into a wish; the second ends the process as ever."""
    stop = Stop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def remember(number: int, frame: FrameType | None) -> None:
        restore()
        stop.ask(signal.Signals(number).name)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # started in the background by a shell: stays so
            signal.signal(number, remember)
    try:
        yield stop
    finally:
        restore()
