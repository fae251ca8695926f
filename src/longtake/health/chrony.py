"""What chrony thinks of the clock, where it disciplines it."""

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from longtake.health.check import Numbers

_COMMAND = ("chronyc", "-n", "-c", "tracking")
_TIMEOUT_SECONDS = 5.0
_EVERY_SECONDS = 60.0
_UNREACHABLE_STRATUM = 16
# Of a line of `chronyc -c tracking`: see chronyc(1), "tracking".
_STRATUM, _OFFSET, _RMS_OFFSET, _FREQUENCY, _DELAY, _DISPERSION, _LEAP = 2, 4, 6, 7, 10, 11, 13


class Chrony:
    """Asks chronyd over the network of this machine, once a minute; no rights are needed for it.

    Args:
        command: what prints one line of comma-separated numbers.
    """

    name = "chrony"
    numbers: Mapping[str, str] = {
        "clock_ntp_offset_seconds": "The clock minus the time of chrony's sources; positive: fast",
        "clock_ntp_rms_offset_seconds": "Likewise, in the long run",
        "clock_ntp_error_seconds": "How wrong chrony's time can be: half the delay to the source, "
        "and its dispersion",
        "clock_ntp_frequency_ppm": "Error of the oscillator, which chrony corrects; positive: fast",
        "clock_ntp_stratum": "How far from a reference clock; 16: no source is reached",
    }

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._command = command
        self._is_installed = shutil.which(command[0]) is not None
        self._asked: float | None = None
        self._found: Numbers = {}

    def sample(self) -> Numbers:
        """The numbers of the last minute; none without chronyd. It may take five seconds."""
        now = time.monotonic()
        if self._is_installed and (self._asked is None or now - self._asked >= _EVERY_SECONDS):
            self._asked = now
            self._found = parse(self._ask())
        return dict(self._found)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self) -> str:
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(  # noqa: S603 - the program's name is ours
                self._command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
            return answer.stdout if answer.returncode == 0 else ""
        return ""


def parse(line: str) -> Numbers:
    """The numbers of a line of `chronyc -c tracking`; none if it is no such line."""
    fields = line.strip().split(",")
    if len(fields) <= _LEAP:
        return {}
    try:
        error = float(fields[_DELAY]) / 2 + float(fields[_DISPERSION])
        is_lost = fields[_LEAP] == "Not synchronised"
        return {
            # chrony has the opposite sign: positive where the clock is slow.
            "clock_ntp_offset_seconds": 0.0 - float(fields[_OFFSET]),
            "clock_ntp_rms_offset_seconds": float(fields[_RMS_OFFSET]),
            "clock_ntp_error_seconds": error,
            "clock_ntp_frequency_ppm": float(fields[_FREQUENCY]),
            "clock_ntp_stratum": _UNREACHABLE_STRATUM if is_lost else float(fields[_STRATUM]),
        }
    except ValueError:
        return {}
