"""What a process is doing, as one small record in memory that a watcher reads; torch-free.

Each rank and each decoding process has a record of its own, a file of one page in the node's
memory (`/dev/shm`: a disk that hangs must not stop who tells of it). Only that process writes it,
a microsecond each time, and whoever watches reads it without asking: a process that hangs, holds
Python's lock or is stopped leaves behind what it was doing, and since when. Times are those of
CLOCK_MONOTONIC, which all processes of one node share and which no clock step touches.
"""

from longtake.heartbeat.heart import Heart
from longtake.heartbeat.own import (
    beating,
    begin_here,
    begin_step,
    end_step,
    enter,
    launch_seconds,
    phase,
    took,
)
from longtake.heartbeat.pulse import Pulse, Timing, read, read_all
from longtake.heartbeat.record import Hearts, Phase, Role, folder_of, make_private, path_of

__all__ = [
    "Heart",
    "Hearts",
    "Phase",
    "Pulse",
    "Role",
    "Timing",
    "beating",
    "begin_here",
    "begin_step",
    "end_step",
    "enter",
    "folder_of",
    "launch_seconds",
    "make_private",
    "path_of",
    "phase",
    "read",
    "read_all",
    "took",
]
