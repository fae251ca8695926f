"""Signals, for a loop that waits: those that end it, and those that are not for it."""

import os
import select
import signal
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

_ENDING = (signal.SIGTERM, signal.SIGINT)
# A terminal that closes, and a scheduler's warning to all processes of a job.
_IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)


class Signals:
    """While it is entered, SIGTERM and Ctrl-C end the wait and nothing else.

    Attributes:
        name: of the signal that came; empty: none yet.
    """

    def __init__(self) -> None:
        self.name = ""
        self._ear, self._mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: list[tuple[signal.Signals, object]] = []

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until a signal comes; whether one has come."""
        if not self.name:
            select.select([self._ear], [], [], seconds)
        return bool(self.name)

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
        self.name = signal.Signals(number).name
        with suppress(OSError):  # full: it is woken up already
            os.write(self._mouth, b"!")
