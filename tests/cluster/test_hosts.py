"""Hosts out of network namespaces: each with a name, a cable and processes of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.build import wait_until
from tests.cluster.hosts import Cluster, hosts, why_not

from longtake.errors import RunError


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """node0 and node1."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2, tmp_path) as cluster:
        yield cluster


def _hears(cluster: Cluster) -> bool:
    """Whether node0 can find node1, which refuses; else nobody says that the address is his."""
    cluster.run("node0", ["ip", "neigh", "flush", "all"])
    told = cluster.run("node0", ["bash", "-c", "exec 3<>/dev/tcp/node1/9"]).stderr
    assert ("refused" in told) != ("No route to host" in told), told
    return "refused" in told


def test_a_host_has_its_own_name_and_dies_with_all_its_processes(cluster: Cluster) -> None:
    """It can be started again, under the same name and address."""
    assert cluster.run("node1", ["hostname"]).stdout == "node1\n"
    sleeping = cluster.start("node1", ["sleep", "600"])
    cluster.kill("node1")
    assert sleeping.wait(120) != 0
    sleeping.communicate()
    cluster.boot("node1")
    assert cluster.run("node1", ["hostname"]).stdout == "node1\n"
    wait_until(lambda: _hears(cluster))


def test_a_cable_is_pulled_and_put_back(cluster: Cluster) -> None:
    """What is limited is so in both directions."""
    wait_until(lambda: _hears(cluster))
    cluster.unplug("node1")
    assert not _hears(cluster)
    cluster.plug("node1")
    wait_until(lambda: _hears(cluster))
    cluster.limit("node1", "8mbit")
    assert "8Mbit" in cluster.run("node1", ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert "8Mbit" in cluster.run("switch", ["tc", "qdisc", "show", "dev", "port1"]).stdout
    cluster.unlimit("node1")
    assert "8Mbit" not in cluster.run("node1", ["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_what_fails_on_a_host_is_told_with_its_reason(cluster: Cluster) -> None:
    with pytest.raises(RunError, match=r"ip link set nothing up failed on the host node0: .*noth"):
        cluster.must("node0", "ip", "link", "set", "nothing", "up")
