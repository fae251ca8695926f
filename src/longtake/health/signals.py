"""Which of a node's numbers can be judged, what healthy hardware does, and how people are told."""

from dataclasses import dataclass
from typing import Literal

from longtake.health.steps import CHECKPOINT

Against = Literal["others", "own past"]


@dataclass(frozen=True)
class Signal:
    """A number that can be judged.

    Attributes:
        name: of the number, without its device.
        kind: of device, for people.
        label: for people.
        unit: of what is shown.
        worse: which way is worse.
        spread: of healthy hardware, as a share of the number.
        least: shares are of the number, or of this where the number is less.
        against: what it is compared with. What depends on the data (work per step) has no past
            that it could be compared with.
        percent: whether people are told the deviation, and not the values.
        scale: how much of the shown unit one is.
        needs: a share of the same device that tells whether it is in use; it is not judged, and
            nothing is judged by it, while that is less than a tenth.
        unless: a number of the node; likewise, while that is not 0.
        counts: for people, what it is a rate of, if it is one of errors of a port. That errors
            come and go is no reason to weigh them less.
    """

    name: str
    kind: str = ""
    label: str = ""
    unit: str = ""
    worse: Literal["higher", "lower"] = "higher"
    spread: float = 0.5
    least: float = 0.0
    against: tuple[Against, ...] = ("others",)
    percent: bool = False
    scale: float = 1.0
    needs: str = ""
    unless: str = ""
    counts: str = ""


_MEASURED = (
    Signal("gpu_power_watts", "GPU", "power", "W", "lower", 0.08, needs="gpu_utilization_share"),
    Signal("gpu_sm_clock_mhz", "GPU", "clock", "MHz", "lower", 0.04, needs="gpu_utilization_share"),
    Signal("step_work_seconds", "rank", "step time", "s", "higher", 0.04, percent=True),
    Signal(
        "link_speed_bits_per_second",
        "link",
        "speed",
        "Gbit/s",
        "lower",
        0.04,
        against=("others", "own past"),
        scale=1e-9,
    ),
    Signal(
        # A checkpoint that is written holds up every fsync on ext4 and NFS, for seconds.
        "disk_write_seconds",
        "disk",
        "writing 4 KiB",
        "s",
        least=3.0,
        against=("others", "own past"),
        unless=CHECKPOINT,
    ),
    Signal("pressure_cpu_share", label="waiting for processors", least=0.25),
)
# Of a port, and how many a second are next to none.
_ERRORS = (
    ("link_symbol_errors_per_second", "symbol errors", 1.0),
    ("link_recoveries_per_second", "recoveries from link errors", 0.2),
    ("link_receive_errors_per_second", "damaged packets", 1.0),
    ("link_transmit_discards_per_second", "discarded packets", 10.0),
    ("link_out_of_sequence_per_second", "packets out of order", 10.0),
    ("link_ack_timeouts_per_second", "retries for want of an answer", 1.0),
)
SIGNALS = _MEASURED + tuple(
    Signal(name, least=least, counts=counts) for name, counts, least in _ERRORS
)


@dataclass(frozen=True)
class Finding:
    """A number that has been worse for some windows.

    Attributes:
        signal: which.
        device: of what; empty: of the node.
        value: in the middle of these windows.
        usual: likewise, the median of what it is compared with.
        against: with what.
    """

    signal: Signal
    device: str
    value: float
    usual: float
    against: Against

    @property
    def percent(self) -> float:
        """By how much it deviates from the usual."""
        return 100 * (self.value / self.usual - 1) if self.usual else 0.0

    def words(self) -> str:
        """For people: GPU 3 power 412 W against 655 W median; rank 24 step time +11 %."""
        signal = self.signal
        if signal.counts:
            port = " port ".join(self.device.rsplit("/", 1))
            value, usual = _count(self.value), _count(self.usual)
            return f"{port}: {value} {signal.counts} per second, others {usual}"
        label = f"{signal.kind} {self.device} {signal.label}" if self.device else signal.label
        return f"{label} {self.percent:+.0f} %" if signal.percent else f"{label} {self._values()}"

    def _values(self) -> str:
        signal = self.signal
        value, usual = (f"{each * signal.scale:.3g}" for each in (self.value, self.usual))
        if signal.scale * max(abs(self.value), abs(self.usual)) >= 10:
            value, usual = (f"{each * signal.scale:.0f}" for each in (self.value, self.usual))
        middle = "median" if self.against == "others" else "in its own past"
        unit = f" {signal.unit}" if signal.unit else ""
        return f"{value}{unit} against {usual}{unit} {middle}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
