"""A node's health: one check a file, each a few numbers with their units in the names; torch-free.

    check.py        what a check is
    clock.py        steps and slews of the node's clock
    clock_alarm.py  the kernel's word that the clock was set
    kernel_clock.py how the kernel corrects the clock
    chrony.py       what chrony thinks of the clock
    time_daemons.py who sets the clock
    offsets.py      how far the nodes' clocks can be apart, by their heartbeats
    gpu.py          power, temperature, clocks, what throttles them, errors
    xid.py          the driver's error numbers
    links.py        Ethernet
    infiniband.py   InfiniBand
    disk.py         latency and space
    load.py         processors, memory, page cache
    cgroup.py       memory of the control group, and whom the kernel has ended for it
    open_files.py   how many files processes have open, and may have
    steps.py        what the ranks of this node need for a step, and whether they save
    peers.py        which other nodes a node is compared with
    signals.py      which numbers can be judged, and how people are told
    noise.py        by how much numbers differ without a reason
    course.py       what adds up, window by window
    degradation.py  from many nodes' numbers to one that is worse than the others, and how

A number is called `name` or `name:device`.
"""
