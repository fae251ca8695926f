"""Where a process stands among those that look at the cluster: by torchrun, by Slurm, or alone."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longtake.errors import LongtakeError

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Place:
    """One process among all.

    Attributes:
        rank: its number among all processes.
        size: how many there are.
        local_rank: its number among those of its node; 0 speaks for the node.
        host: the node's own name.
        node: the node's number, as torchrun or Slurm counts; empty: nobody does.
        address: (host, port) of the store through which all meet; None: the process is alone.
        hosts_store: whether this process has to serve that store itself.
        started_by: torchrun, Slurm or nobody.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    host: str = ""
    node: str = ""
    address: tuple[str, int] | None = None
    hosts_store: bool = False
    started_by: str = "nobody"

    @property
    def is_first(self) -> bool:
        """Whether this process judges and tells."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this process looks at what all processes of its node share."""
        return self.local_rank == 0


def find_place(environment: Mapping[str, str] | None = None) -> Place:
    """Find this process's place in its environment.

    Raises:
        LongtakeError: a variable that torchrun or Slurm sets is missing or is no number.
    """
    given = os.environ if environment is None else environment
    try:
        if "RANK" in given and "WORLD_SIZE" in given:
            return _by_torchrun(given)
        if "SLURM_STEP_ID" in given and int(given.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            return _by_slurm(given)
    except (KeyError, ValueError) as error:
        raise LongtakeError(
            f"torchrun's or Slurm's environment is not whole: {error}. Start it by torchrun, by "
            "srun, with --nodes, or without any of their variables (RANK, WORLD_SIZE, SLURM_*)."
        ) from error
    return Place(host=socket.gethostname())


def _by_torchrun(given: Mapping[str, str]) -> Place:
    rank, size = int(given["RANK"]), int(given["WORLD_SIZE"])
    if size == 1:
        return Place(host=socket.gethostname(), started_by="torchrun")
    agent_serves = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank,
        size,
        int(given.get("LOCAL_RANK", "0")),
        socket.gethostname(),
        given.get("GROUP_RANK", ""),
        (given["MASTER_ADDR"], int(given["MASTER_PORT"])),
        hosts_store=rank == 0 and not agent_serves,
        started_by="torchrun",
    )


def _by_slurm(given: Mapping[str, str]) -> Place:
    rank = int(given["SLURM_PROCID"])
    first = next(hosts_of(given["SLURM_STEP_NODELIST"]))
    port = _FIRST_PORT + int(given.get("SLURM_JOB_ID", "0")) % _NUM_PORTS
    return Place(
        rank,
        int(given["SLURM_STEP_NUM_TASKS"]),
        int(given["SLURM_LOCALID"]),
        socket.gethostname(),
        given.get("SLURM_NODEID", ""),
        (given.get("MASTER_ADDR", first), int(given.get("MASTER_PORT", port))),
        hosts_store=rank == 0,
        started_by="Slurm",
    )


def slurm_hosts(environment: Mapping[str, str] | None = None) -> list[str]:
    """The hosts of the Slurm step or job that this process is in; none outside of one."""
    given = os.environ if environment is None else environment
    text = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    return list(hosts_of(text))


def hosts_of(text: str) -> Iterator[str]:
    """The hosts that Slurm means by a list such as `gpu[01-03,07],login1`, in its order."""
    if (program := shutil.which("scontrol")) and text:
        command = [program, "show", "hostnames", text]
        said = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
        if said.returncode == 0:
            yield from said.stdout.split()
            return
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        yield from _spelt_out(part)


def _spelt_out(part: str) -> Iterator[str]:
    """`a[1-2]b[3,4]` is a1b3, a1b4, a2b3, a2b4."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if found is None:
        yield part
        return
    before, spans, after = found.groups()
    for span in spans.split(","):
        low, _, high = span.partition("-")
        for number in range(int(low), int(high or low) + 1):
            for rest in _spelt_out(after):
                yield f"{before}{number:0{len(low)}d}{rest}"
