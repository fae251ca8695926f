"""Says where processes are: by py-spy, by faulthandler, or by what /proc tells; torch-free.

A process that hangs is asked from outside, so nothing here waits for it, and nothing raises: a dump
that could not be had says so.
"""

from longtake.stacks.allow import SIGNAL, allow_inspection, signal_path
from longtake.stacks.dump import dump, dump_all, read_natively
from longtake.stacks.frames import Frame, StackDump, Thread
from longtake.stacks.last_words import from_faulthandler
from longtake.stacks.proc import state_of

__all__ = [
    "SIGNAL",
    "Frame",
    "StackDump",
    "Thread",
    "allow_inspection",
    "dump",
    "dump_all",
    "from_faulthandler",
    "read_natively",
    "signal_path",
    "state_of",
]
