"""What the other nodes say of themselves in their heartbeats, as far as this node needs it."""

from collections.abc import Mapping
from typing import Any

from longtake.health import clock
from longtake.health.check import Numbers
from longtake.health.offsets import Offsets
from longtake.health.peers import Living, peers_of
from longtake.node_dir import NodeDirectory, all_nodes
from longtake.run_dir import RunDirectory


class Neighbours:
    """Reads heartbeats of other nodes that are alive; a check like others, for a disk may hang.

    Args:
        run: where they are.
        host: this node.
    """

    name = "neighbours"
    numbers: Mapping[str, str] = {
        "neighbours": "Nodes that this one is compared with, and that are alive",
        **Offsets.numbers,
    }

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._run, self._host = run, host
        self._living = Living()
        self._offsets = Offsets(host)
        self._forgets = False
        self._health: dict[str, Numbers] = {}
        self._addresses: dict[str, str] = {}

    @property
    def health(self) -> dict[str, Numbers]:
        """By node, the numbers that it gave at the last sample."""
        return self._health

    @property
    def addresses(self) -> dict[str, str]:
        """Nodes by the addresses that their ranks use, as far as they are known."""
        return self._addresses

    def forget_offsets(self) -> None:
        """Measure the offsets of clocks anew, from the next sample on: this one was set."""
        self._forgets = True

    def sample(self) -> Numbers:
        """The numbers now; those of a node that is seen for the first time come with the next."""
        if self._forgets:
            self._forgets = False
            self._offsets.forget()
        heartbeats, dates = self._read()
        living = self._living.of(heartbeats, self._launch())
        found_at = {at: host for host, each in heartbeats.items() for at in _addresses(each)}
        self._addresses = self._addresses | found_at
        found: Numbers = {"neighbours": float(len(living))}
        for host in living:
            found |= self._offsets.look(host, heartbeats[host], dates[host])
        self._health = {host: _flat(heartbeats[host].get("health")) for host in living}
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _read(self) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
        hosts = [node.host for node in all_nodes(self._run)]
        heartbeats, dates = {}, {}
        for host in peers_of(self._host, hosts):
            heartbeats[host] = NodeDirectory(self._run, host).read_heartbeat()
            dates[host] = clock.read_clocks().real_ns / 1e9
        return heartbeats, dates

    def _launch(self) -> str:
        own = NodeDirectory(self._run, self._host).read_heartbeat()
        return str(own.get("launch") or "")


def _flat(health: object) -> Numbers:
    numbers = health if isinstance(health, dict) else {}
    return {name: each for name, each in numbers.items() if isinstance(each, int | float)}


def _addresses(heartbeat: Mapping[str, Any]) -> list[str]:
    found = heartbeat.get("addresses")
    return [str(each) for each in found] if isinstance(found, list) else []
