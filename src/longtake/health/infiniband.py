"""InfiniBand and RoCE: whether ports are up, how fast, what goes over them, and what they lose."""

from collections.abc import Mapping
from pathlib import Path

from longtake.health.check import Numbers, Rates, read_number, read_text

_WORD_BYTES = 4
"""Data are counted in words of four bytes (InfiniBand Architecture, PortCounters)."""
_TRAFFIC = {
    "link_receive_bytes_per_second": "port_rcv_data",
    "link_transmit_bytes_per_second": "port_xmit_data",
}
_TOTALS = {
    "link_downed_total": "counters/link_downed",
    "link_recoveries_total": "counters/link_error_recovery",
    "link_symbol_errors_total": "counters/symbol_error",
    "link_receive_errors_total": "counters/port_rcv_errors",
    "link_transmit_discards_total": "counters/port_xmit_discards",
    "link_out_of_sequence_total": "hw_counters/out_of_sequence",
    "link_ack_timeouts_total": "hw_counters/local_ack_timeout_err",
    "link_congestion_notifications_total": "hw_counters/np_cnp_sent",
}

_ERRORS = {
    "link_symbol_errors_per_second": "link_symbol_errors_total",
    "link_recoveries_per_second": "link_recoveries_total",
    "link_receive_errors_per_second": "link_receive_errors_total",
    "link_transmit_discards_per_second": "link_transmit_discards_total",
    "link_out_of_sequence_per_second": "link_out_of_sequence_total",
    "link_ack_timeouts_per_second": "link_ack_timeouts_total",
}
"""What nodes are compared by: totals depend on how long a node has been up."""


class InfiniBand:
    """Reads what the kernel says of the node's ports.

    Args:
        root: where it says so.
    """

    name = "infiniband"
    numbers: Mapping[str, str] = {
        "link_up": "1: the link carries data",
        "link_speed_bits_per_second": "What the two ends of the link have agreed on",
        "link_receive_bytes_per_second": "What has come in",
        "link_transmit_bytes_per_second": "What has gone out",
        "link_waits_per_second": "Moments at which the port had data and no leave to send",
        "link_downed_total": "How often the link went down",
        "link_recoveries_total": "How often the link had to recover from errors",
        "link_symbol_errors_total": "Small errors on the wire",
        "link_receive_errors_total": "Packets that came in damaged",
        "link_transmit_discards_total": "Packets that could not be sent",
        "link_out_of_sequence_total": "Packets that came in out of order: others were lost",
        "link_ack_timeouts_total": "Packets that nobody has confirmed in time",
        "link_congestion_notifications_total": "How often a sender was asked to be slower (RoCE)",
        "link_symbol_errors_per_second": "Small errors on the wire",
        "link_recoveries_per_second": "How often the link had to recover from errors",
        "link_receive_errors_per_second": "Packets that came in damaged",
        "link_transmit_discards_per_second": "Packets that could not be sent",
        "link_out_of_sequence_per_second": "Packets that came in out of order: others were lost",
        "link_ack_timeouts_per_second": "Packets that nobody has confirmed in time",
    }

    def __init__(self, root: Path = Path("/sys/class/infiniband")) -> None:
        self._root = root
        self._rates = Rates()

    def sample(self) -> Numbers:
        """The numbers now, with the port, such as mlx5_0/1, behind a colon."""
        found: Numbers = {}
        for folder in sorted(self._root.glob("*/ports/*")):
            port = f"{folder.parents[1].name}/{folder.name}"
            found |= {f"{name}:{port}": each for name, each in self._port(port, folder).items()}
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _port(self, port: str, folder: Path) -> Numbers:
        found: Numbers = {}
        state = read_text(folder / "state")  # "4: ACTIVE"
        if state is not None:
            found["link_up"] = float(state.startswith("4"))
        speed = _gigabits(read_text(folder / "rate") or "")
        if speed is not None:
            found["link_speed_bits_per_second"] = speed * 1e9
        for name, file in _TOTALS.items():
            count = read_number(folder / file)
            if count is not None:
                found[name] = count
        return found | self._port_rates(port, folder / "counters") | self._error_rates(port, found)

    def _port_rates(self, port: str, counters: Path) -> Numbers:
        files = {name: (file, _WORD_BYTES) for name, file in _TRAFFIC.items()}
        files["link_waits_per_second"] = ("port_xmit_wait", 1)
        found: Numbers = {}
        for name, (file, times) in files.items():
            count = read_number(counters / file)
            rate = None if count is None else self._rates.rate(f"{name}:{port}", count * times)
            if rate is not None:
                found[name] = round(rate, 3)
        return found

    def _error_rates(self, port: str, totals: Numbers) -> Numbers:
        rates = {
            name: self._rates.rate(f"{name}:{port}", totals[total])
            for name, total in _ERRORS.items()
            if total in totals
        }
        return {name: round(rate, 3) for name, rate in rates.items() if rate is not None}


def _gigabits(rate: str) -> float | None:
    """Of a text such as `400 Gb/sec (4X NDR)`."""
    try:
        return float(rate.split()[0])
    except (IndexError, ValueError):
        return None
