"""Assignment of processes to nodes from the environment of torchrun or Slurm; torch-free.

The module also parses Slurm's lists of hosts, and writes such lists in messages.
"""

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from longtake.errors import LongtakeError
from longtake.formatting import natural_key, number_ranges

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of ports for the rendezvous in a Slurm job: FIRST_PORT + job number % NUM_PORTS."""
HOSTS_VARIABLE: Final = "LONGTAKE_HOSTS"
"""Environment variable in a preflight over ssh: the hosts of all ranks, joined by commas."""

_LOOPBACK = "127.0.0.1"
_MAX_GROUPS = 4
_MAX_SPANS = 8
_AROUND_NUMBER = re.compile(r"^(.*?)(\d*)(\D*)$")  # a name's last number, if it has one


@dataclass(frozen=True)
class ProcessInfo:
    """The place of this process among all processes that were started together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # rank on its node; local rank 0 measures what its processes share
    host: str = ""
    node: str = ""  # number of the node by torchrun or Slurm; empty: unknown
    address: tuple[str, int] | None = None  # address of the common store; None: single process
    serves_store: bool = False
    expected_hosts: tuple[str, ...] = ()  # hosts known in advance; empty: unknown

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        return self.local_rank == 0


def find_process(environment: Mapping[str, str] | None = None) -> ProcessInfo:
    """Determine this process's rank and node from the environment of torchrun or Slurm.

    Args:
        environment: variables to use instead of os.environ.

    Raises:
        LongtakeError: the variables are incomplete.
    """
    env = os.environ if environment is None else environment
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            return _started_by_torchrun(env)
        # A batch script has SLURM_PROCID, too, but no other processes that it could wait for.
        if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            return _started_by_slurm(env)
    except (KeyError, ValueError) as error:
        raise LongtakeError(
            f"The environment of torchrun or Slurm is incomplete: {error}. Start it by torchrun, "
            "by srun, with --nodes, or without any of their variables (RANK, WORLD_SIZE, SLURM_*)."
        ) from error
    return ProcessInfo(host=socket.gethostname())


def _started_by_torchrun(env: Mapping[str, str]) -> ProcessInfo:
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    if world_size == 1:
        return ProcessInfo(host=socket.gethostname())
    # torchrun's agent may already serve a store at this address; a second one could not bind.
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ProcessInfo(
        rank=rank,
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        host=socket.gethostname(),
        node=env.get("GROUP_RANK", ""),
        address=(env["MASTER_ADDR"], int(env["MASTER_PORT"])),
        serves_store=rank == 0 and not agent_serves,
        expected_hosts=tuple(filter(None, env.get(HOSTS_VARIABLE, "").split(","))),
    )


def _started_by_slurm(env: Mapping[str, str]) -> ProcessInfo:
    rank, hosts = int(env["SLURM_PROCID"]), tuple(expand_hosts(env["SLURM_STEP_NODELIST"]))
    # Two jobs on a node must not meet at one port, and all tasks know the job's number.
    port = FIRST_PORT + int(env.get("SLURM_JOB_ID", "0")) % NUM_PORTS
    first = hosts[0] if len(hosts) > 1 else _LOOPBACK  # which no other machine can reach
    return ProcessInfo(
        rank=rank,
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        host=socket.gethostname(),
        node=env.get("SLURM_NODEID", ""),
        address=(env.get("MASTER_ADDR", first), int(env.get("MASTER_PORT", port))),
        serves_store=rank == 0,
        expected_hosts=hosts,
    )


def group_by_node(came: Mapping[int, tuple[str, str]]) -> tuple[list[str], list[list[int]]]:
    """Return the names of the nodes, rank 0's node first, and the ranks on each.

    Nodes with the same host name are numbered: `gpu0`, `gpu0 (2)`.
    """
    together: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(came):
        together.setdefault(came[rank], []).append(rank)
    names: list[str] = []
    for host, _ in together:
        taken = sum(name == host or name.startswith(f"{host} (") for name in names)
        names.append(f"{host} ({taken + 1})" if taken else host)
    return names, list(together.values())


def expand_hosts(text: str) -> Iterator[str]:
    """Yield the hosts of a Slurm list such as `gpu[01-03,07],login1`, in its order."""
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        yield from _expand(part)


def _expand(part: str) -> Iterator[str]:
    """Yield hosts of one part of a Slurm list: `a[1-2]b[3,4]` gives a1b3, a1b4, a2b3, a2b4."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        yield part
        return
    before, spans, after = found.groups()
    for span in spans.split(","):
        low, _, high = span.partition("-")
        for number in range(int(low), int(high or low) + 1):
            for rest in _expand(after):
                yield f"{before}{number:0{len(low)}d}{rest}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """Write host names on one short line; names that differ in their last number are folded.

    Such as gpu[0-6,12]; at most four groups are shown.
    """
    names = sorted(set(hosts), key=lambda name: (natural_key(name), name))
    parts = [_AROUND_NUMBER.findall(name)[0] for name in names]
    # node01 and node1 are two hosts: numbers of a length in which one begins with a zero are a
    # group of their own, in which all are padded to that length.
    padded = {
        (before, len(number), after)
        for before, number, after in parts
        if len(number) > 1 and number.startswith("0")
    }
    groups: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for before, number, after in parts:
        width = len(number) if (before, len(number), after) in padded else 0
        groups[before, width, after].append(number)
    texts = []
    for (before, width, after), numbers in groups.items():
        if len(numbers) < 3:
            texts.append(", ".join(f"{before}{number}{after}" for number in numbers))
        else:
            ranges = number_ranges([*map(int, numbers)], _MAX_SPANS, width)
            texts.append(f"{before}[{ranges.replace(', ', ',')}]{after}")
    more = len(texts) - _MAX_GROUPS
    return ", ".join(texts[:_MAX_GROUPS]) + (f" and {more} groups more" if more > 0 else "")
