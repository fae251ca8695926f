"""What cards are joined by: the figures that predicted times of collectives are made of."""

import math
from dataclasses import dataclass

from longtake.errors import RecipeError
from longtake.planner.devices import Device

SHARE_OF_LINK = 0.8
"""Of a maker's figure, what collectives of megabytes reach; usual on NVLink and InfiniBand."""
_GB = 1e9


@dataclass(frozen=True)
class Links:
    """Bytes a second that one card can send while it receives as much."""

    node: float
    """To others of its node."""
    network: float
    """To other nodes: the card's own share of its node's network."""

    def bandwidth(self, size: int, in_node: int) -> float:
        """Bytes a second that each card of a group sends in one of its collectives.

        In a ring all data passes each card; where the group is on several nodes, its cards of a
        node bear what leaves the node together, each through its own network card, as NCCL's
        parallel rings do (NVIDIA, nccl-tests, doc/PERFORMANCE.md: "bus bandwidth").
        """
        if size <= in_node:
            return self.node * SHARE_OF_LINK
        if in_node == 1:
            return self.network * SHARE_OF_LINK
        return min(self.node, in_node * self.network) * SHARE_OF_LINK


# NVLink 4: 900 GB/s in both directions together, and a 400 Gb/s InfiniBand card (NDR) for each GPU
# (NVIDIA's data sheets of H100, H200 and DGX H100). PCIe 4.0 x16: 31.5 GB/s in each direction, of
# which copies between cards through the processor reach 25; and a 100 Gb/s card for four of them.
_NVLINK = Links(450 * _GB, 50 * _GB)
_PCIE = Links(25 * _GB, 3.125 * _GB)
_NVLINK_3 = Links(300 * _GB, 25 * _GB)  # A100: 600 GB/s together; a 200 Gb/s InfiniBand card (HDR)
_NVLINK_5 = Links(900 * _GB, 50 * _GB)  # B200: 1.8 TB/s together; a 400 Gb/s InfiniBand card
_LOOPBACK = Links(2 * _GB, 1 * _GB)
_OF_DEVICES = {
    "h100pcie": _PCIE,
    "h100": _NVLINK,
    "h200": _NVLINK,
    "b200": _NVLINK_5,
    "a100": _NVLINK_3,
}


def links_of(device: Device) -> Links:
    """What cards of a kind are usually joined by; of an unknown one, PCIe."""
    if device.target == "cpu":
        return _LOOPBACK
    label = device.name.lower().replace(" ", "").replace("-", "")
    return next((links for name, links in _OF_DEVICES.items() if name in label), _PCIE)


def links_named(text: str, device: Device) -> Links:
    """Links as `longtake plan --link` takes them: "450,50" or "450", in GB/s of each card.

    Raises:
        RecipeError: it is no such thing.
    """
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if len(speeds) not in (1, 2) or not all(0 < speed < math.inf for speed in speeds):
        raise RecipeError(
            f"The link {text!r} is none. Expected NODE[,NETWORK]: GB/s that one card sends to "
            "others of its node and, after a comma, to other nodes, such as 450,50."
        )
    network = speeds[1] * _GB if len(speeds) == 2 else links_of(device).network
    return Links(speeds[0] * _GB, network)
