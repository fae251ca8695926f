"""This process's own heart, of which whatever it runs may speak."""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.errors import LongtakeError
from longtake.heartbeat.heart import Heart
from longtake.heartbeat.record import Phase

# A process has one heart. The functions below speak of it, and do nothing where there is none, so
# that what computes a step need not be handed what only an onlooker wants to know.
_heart: Heart | None = None


@contextmanager
def beating(heart: Heart) -> Iterator[Heart]:
    """Make a heart the process's own; at the end it says that all went as it should.

    That includes an error that a person was told of, and a person's wish. After any other, it says
    what it said last.
    """
    global _heart
    _heart = heart
    try:
        yield heart
        heart.close()
    except (LongtakeError, KeyboardInterrupt, SystemExit):
        heart.close()
        raise
    finally:
        _heart = None


def enter(phase: Phase) -> None:
    """Say that a phase of this process begins."""
    if _heart is not None:
        _heart.enter(phase)


def begin_step(step: int, shape: str) -> None:
    """Say which step of this process begins, on clips of what shape."""
    if _heart is not None:
        _heart.begin_step(step, shape)


def end_step(work_seconds: float = 0.0) -> None:
    """Say that a step is done, and what this process itself needed for it."""
    if _heart is not None:
        _heart.end_step(work_seconds)


def took(phase: Phase, seconds: float) -> None:
    """Say how long something took that went on beside this process's phases."""
    if _heart is not None:
        _heart.took(phase, seconds)
