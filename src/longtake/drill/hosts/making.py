"""Brings hosts up, and takes them down."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtake.drill.hosts.cluster import Cluster
from longtake.drill.hosts.ssh import await_sshd, start_sshd, write_keys
from longtake.drill.hosts.wiring import SWITCH, write_names

_NETWORK = "10.77.0."


@contextmanager
def hosts(
    count: int, folder: Path, name: str = "node", *, with_ssh: bool = False
) -> Iterator[Cluster]:
    """Bring up some hosts, called node0, node1, ..., until the block ends.

    Args:
        count: how many; at most 200.
        folder: for their keys and files; all hosts see it, at the same path.
        name: what their names begin with.
        with_ssh: whether they are to have an sshd each; one that is booted again has none.

    Raises:
        RunError: they cannot be made; `why_not` says so before.
    """
    place = folder.absolute() / "cluster"
    place.mkdir(parents=True)
    names = [f"{name}{number}" for number in range(count)]
    cluster = Cluster(place, {each: f"{_NETWORK}{at + 10}" for at, each in enumerate(names)})
    write_names(place, cluster.addresses)
    if with_ssh:
        write_keys(cluster)
    try:
        for each in (SWITCH, *names):
            cluster.boot(each)
        for each in names if with_ssh else ():
            start_sshd(cluster, each)
        for each in names if with_ssh else ():
            await_sshd(cluster, each)
        yield cluster
    finally:
        cluster.close()
