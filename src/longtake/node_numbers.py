"""The numbers of nodes that are judged or shown: one table for watcher, `health` and the board.

A probe in `longtake.health` measures numbers and explains each in its `numbers`. A number that is
to be compared with other nodes' gets a `HealthSignal` here, a count of errors a sentence in
`ERROR_COUNTS`, and one that has a column in the table of nodes a `NodeColumn`. A number is named
`name:device`, or `name` alone if it is the node's.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal, TypeVar

from longtake.formatting import format_size

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")

Baseline = Literal["others", "own past"]
_BOTH: tuple[Baseline, ...] = ("others", "own past")

USE: Final = "gpu_utilization_share"
CHECKPOINT: Final = "checkpoint_is_near"


def by_device(numbers: Mapping[str, _T], name: str) -> dict[str, _T]:
    """The numbers `name:device` by device; `name` alone by an empty one."""
    parts = ((key.partition(":"), each) for key, each in numbers.items())
    return {device: each for (found, _, device), each in parts if found == name}


@dataclass(frozen=True)
class HealthSignal:
    """A number that can be judged."""

    name: str  # without its device
    kind: str = ""  # of device, for people
    label: str = ""  # for people
    unit: str = ""  # of what is shown
    worse: Literal["higher", "lower"] = "higher"
    spread: float = 0.5  # of healthy hardware, as a share
    least: float = 0.0  # shares are of the number, or of this where the number is less
    # Work per step depends on the data, so its past says nothing.
    against: tuple[Baseline, ...] = ("others",)
    percent: bool = False  # messages have the deviation, not the values
    scale: float = 1.0  # from the number to the shown unit
    needs: str = ""  # a share of the same device: below 0.1 it is not in use, and not judged
    unless: str = ""  # a number of the node: it is not judged while that is not 0
    counts: str = ""  # for people: the errors of a port that it is a rate of; they come and go


def _errors(name: str, counts: str, least: float) -> HealthSignal:
    """A rate of a port's errors, of which so many per second are negligible."""
    return HealthSignal(name, least=least, counts=counts)


SIGNALS: Final = (
    HealthSignal("gpu_power_watts", "GPU", "power", "W", "lower", 0.08, needs=USE),
    HealthSignal("gpu_sm_clock_mhz", "GPU", "clock", "MHz", "lower", 0.04, needs=USE),
    HealthSignal("step_work_seconds", "rank", "step time", "s", "higher", 0.04, percent=True),
    HealthSignal(
        "link_speed_bits_per_second",
        kind="link",
        label="speed",
        unit="Gbit/s",
        worse="lower",
        spread=0.04,
        against=_BOTH,
        scale=1e-9,
    ),
    # Writing a checkpoint delays every fsync on ext4 and NFS, for seconds.
    HealthSignal(
        "disk_write_seconds",
        kind="disk",
        label="writing 4 KiB",
        unit="s",
        least=3.0,
        against=_BOTH,
        unless=CHECKPOINT,
    ),
    HealthSignal("pressure_cpu_share", label="waiting for processors", least=0.25),
    _errors("link_symbol_errors_per_second", "symbol errors", 1.0),
    _errors("link_recoveries_per_second", "recoveries from link errors", 0.2),
    _errors("link_receive_errors_per_second", "damaged packets", 1.0),
    _errors("link_transmit_discards_per_second", "discarded packets", 10.0),
    _errors("link_out_of_sequence_per_second", "packets out of order", 10.0),
    _errors("link_ack_timeouts_per_second", "retries for lack of an answer", 1.0),
)
"""The numbers that a watcher judges, window by window."""

_TEMPERATURE = HealthSignal(
    "gpu_temperature_celsius", "GPU", "temperature", "°C", "higher", 0.1, needs=USE
)
SHOWN_SIGNALS: Final = tuple(
    # Work per step depends on the data: only other nodes tell whether it is slow.
    each if each.name == "step_work_seconds" else replace(each, against=_BOTH)
    for each in (*SIGNALS, _TEMPERATURE)
)
"""The numbers that `longtake health` compares: heat alone is not reported, but shown."""

