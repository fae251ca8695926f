"""What each of a node's numbers says, by its name."""

from longtake.health.apart import NUMBERS as APART
from longtake.health.cgroup import CgroupMemory
from longtake.health.chrony import Chrony
from longtake.health.clock import Clock
from longtake.health.disk import Disk
from longtake.health.gpu import Gpu
from longtake.health.infiniband import InfiniBand
from longtake.health.kernel_clock import KernelClock
from longtake.health.links import Ethernet
from longtake.health.load import Load
from longtake.health.reach import Reach, SlowLinks
from longtake.health.steps import Steps
from longtake.health.time_daemons import TimeDaemons
from longtake.watch.neighbours import Neighbours

NUMBERS = {
    **Clock.numbers,
    **KernelClock.numbers,
    **Chrony.numbers,
    **TimeDaemons.numbers,
    **Neighbours.numbers,
    **Gpu.numbers,
    **Ethernet.numbers,
    **InfiniBand.numbers,
    **Reach.numbers,
    **SlowLinks.numbers,
    **Disk.numbers,
    **Load.numbers,
    **CgroupMemory.numbers,
    **Steps.numbers,
    **APART,
}
