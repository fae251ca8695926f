"""Probes of one node: clocks, GPUs, network, disks, memory, load; without torch and numpy."""
