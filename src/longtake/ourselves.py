"""Our own programs as processes of their own: the same interpreter, the same longtake."""

import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

LAUNCHER_VARIABLE = "LONGTAKE_LAUNCHER"
"""In the environment of a rank that `longtake launch` has started: the launcher's process."""

SECTION_VARIABLE = "LONGTAKE_WATCH_SECTION"
"""Tells a watcher the recipe's `watch`, as JSON."""
_PACKAGES = Path(__file__).parents[1]  # where longtake is imported from

_MAX_STARTS = 5
_SECONDS_BEFORE_ANOTHER = 1.0
_LONG_SECONDS = 600.0

_SET_PARENT_DEATH_SIGNAL = 1  # from linux/prctl.h


class Starts:
    """When a program of ours that has died is started again: soon, but not again and again."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque(maxlen=_MAX_STARTS)

    def note(self) -> None:
        """It is started now."""
        self._begun.append(time.monotonic())

    @property
    def pause_seconds(self) -> float:
        """For how long to leave it alone: one that dies often, for a long while."""
        is_often = len(self._begun) == _MAX_STARTS
        is_often = is_often and time.monotonic() - self._begun[0] < _LONG_SECONDS
        return _LONG_SECONDS if is_often else _SECONDS_BEFORE_ANOTHER


def command(name: str = "longtake") -> str:
    """How to type a program of this installation: its name where a shell finds it, else its path.

    Args:
        name: of a script that is installed beside longtake, such as `tensorboard`.
    """
    called = Path(sys.argv[0])
    scripts = Path(sys.executable).parent if called.name != "longtake" else called.parent
    own, found = scripts / name, shutil.which(name)
    if not own.is_file() or (found is not None and own.samefile(found)):
        return name
    path = own if not own.is_absolute() else Path(os.path.relpath(own))
    return shlex.quote(str(own.absolute() if path.parts[0] == ".." else path))


def program(module: str, *arguments: str) -> list[str]:
    """What starts one of our modules; a file of the folder it starts in is never taken for ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with `changes`, in which longtake is found wherever it lies."""
    paths = [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def start(
    command: Sequence[str], log: IO[bytes], folder: Path | None = None, **changes: str
) -> "subprocess.Popen[bytes]":
    """Start what `program` gave, in a session of its own: a terminal's Ctrl-C does not reach it.

    Args:
        command: the program and its arguments.
        log: where it writes what it says.
        folder: where it works; None: where this process does.
        changes: of its environment.
    """
    return subprocess.Popen(  # noqa: S603 - ourselves
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment(**changes),
        start_new_session=True,
    )


def end_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Make this process end, by a signal, when the one that started it does, however that ends.

    Closing a pipe is not enough: whoever hangs does not look at it. It is the thread that counts:
    on Linux, a process so bound ends when the thread that started it does.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, by)
    if os.getppid() != parent:  # it was faster; or something stands between
        raise SystemExit(f"the parent should be process {parent}, but is {os.getppid()}")


def code_digest(*folders: str) -> str:
    """Twelve hex digits over files of longtake's own, by name and content.

    Args:
        folders: of the package, such as `data`.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(path for folder in folders for path in (package / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
