"""`longtake launch` on several hosts of one machine, with one rank on each."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from longtake.drill.fault import NotPossibleHereError
from longtake.drill.hosts import Cluster, hosts, why_not
from longtake.drill.launch import FIXED
from longtake.drill.looking import Looking
from longtake.process import environment, program

_PORT = 29400


@contextmanager
def cluster_of(count: int, folder: Path) -> Iterator[Cluster]:
    """Hosts that share this machine's disk.

    Raises:
        NotPossibleHereError: there can be none on this machine.
    """
    if reason := why_not():
        raise NotPossibleHereError(reason)
    with hosts(count, folder) as cluster:
        yield cluster


class Fleet(Looking):
    """The launchers of all hosts, which meet on the first; ended for good when the block is left.

    Args:
        folder: with recipe.toml, in which they work; all hosts see it.
        cluster: the hosts.
        nodes: how many of them it takes, such as `3`, or `2:3`.
        changes: of the recipe, `key=value`.
    """

    def __init__(
        self, folder: Path, cluster: Cluster, nodes: str, changes: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, cluster.names)
        self._cluster = cluster
        self._command = _launch(cluster.names[0], nodes, changes)
        self._launchers: dict[str, subprocess.Popen[str]] = {}
        for host in cluster.names:
            self.start(host)

    def start(self, host: str) -> None:
        """Start the launcher of a host that is up."""
        self._launchers[host] = self._cluster.start(
            host,
            [*self._pinned(host), *self._command],
            environment(**FIXED),
            self._folder,
            self._log,
        )

    def kill_host(self, host: str) -> None:
        """End all processes of a host, as when somebody switches it off."""
        self._cluster.kill(host)
        self._launchers.pop(host).wait()

    def is_running(self) -> bool:
        """Whether a launcher still runs."""
        return any(each.poll() is None for each in self._launchers.values())

    def wait(self) -> int:
        """Return 0 if all have ended well, or an exit code of one that has not."""
        for _ in self.looks():
            pass
        return next(filter(None, (each.wait() for each in self._launchers.values())), 0)

    def kill(self) -> bool:
        """End all hosts, if a launcher still runs; returns whether one did."""
        was_running = self.is_running()
        if was_running:
            self._cluster.close()
        for each in self._launchers.values():
            each.wait()
        return was_running

    def _pinned(self, host: str) -> list[str]:
        """What gives a host its share of the cores, as ranks of one machine share them.

        With more, it would use more threads, by which sums are rounded otherwise.
        """
        cores, hosts = sorted(os.sched_getaffinity(0)), self._cluster.names
        share = max(1, len(cores) // len(hosts))
        first = hosts.index(host) * share
        mine = {cores[place % len(cores)] for place in range(first, first + share)}
        return ["taskset", "--cpu-list", ",".join(map(str, sorted(mine)))]


def _launch(first: str, nodes: str, changes: Sequence[str]) -> list[str]:
    """What each host starts."""
    where = ["--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-endpoint", f"{first}:{_PORT}"]
    options = [part for change in changes for part in ("--set", change)]
    return program("longtake", "launch", "recipe.toml", *where, *options)
