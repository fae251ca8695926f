"""What of a stack stays over time, and what tells stacks apart."""

from typing import Any

from longtake.stacks.frames import native_of, stack_of, unmoved

_MAIN, _TRAIN, _WAIT = ("main", "a.py", 1), ("train", "a.py", 7), ("wait", "b.py", 3)


def _thread(*calls: tuple[str, str, int]) -> dict[str, Any]:
    frames = [dict(zip(("function", "file", "line"), call, strict=True)) for call in calls]
    return {"name": "MainThread", "is_active": True, "has_gil": False, "frames": frames}


def test_what_does_not_move_is_counted_from_the_outermost_call() -> None:
    """A call that was left and entered anew has moved what it called, if only by a line."""
    assert unmoved([(_WAIT, _TRAIN, _MAIN), (_WAIT, _TRAIN, _MAIN)]) == (_WAIT, _TRAIN, _MAIN)
    assert unmoved([(_WAIT, _TRAIN, _MAIN), (_TRAIN, _MAIN)]) == (_TRAIN, _MAIN)
    assert unmoved([(_WAIT, _TRAIN, _MAIN), (_WAIT, ("train", "a.py", 8), _MAIN)]) == (_MAIN,)
    assert unmoved([(_WAIT,), ()]) == ()
    assert unmoved([]) == ()


def test_calls_of_c_do_not_tell_stacks_apart() -> None:
    """So that one that was read with them equals one that was not; they can be had apart."""
    sleep, ffi = ("clock_nanosleep", "/usr/lib/libc.so.6", 0), ("ffi_call", "libffi.so.8", 0)
    frozen = ("_run_code", "<frozen runpy>", 88)
    native = _thread(sleep, _WAIT, ffi, _MAIN, frozen, ("0x7f", "/usr/lib/libc.so.6", 0))
    assert stack_of(native) == stack_of(_thread(_WAIT, _MAIN, frozen)) == (_WAIT, _MAIN, frozen)
    assert native_of(native) == (sleep,)
    assert native_of(_thread(_WAIT, _MAIN)) == ()
    assert stack_of(_thread()) == ()
