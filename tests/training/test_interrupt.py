"""The first signal is a wish, the second acts as it always did."""

import os
import signal
from contextlib import ExitStack

import pytest

from longtake.training.interrupt import EXIT_CODES, LeftError, catch_interrupts, leave_on_signals


@pytest.mark.parametrize("name", EXIT_CODES)
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_twice_means_what_it_meant_once(name: str) -> None:
    """A scheduler sends it to all processes, and the launcher that it told passes it on."""
    with catch_interrupts() as interrupt:
        for each in (name, name, "SIGTERM"):
            signal.raise_signal(signal.Signals[each])
        assert interrupt.signal_name == name


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_before_there_is_anything_to_save_a_signal_ends_it(name: str, code: int) -> None:
    """With the exit code that it would have later, and what was entered is left as usual."""
    left: list[str] = []
    leaving = ExitStack()
    leaving.callback(left.append, "in order")
    with pytest.raises(LeftError) as ended, leave_on_signals(), leaving:
        signal.raise_signal(signal.Signals[name])
    assert (ended.value.code, ended.value.signal_name, left) == (code, name, ["in order"])


def test_after_a_stop_nothing_cuts_the_rest_short() -> None:
    """The run is saved and says so, though the scheduler repeats itself."""
    with leave_on_signals():
        with catch_interrupts() as interrupt:
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.signal_name == "SIGUSR1"


def test_a_failure_is_not_cut_short_either() -> None:
    """Launchers tell all ranks to end when one has failed, and each has still to say why."""

    def fail() -> None:
        try:
            with catch_interrupts():
                raise ValueError("it broke")
        finally:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(ValueError, match="it broke"), leave_on_signals():
        fail()


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
