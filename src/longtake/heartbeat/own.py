"""This process's own heart, of which whatever it runs may speak."""

from collections.abc import Iterator
from contextlib import contextmanager

from longtake.errors import LongtakeError
from longtake.heartbeat.heart import Heart
from longtake.heartbeat.record import Phase

# A process has one heart. The functions below speak of it, and do nothing where there is none, so
# that what computes a step need not be handed what only an onlooker wants to know.
_heart: Heart | None = None
_is_new = True
"""No heart has beaten here yet, so that the process was started for the one that will."""


@contextmanager
def beating(heart: Heart) -> Iterator[Heart]:
    """Make a heart the process's own; at the end it says that all went as it should.

    That includes an error that a person was told of, and a person's wish. After any other, it says
    what it said last.
    """
    global _heart, _is_new
    if _is_new:
        heart.begin_with_process()
    _heart, _is_new = heart, False
    try:
        yield heart
        heart.close()
    except (LongtakeError, KeyboardInterrupt, SystemExit):
        heart.close()
        raise
    finally:
        _heart = None


def begin_here() -> None:
    """Count the launch that follows from now on, not from the start of this process."""
    global _is_new
    _is_new = False


def enter(phase: Phase) -> None:
    """Say that a phase of this process begins."""
    if _heart is not None:
        _heart.enter(phase)


def phase() -> Phase | None:
    """The phase that this process is in; None where nobody says."""
    return None if _heart is None else _heart.phase


def launch_seconds() -> dict[Phase, float]:
    """How long each phase of this process took before its first step was done."""
    return {} if _heart is None else _heart.launch_seconds()


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
