"""Signals, for a loop that waits: those that end it, and those that are not for it."""

import math
import os
import select
import signal
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

_ENDING = (signal.SIGTERM, signal.SIGINT)
# A terminal that closes, and a scheduler's warning to all processes of a job.
_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)


class Signals:
    """While it is entered, SIGTERM and Ctrl-C end the wait and nothing else.

    A scheduler that wants a job to end sends SIGTERM to all of its processes, and those that are
    watched may have much to write then. So it can be a note first, and an end much later.

    Args:
        patience: seconds from SIGTERM until it ends the wait.

    Attributes:
        name: of the signal that came; empty: none yet.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.name = ""
        self._patience, self._due = patience, math.inf
        self._ear, self._mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[signal.Signals, object]] = []

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until a signal comes; whether one has come that ends the wait."""
        if time.monotonic() < self._due and select.select([self._ear], [], [], seconds)[0]:
            os.read(self._ear, 64)
        return time.monotonic() >= self._due

    def __enter__(self) -> Self:
        """Begin to listen."""
        self._before = [(number, signal.signal(number, self._note)) for number in _ENDING]
        self._before += [(number, signal.signal(number, signal.SIG_IGN)) for number in _IGNORED]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave signals as they were."""
        for number, before in self._before:
            signal.signal(number, before)  # type: ignore[arg-type]
        os.close(self._ear)
        os.close(self._mouth)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name != "SIGINT":
            self.name = signal.Signals(number).name
        patience = self._patience if number == signal.SIGTERM else 0.0
        self._due = min(self._due, time.monotonic() + patience)
        with suppress(OSError):  # full: it is woken up already
            os.write(self._mouth, b"!")
