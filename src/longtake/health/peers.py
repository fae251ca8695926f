"""Which other nodes a node is compared with: enough to know what is usual, few enough to read.

Each of n nodes reads the heartbeats of the nodes 1, 2, 4, 8, ... places before and after it in
the list of their names: all of up to 17 nodes, 14 of 200. Neighbours in a rack, which are named
one after the other and may fail together, are then compared with other racks too; and whoever one
node reads reads that node.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longtake.node_dir import beat_of

ALL_UP_TO = 17


def peers_of(host: str, hosts: Sequence[str]) -> list[str]:
    """The nodes that one is compared with.

    Args:
        host: the node.
        hosts: all nodes, in the order that all of them know.

    Returns:
        Others of `hosts`, in their order.
    """
    if host not in hosts or len(hosts) <= ALL_UP_TO:
        return [other for other in hosts if other != host][: ALL_UP_TO - 1]
    at, count = hosts.index(host), len(hosts)
    found = {(at + sign * stride) % count for stride in _strides(count) for sign in (1, -1)}
    return [other for place, other in enumerate(hosts) if place in found]


def _strides(count: int) -> Iterator[int]:
    stride = 1
    while 2 * stride <= count:
        yield stride
        stride *= 2


class Living:
    """Tells heartbeats that go on from those of nodes that are gone or stand still."""

    def __init__(self) -> None:
        self._beats: dict[str, object] = {}

    def of(self, heartbeats: Mapping[str, Mapping[str, Any]], launch: str) -> list[str]:
        """Nodes whose heart has beaten since the last call, in the same launch.

        Args:
            heartbeats: by host, what `NodeDirectory.read_heartbeat` gives.
            launch: of this node; empty: not known yet.

        Returns:
            Their hosts; none of one that is seen for the first time.
        """
        marks = {host: beat_of(each) for host, each in heartbeats.items()}
        before, self._beats = self._beats, dict(marks)
        return [
            host
            for host, mark in marks.items()
            if heartbeats[host]
            and before.get(host, mark) != mark
            and launch in ("", heartbeats[host].get("launch"))
        ]
