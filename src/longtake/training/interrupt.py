"""Ctrl-C and SIGTERM: finish the step, save, and say how to go on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Remembers that someone wants the run to stop after the present step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether a stop was asked for on this rank."""
        return self.signal_name is not None


@contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
    """Turn the first SIGINT or SIGTERM into a wish; the second stops at once, as ever.

    A signal that the process was started to ignore, such as SIGINT in the background, stays so.
    """
    interrupt = Interrupt()

    def remember(number: int, frame: FrameType | None) -> None:
        interrupt.signal_name = signal.Signals(number).name
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: was for number, was in before.items() if was != signal.SIG_IGN}
    for number in before:
        signal.signal(number, remember)
    try:
        yield interrupt
    finally:
        restore()
