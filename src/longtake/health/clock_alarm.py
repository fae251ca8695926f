"""The kernel's word that the clock was set: a timer that is cancelled by it.

Comparing clocks now and then misses a step that is undone in between. A timer with
TFD_TIMER_CANCEL_ON_SET does not: see timerfd_create(2). Python has os.timerfd_create from 3.13 on
only, so that the C library is called here.
"""

import ctypes
import errno
import os
import time

_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_TFD_TIMER_ABSTIME, _TFD_TIMER_CANCEL_ON_SET = 1, 2
_FAR_SECONDS = 2**40
"""A date at which the timer goes off: in 36,800 years."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class ClockAlarm:
    """Tells whether the clock was set.

    Attributes:
        fileno: becomes readable when the clock is set.

    Raises:
        OSError: the system has no such timers.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            create, set_time = libc.timerfd_create, libc.timerfd_settime
        except AttributeError as error:
            raise OSError(errno.ENOSYS, "this system has no timerfd_create") from error
        self.fileno = create(time.CLOCK_REALTIME, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self.fileno < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        flags = _TFD_TIMER_ABSTIME | _TFD_TIMER_CANCEL_ON_SET
        far = _Itimerspec(value=_Timespec(_FAR_SECONDS, 0))
        if set_time(self.fileno, flags, ctypes.byref(far), None) < 0:
            failed = ctypes.get_errno()
            self.close()
            raise OSError(failed, "timerfd_settime failed")

    def has_gone(self) -> bool:
        """Whether the clock was set since the last call."""
        try:
            os.read(self.fileno, 8)
        except BlockingIOError:
            return False
        except OSError as error:  # the timer stays armed
            return error.errno == errno.ECANCELED
        return True

    def close(self) -> None:
        """Give the timer back."""
        if self.fileno >= 0:
            os.close(self.fileno)
        self.fileno = -1
