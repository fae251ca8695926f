"""Health probes of one node: clocks, GPUs, network, disks, memory, load; no torch, no numpy."""
