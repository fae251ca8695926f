"""Signals to stop: finish the step, save, and end with a code that launchers understand.

    SIGINT   130   a person, by Ctrl-C
    SIGTERM  143   whoever wants it ended, and may have to end it by force soon
    SIGUSR1   75   a scheduler, some minutes before the time is over; EX_TEMPFAIL: run it again

The same signal often comes twice, from a scheduler and from the launcher that it told, so only a
second SIGINT means more than the first: it stops at once, without saving.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

EXIT_CODES: Final = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": os.EX_TEMPFAIL}
"""How a process ends that such a signal has stopped."""

_NUMBERS = [signal.Signals[name] for name in EXIT_CODES]


class LeftError(SystemExit):
    """A signal came when there was nothing to finish or to save; its code is the signal's.

    Attributes:
        signal_name: the signal.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(EXIT_CODES[signal_name])
        self.signal_name = signal_name


class Interrupt:
    """Remembers that someone wants the run to stop after the present step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether a stop was asked for on this rank."""
        return self.signal_name is not None


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """Let a signal end what is done in the block, as `LeftError`: before training, say."""
    with _caught(_leave):
        yield


@contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
    """Turn the first signal into a wish; of those that follow, SIGINT stops at once.

    A signal that the process was started to ignore, such as SIGINT in the background, stays so.
    """
    interrupt = Interrupt()

    def remember(number: int, frame: FrameType | None) -> None:
        if interrupt.signal_name is None:
            interrupt.signal_name = signal.Signals(number).name
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    with _caught(remember) as before:
        is_ending = True
        try:
            yield interrupt
            is_ending = interrupt.wanted
        finally:
            # After a stop, or a failure, what is left to do ends by itself. Launchers tell all
            # ranks to end when one has failed, and each has still to say why it does.
            for number, was in before.items():
                if is_ending and was is _leave and number != signal.SIGINT:
                    before[number] = signal.SIG_IGN


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise LeftError(signal.Signals(number).name)


@contextmanager
def _caught(handler: Callable[[int, FrameType | None], Any]) -> Iterator[dict[int, Any]]:
    """Handle the signals so in the block; yields what is done with them after it."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _NUMBERS}
    before = {number: was for number, was in before.items() if was != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield before
    finally:
        for number, was in before.items():
            signal.signal(number, was)
