"""How far the clocks of two nodes can be apart, by the dates in their heartbeats.

A node that reads in another's heartbeat a date of which its own clock says that it is still to come
knows that the other's clock is ahead; by how much at least is the greatest lead that it saw in the
last minutes, because all that lies between writing and reading makes leads smaller. The other node
knows the same of this one. Together that is an interval, as with NTP, whose width is the time that
a heartbeat takes to be seen: about a second, less where many were seen. It is no judgement of
hangs: those are timed on the node itself, by a clock that nobody sets.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from longtake.health.check import Numbers

_READS = 30
"""Leads that count: of five minutes, at a sample each ten seconds."""
LEAD = "clock_lead_seconds"


class Offsets:
    """What one node knows of its clock and others'.

    Args:
        host: the node.
    """

    numbers: Mapping[str, str] = {
        LEAD: "By how much the other node's clock is ahead at least; negative: by how much it can "
        "be behind, or its heartbeat late",
        "clock_offset_at_least_seconds": "How far the two clocks are apart, as is proven",
        "clock_offset_at_most_seconds": "How far the two clocks can be apart",
    }

    def __init__(self, host: str) -> None:
        self._host = host
        self._leads: dict[str, deque[float]] = {}

    def forget(self) -> None:
        """Begin anew: this node's clock was set."""
        self._leads = {}

    def look(self, host: str, heartbeat: Mapping[str, Any], wall: float) -> Numbers:
        """What is known of another node after reading its heartbeat, which beats.

        Args:
            host: the other node.
            heartbeat: its heartbeat.json.
            wall: this node's date just after it was read, in seconds.

        Returns:
            Numbers with the other node's name behind a colon.
        """
        date = heartbeat.get("wall")
        if not isinstance(date, int | float):
            return {}
        leads = self._leads.setdefault(host, deque(maxlen=_READS))
        leads.append(date - wall)
        return self._known_of(host, max(leads), heartbeat)

    def _known_of(self, host: str, lead: float, heartbeat: Mapping[str, Any]) -> Numbers:
        found = {f"{LEAD}:{host}": round(lead, 6)}
        theirs = (heartbeat.get("health") or {}).get(f"{LEAD}:{self._host}")
        low, high = lead, -theirs if isinstance(theirs, int | float) else float("inf")
        # Where both would be wrong (a clock was set in the meantime) nothing is known.
        if low <= high < float("inf"):
            found[f"clock_offset_at_most_seconds:{host}"] = round(max(abs(low), abs(high)), 6)
            found[f"clock_offset_at_least_seconds:{host}"] = round(max(low, -high, 0.0), 6)
        elif low > 0:
            found[f"clock_offset_at_least_seconds:{host}"] = round(low, 6)
        return found
