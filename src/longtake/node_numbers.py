"""Health numbers of nodes: one table for the watcher, `longtake health` and the board.

A probe in `longtake.health` measures numbers and explains each in its `numbers`. A number to be
compared between nodes has a `HealthSignal` here, a count of errors has a sentence in
`ERROR_COUNTS`, and a number with a column in the table of nodes has a `NodeColumn`. Numbers are
named `name:device`, or `name` if they describe the whole node.
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
    """Select health numbers called `name`, by device; a number of the whole node has the key ""."""
    parts = ((key.partition(":"), each) for key, each in numbers.items())
    return {device: each for (found, _, device), each in parts if found == name}


@dataclass(frozen=True)
class HealthSignal:
    """Describes a health number that is compared with other nodes' or with its own past."""

    name: str  # without its device
    kind: str = ""  # kind of device, in messages
    label: str = ""  # name in messages
    unit: str = ""  # unit in messages
    worse: Literal["higher", "lower"] = "higher"
    spread: float = 0.5  # relative spread among healthy hardware
    least: float = 0.0  # deviations are relative to the number, or to this if it is greater
    # Work per step depends on the data, so its past says nothing.
    against: tuple[Baseline, ...] = ("others",)
    percent: bool = False  # messages show the deviation instead of the values
    scale: float = 1.0  # factor from the number to the shown unit
    needs: str = ""  # number of the same device: below 0.1 the device is idle and not judged
    unless: str = ""  # number of the node: while it is not 0, this one is not judged
    counts: str = ""  # name in messages of the port errors that this is a rate of


def _errors(name: str, counts: str, least: float, kind: str = "") -> HealthSignal:
    """Return a signal for a port's rate of errors; up to `least` per second is negligible."""
    return HealthSignal(name, kind, least=least, counts=counts)


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
    _errors("gpu_nvlink_errors_per_second", "errors of NVLinks", 1.0, "GPU"),
)
"""Health numbers that a node's watcher compares, window (sample) by window."""

_TEMPERATURE = HealthSignal(
    "gpu_temperature_celsius", "GPU", "temperature", "°C", "higher", 0.1, needs=USE
)
SHOWN_SIGNALS: Final = tuple(
    # Work per step depends on the data: only other nodes tell whether it is slow.
    each if each.name == "step_work_seconds" else replace(each, against=_BOTH)
    for each in (*SIGNALS, _TEMPERATURE)
)
"""Health numbers that `longtake health` compares: also temperature, which never causes an alarm."""

ERROR_COUNTS: Final = {
    "gpu_ecc_uncorrected_total": "{count:.0f} uncorrectable memory errors of GPU {device}",
    "gpu_xid_errors_total": "the driver reports errors of GPU {device} (XID {xid:.0f})",
    "cgroup_oom_kills_total": "the kernel has killed {count:.0f} processes for lack of memory",
    "link_downed_total": "the link {device} went down for a moment",
}
"""Message for each counter of errors; its increase is reported."""

CAUSES: Final = ("clock_", "link_", "peer_", "gpu_")
"""Prefixes of health numbers that can be the cause of a stall: clocks, links and GPUs.

Deviations of disks and CPUs are as often its effect."""


@dataclass(frozen=True)
class NodeColumn:
    """A column of the table of nodes; a node's cell shows the value of its worst device."""

    number: str
    text: Callable[[float], str]
    worse: Literal["higher", "lower"]
    marked_by: tuple[str, ...] = ()
    """Prefixes of the health signals whose alarm highlights a cell of the column."""
    is_drawn: bool = True
    """True: the board plots the column's number over time."""

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
    """Select the health numbers of a line of health.jsonl that are compared or shown."""
    return {
        name: float(x)
        for name, x in record.items()
        if name.partition(":")[0] in _KNOWN and type(x) in (int, float) and abs(x) < 1e300
    }


def columns_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return a node's value for each column of the table of nodes, from its worst device."""
    values = {label: by_device(numbers, each.number) for label, each in COLUMNS.items()}
    return {label: COLUMNS[label].worst([*own.values()]) for label, own in values.items() if own}


def links_down(numbers: Mapping[str, float]) -> list[str]:
    return sorted(device for device, is_up in by_device(numbers, "link_up").items() if not is_up)


# --- Far from others ---------------------------------------------------------------------------

SIGMAS: Final = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
_FAR, _FAR_OF_HEALTHY = 6.0, 2.0  # multiples of the measured spread, and of healthy hardware's


def find_far(values: Mapping[_K, float], signal: HealthSignal) -> dict[_K, float]:
    """Return the values of a health number that are far worse than the median of all.

    Pages use it on current numbers. A watcher's `OutlierDetector` judges whole windows and reports
    fewer outliers.
    """
    if not values:
        return {}
    # Among few nodes the measured spread can be 0 by chance; the spread of healthy hardware and
    # the negligible amount `least` then keep small deviations from being reported.
    middle = median(values.values())
    measured = SIGMAS * median(abs(each - middle) for each in values.values())
    far = max(_FAR * measured, _FAR_OF_HEALTHY * signal.spread * abs(middle), signal.least)
    sign = 1 if signal.worse == "higher" else -1
    return {who: each for who, each in values.items() if sign * (each - middle) > far}
