"""`longtake launch` on several hosts of one machine, with one rank on each."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.build import change_options
from tests.cluster.hosts import Cluster

from longtake.faults.sandbox import RANK_ENVIRONMENT, RunObserver
from longtake.process import environment, program

_PORT = 29400


def core_shares(count: int) -> list[str]:
    """Cores of each of `count` hosts, for `taskset`, as many as one of `count` ranks would get.

    With more cores a rank would use more threads, and sums would round differently.
    """
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // count)
    shares = (
        [cores[at % len(cores)] for at in range(first, first + size)]
        for first in range(0, count * size, size)
    )
    return [",".join(map(str, sorted(set(each)))) for each in shares]


class Launchers(RunObserver):
    """Launchers of recipe.toml on all hosts, which meet on the first; killed with the block.

    `nodes`: how many hosts are needed, such as `3` or `2:3`.
    """

    def __init__(
        self, folder: Path, cluster: Cluster, nodes: str, changes: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, cluster.names)
        self._cluster = cluster
        meet = ["--rdzv-endpoint", f"{cluster.names[0]}:{_PORT}"]
        ranks = ["--nnodes", nodes, "--nproc-per-node", "1"]
        self._command = program(
            "longtake", "launch", "recipe.toml", *ranks, *meet, *change_options(*changes)
        )
        self._launchers: dict[str, subprocess.Popen[str]] = {}
        for host in cluster.names:
            self.start(host)

    def start(self, host: str) -> None:
        """Start the launcher of a host that is up."""
        names = self._cluster.names
        cores = core_shares(len(names))[names.index(host)]
        command = ["taskset", "--cpu-list", cores, *self._command]
        env = environment(**RANK_ENVIRONMENT)
        self._launchers[host] = self._cluster.start(host, command, env, self._folder, self._log)

    def kill_host(self, host: str) -> None:
        """End all processes of a host, as when it is switched off."""
        self._cluster.kill(host)
        self._launchers.pop(host).wait()

    def exit_code(self) -> int | None:
        """None while a launcher runs; 0 if all ended well, or the code of one that did not."""
        codes = [each.poll() for each in self._launchers.values()]
        return None if None in codes else next(filter(None, codes), 0)

    def kill(self) -> bool:
        was_running = self.exit_code() is None
        if was_running:
            self._cluster.close()
        for each in self._launchers.values():
            each.wait()
        return was_running
