"""What a process does so that it can be asked where it is, whatever happens to it; light."""

import ctypes
import faulthandler
import signal
from pathlib import Path
from typing import TextIO

SIGNAL = signal.SIGUSR2
"""Writes stacks. Not SIGUSR1: Slurm sends that before a time limit."""

# From linux/prctl.h
_SET_PTRACER, _ANYONE = 0x59616D61, ctypes.c_ulong(-1)

_file: TextIO | None = None  # faulthandler keeps its number, not the file


def allow_inspection(file: Path | None = None) -> None:
    """Let py-spy in where Yama forbids it, and write stacks on SIGUSR2; after a crash, to stderr.

    Args:
        file: where SIGUSR2 writes them; begun anew. None: stderr.

    Raises:
        OSError: the file cannot be written.
    """
    global _file
    ctypes.CDLL(None).prctl(_SET_PTRACER, _ANYONE)
    if not faulthandler.is_enabled():
        faulthandler.enable()
    opened = None if file is None else _opened(file)
    if opened is None:
        faulthandler.register(SIGNAL)
    else:
        faulthandler.register(SIGNAL, opened)
    before, _file = _file, opened
    if before is not None:
        before.close()


def _opened(file: Path) -> TextIO:
    file.unlink(missing_ok=True)
    return file.open("x")  # never through a link


def signal_path(folder: Path, pid: int) -> Path:
    """The file in a run's folder of records to which a rank writes its stacks."""
    return folder / f"stacks_{pid}.txt"
