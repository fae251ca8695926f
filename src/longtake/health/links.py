"""Ethernet: whether links are up, how fast, what goes over them, and what they lose."""

from collections.abc import Mapping
from pathlib import Path

from longtake.health.check import Numbers, Rates, read_number, read_text

_COUNTS = {
    "link_receive_bytes_per_second": ("rx_bytes",),
    "link_transmit_bytes_per_second": ("tx_bytes",),
    "link_errors_per_second": ("rx_errors", "tx_errors"),
    "link_drops_per_second": ("rx_dropped", "tx_dropped"),
}


class Ethernet:
    """Reads what the kernel says of the node's network cards, not of virtual ones.

    Args:
        root: where it says so.
    """

    name = "ethernet"
    numbers: Mapping[str, str] = {
        "link_up": "1: the link carries data",
        "link_speed_bits_per_second": "What the two ends of the link have agreed on",
        "link_receive_bytes_per_second": "What has come in",
        "link_transmit_bytes_per_second": "What has gone out",
        "link_errors_per_second": "Packets that were damaged",
        "link_drops_per_second": "Packets that were dropped",
        "link_carrier_changes_total": "How often the link went up or down",
    }

    def __init__(self, root: Path = Path("/sys/class/net")) -> None:
        self._root = root
        self._rates = Rates()

    def sample(self) -> Numbers:
        """The numbers now, with a card's name behind a colon."""
        found: Numbers = {}
        for folder in _cards(self._root):
            found |= {f"{name}:{folder.name}": value for name, value in self._card(folder).items()}
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _card(self, folder: Path) -> Numbers:
        found: Numbers = {"link_up": float(read_text(folder / "operstate") in ("up", "unknown"))}
        megabits, changes = read_number(folder / "speed"), read_number(folder / "carrier_changes")
        if megabits is not None and megabits > 0:  # -1: not known
            found["link_speed_bits_per_second"] = megabits * 1e6
        if changes is not None:
            found["link_carrier_changes_total"] = changes
        for name, files in _COUNTS.items():
            counts = [read_number(folder / "statistics" / file) for file in files]
            known = [count for count in counts if count is not None]
            rate = self._rates.rate(f"{name}:{folder.name}", sum(known)) if known else None
            if rate is not None:
                found[name] = round(rate, 3)
        return found


def _cards(root: Path) -> list[Path]:
    """Network cards and bonds of them; where there is none (a container), every link but lo."""
    try:
        folders = sorted(path for path in root.iterdir() if (path / "operstate").exists())
    except OSError:
        return []
    real = [each for each in folders if (each / "device").exists() or (each / "bonding").exists()]
    return real or [each for each in folders if each.name != "lo"]
