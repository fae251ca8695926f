"""The first signal is a wish, the second acts as it always did."""

import os
import signal

import pytest

from longtake.training.interrupt import catch_interrupts


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_first_signal_is_remembered_and_nothing_else_happens(name: str) -> None:
    """The step goes on; the loop asks when it suits it."""
    with catch_interrupts() as interrupt:
        wanted_before = interrupt.wanted
        signal.raise_signal(signal.Signals[name])
        assert (wanted_before, interrupt.wanted) == (False, True)
        assert interrupt.signal_name == name


def test_the_second_signal_stops_at_once() -> None:
    """Whoever presses Ctrl-C twice does not want to wait for a save."""
    with catch_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("interrupted", [False, True])
def test_handlers_are_as_before_afterwards(interrupted: bool) -> None:
    """Code around a training keeps its own handlers."""

    def own(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} was not meant for this handler")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with catch_interrupts():
            if interrupted:
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell starts background jobs so that Ctrl-C in the foreground does not reach them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with catch_interrupts() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupt.wanted
    finally:
        signal.signal(signal.SIGINT, before)
