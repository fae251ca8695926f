"""Cables, names and places of hosts: the commands that make them."""

from collections.abc import Mapping
from pathlib import Path

SWITCH = "switch"
"""The host that all cables go to."""
BRIDGE: tuple[tuple[str, ...], ...] = (
    ("ip", "link", "add", "bridge", "type", "bridge"),
    ("ip", "link", "set", "bridge", "up"),
)
"""What makes the switch one, on it."""

_PRIVATE_PLACES = """
set -e
mount -t sysfs none /sys
mount -t tmpfs -o size=2g none /dev/shm
mount -t tmpfs -o size=64m none /run
mount --bind {folder}/hosts /etc/hosts
hostname {host}
ip link set lo up
ip link set eth0 up
ip address add {address}/24 dev eth0
"""


def cable(port: str, there: int) -> tuple[tuple[str, ...], ...]:
    """What lays a cable from the switch to the network of a process, on the switch."""
    return (
        ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(there)),
        ("ip", "link", "set", port, "master", "bridge", "up"),
    )


def private_places(folder: Path, host: str, address: str) -> tuple[str, ...]:
    """What gives a host its name, its address and all else that no other sees, on it."""
    script = _PRIVATE_PLACES.format(folder=folder, host=host, address=address)
    return ("sh", "-c", script)


def write_names(folder: Path, addresses: Mapping[str, str]) -> None:
    """Write what all hosts have as /etc/hosts."""
    lines = [f"{address} {host}" for host, address in addresses.items()]
    text = "\n".join(["127.0.0.1 localhost", *lines, ""])
    (folder / "hosts").write_text(text, encoding="utf-8")
