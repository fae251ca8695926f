"""Can nodes be reached by their own names: what each resolves its name to.

Gloo binds to the address that a node's own name has. Where a distribution writes `127.0.1.1 gpu07`
into /etc/hosts, the others are told to connect to themselves, and all wait for a time-out.
"""

import ipaddress
import os
import socket

from longtake.config import Recipe
from longtake.preflight.finding import Finding, Judged, Skipped
from longtake.preflight.setting import Facts, Setting

NAME = "addresses"


def measure(setting: Setting) -> Facts:
    """The addresses of the node's own name, and the interface that gloo is told to use."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        own = sorted({str(each[4][0]) for each in found})
    except OSError:
        own = []
    return {"own": own, "interface": os.environ.get("GLOO_SOCKET_IFNAME", "")}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Of several nodes, who cannot be reached by others under its own name."""
    if len(facts) < 2:
        return Judged(skipped=[Skipped("addresses, clocks and links between nodes", "one node")])
    named = [node for node, each in facts.items() if is_unreachable(each)]
    return Judged(findings=[_finding(node, facts[node]["own"]) for node in named])


def is_unreachable(each: Facts) -> bool:
    """Whether a node gives its peers an address that is none of its own network's."""
    own = [ipaddress.ip_address(address.partition("%")[0]) for address in each["own"]]
    return not each["interface"] and all(address.is_loopback for address in own)


def _finding(node: str, own: list[str]) -> Finding:
    what = f"its own name resolves to {', '.join(own)}" if own else "its own name does not resolve"
    return Finding(
        "error",
        NAME,
        (node,),
        f"{what}: other nodes cannot connect to it",
        "an address of the network that joins the nodes",
        f"Correct the line of {node} in its /etc/hosts, or set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface to use.",
    )
