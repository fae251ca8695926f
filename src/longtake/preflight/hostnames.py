"""Has each node a host name of its own: in the run directory a node's folder is called by it."""

import socket
from collections import defaultdict
from pathlib import Path

from longtake.config import Recipe
from longtake.preflight.finding import Finding, Judged
from longtake.preflight.setting import Facts, Setting

NAME = "host names"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MEMORY = Path("/dev/shm")  # noqa: S108 - where the processes of one node share memory
_ADVICE = (
    "Give each node a name of its own and start again: hostnamectl set-hostname NAME, or the "
    "container's: docker run --hostname NAME; in Kubernetes pods of a StatefulSet have their own."
)


def measure(setting: Setting) -> Facts:
    """The node's name, and which machine's memory it shares."""
    try:
        machine = f"{_BOOT.read_text().strip()} {_MEMORY.stat().st_dev}"
    except OSError:
        machine = f"of rank {setting.place.rank}"  # nobody can tell: it counts as one
    return {"name": socket.gethostname(), "machine": machine}


def judge(facts: dict[str, Facts], recipe: Recipe | None) -> Judged:
    """Nodes of one name; processes that were started apart on one machine are one node."""
    nodes = defaultdict(list)
    for node, each in facts.items():
        nodes[each["name"]].append(node)
    findings = []
    for name, some in nodes.items():
        machines = {facts[node]["machine"] for node in some}
        if len(machines) > 1:
            what = (
                f"{len(machines)} nodes are called {name}: what their watchers write would go to "
                f"one folder, nodes/{name} in the run directory, and no message could tell which "
                "of them it means"
            )
            expected = "a host name that no other node has"
            findings.append(Finding("error", NAME, tuple(some), what, expected, _ADVICE))
    return Judged(findings)
