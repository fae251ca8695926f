"""How the kernel corrects the clock, as who disciplines it (chrony, ntpd) has told it to."""

import ctypes
from collections.abc import Mapping

from longtake.health.check import Numbers

_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
_NOMINAL_TICK = 10_000
_ERROR = -1


class _Timex(ctypes.Structure):
    """`struct timex` of adjtimex(2), with its padding."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("microseconds", ctypes.c_long),
        ("tick", ctypes.c_long),
        ("pulses", ctypes.c_long * 3),
        ("shift", ctypes.c_int),
        ("pulse_counts", ctypes.c_long * 4),
        ("tai", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )


class KernelClock:
    """Reads the kernel's corrections; it changes none."""

    name = "kernel_clock"
    numbers: Mapping[str, str] = {
        "clock_is_synchronised": "1: who disciplines the clock says that it follows a source",
        "clock_kernel_offset_seconds": "What the kernel still has to correct",
        "clock_kernel_correction_ppm": "By how much the kernel lets the clock run faster",
        "clock_kernel_max_error_seconds": "How wrong the clock can be; it rises by 500 ppm unless "
        "somebody disciplines the clock",
    }

    def __init__(self) -> None:
        self._adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)

    def sample(self) -> Numbers:
        """The numbers now; none where the system has no adjtimex."""
        timex = _Timex(modes=0)
        if self._adjtimex is None or self._adjtimex(ctypes.byref(timex)) == _ERROR:
            return {}
        of_one = 1e-9 if timex.status & _STA_NANO else 1e-6
        ticks_ppm = (timex.tick - _NOMINAL_TICK) * 1e6 / _NOMINAL_TICK
        return {
            "clock_is_synchronised": float(not timex.status & _STA_UNSYNC),
            "clock_kernel_offset_seconds": timex.offset * of_one,
            "clock_kernel_correction_ppm": round(timex.freq / 65536 + ticks_ppm, 3),
            "clock_kernel_max_error_seconds": timex.maxerror * 1e-6,
        }

    def close(self) -> None:
        """Nothing is held."""