ERROR_COUNTS: Final = {
    "gpu_ecc_uncorrected_total": "{count:.0f} uncorrectable memory errors of GPU {device}",
    "gpu_xid_errors_total": "the driver reports errors of GPU {device} (XID {xid:.0f})",
    "cgroup_oom_kills_total": "the kernel has killed {count:.0f} processes for lack of memory",
    "link_downed_total": "the link {device} went down for a moment",
}
"""Counts whose increase is an error, and what is said of it."""

CAUSES: Final = ("clock_", "link_", "peer_", "gpu_")
"""Beginnings of the names of what may be the cause of a stall: clocks, links and GPUs. What is
wrong with disks and processors is an effect as often."""


@dataclass(frozen=True)
class NodeColumn:
    """A column of the table of nodes; the worst of a node's devices stands for it."""

    number: str
    text: Callable[[float], str]
    worse: Literal["higher", "lower"]
    marked_by: tuple[str, ...] = ()
    """Beginnings of the names of signals that mark it."""
    is_drawn: bool = True
    """Whether the board draws it over time."""

    def worst(self, values: Sequence[float]) -> float:
        return max(values) if self.worse == "higher" else min(values)

    @property
    def signal(self) -> HealthSignal:
        known = {each.name: each for each in SHOWN_SIGNALS}
        return known.get(self.number, HealthSignal(self.number, worse=self.worse))


COLUMNS: Final[Mapping[str, NodeColumn]] = {
    "power": NodeColumn("gpu_power_watts", lambda x: f"{x:.0f} W", "lower", ("gpu_power",)),
    "temperature": NodeColumn(
        "gpu_temperature_celsius", lambda x: f"{x:.0f} °C", "higher", ("gpu_temp",)
    ),
    "clock": NodeColumn("gpu_sm_clock_mhz", lambda x: f"{x:.0f} MHz", "lower", ("gpu_sm",)),
    "link": NodeColumn(
        "link_speed_bits_per_second", lambda x: f"{x / 1e9:.3g} Gb/s", "lower", ("link_",)
    ),
    "disk write": NodeColumn(
        "disk_write_seconds", lambda x: f"{x * 1e3:.3g} ms", "higher", ("disk_",)
    ),
    "disk free": NodeColumn(
        "disk_free_bytes", lambda x: format_size(int(x)), "lower", is_drawn=False
    ),
    "step": NodeColumn("step_work_seconds", lambda x: f"{x:.3g} s", "higher", ("step_work",)),
}

_KNOWN: Final = {
    *(name for each in SHOWN_SIGNALS for name in (each.name, each.needs, each.unless)),
    *(column.number for column in COLUMNS.values()),
    *("link_up", "steps_per_second"),
}


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of health.jsonl that are compared or shown."""
    return {
        name: float(x)
        for name, x in record.items()
        if name.partition(":")[0] in _KNOWN and type(x) in (int, float) and abs(x) < 1e300
    }


def columns_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """The number in each column of the table: the worst device's."""
    values = {label: by_device(numbers, each.number) for label, each in COLUMNS.items()}
    return {label: COLUMNS[label].worst([*own.values()]) for label, own in values.items() if own}


def links_down(numbers: Mapping[str, float]) -> list[str]:
    return sorted(device for device, is_up in by_device(numbers, "link_up").items() if not is_up)


# --- Far from others ---------------------------------------------------------------------------

SIGMAS: Final = 1.4826
"""Standard deviations in a median absolute deviation."""
_FAR, _FAR_OF_HEALTHY = 6.0, 2.0  # measured spreads, and those of healthy hardware


def find_far(values: Mapping[_K, float], signal: HealthSignal) -> dict[_K, float]:
    """The values that are at this moment far worse than the others'.

    Pages ask it, where only the present numbers are known. A watcher's `OutlierDetector` judges
    windows, and finds less than that.
    """
    if not values:
        return {}
    middle = median(values.values())
    measured = SIGMAS * median(abs(each - middle) for each in values.values())
    far = max(_FAR * measured, _FAR_OF_HEALTHY * signal.spread * abs(middle), signal.least)
    sign = 1 if signal.worse == "higher" else -1
    return {who: each for who, each in values.items() if sign * (each - middle) > far}
