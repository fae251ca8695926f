"""Who sets the clock. Two who do work against each other, and the clock goes back and forth."""

from collections.abc import Mapping
from pathlib import Path

from longtake.health.check import Numbers, read_text

_NAMES = frozenset(
    {
        "chronyd",
        "ntpd",
        "ntpdate",
        "ntpsec",
        "openntpd",
        "ptp4l",
        "phc2sys",
        "sntp",
        "systemd-timesyn",  # the kernel keeps fifteen letters of a name
        "timemaster",
        "vmtoolsd",
    }
)
_TOGETHER = frozenset({"ptp4l", "phc2sys", "timemaster"})
"""Parts of one (linuxptp)."""
_LINUXPTP = "linuxptp"


def running(proc: Path = Path("/proc")) -> list[str]:
    """Programs that set the clock and run on this node, as far as a container lets them be seen.

    Args:
        proc: where the system shows its processes.

    Returns:
        Their names, sorted; linuxptp's count as one.
    """
    names = {read_text(folder / "comm") for folder in proc.glob("[0-9]*")}
    found = {name for name in names if name in _NAMES}
    return sorted({_LINUXPTP if name in _TOGETHER else str(name) for name in found})


class TimeDaemons:
    """Counts them."""

    name = "time_daemons"
    numbers: Mapping[str, str] = {"clock_daemons": "Running programs that set the clock"}

    def sample(self) -> Numbers:
        """The numbers now."""
        return {"clock_daemons": float(len(running()))}

    def close(self) -> None:
        """Nothing is held."""
