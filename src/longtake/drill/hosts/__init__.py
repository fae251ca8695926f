"""Several "hosts" on one machine: network namespaces that are joined by a switch; torch-free.

    if reason := why_not():
        ...                                                   # they cannot be had here
    with hosts(2, folder) as cluster:
        cluster.run("node0", ["ping", "-c", "1", "node1"])
        cluster.own("node1", folder / "data")                 # a folder that only node1 sees there
        cluster.unplug("node1")

Each host has its own host name, network, processes (its process 1 is a shell that reaps), mounts,
/etc/hosts, /dev/shm and /run; disks, clock and cores are this machine's. All names resolve on all
of them. With ssh, each has an sshd, and going from one to another needs neither a password nor a
known_hosts file of the user's: keys are made in `folder`. Process ids that are written inside a
host are not those outside.

Nothing is left when the block ends, and next to nothing when Python is killed: each host is one
process tree that dies with this process, and its namespaces go with it.
"""

from longtake.drill.hosts.cluster import Cluster
from longtake.drill.hosts.making import hosts
from longtake.drill.hosts.tools import why_not

__all__ = ["Cluster", "hosts", "why_not"]
