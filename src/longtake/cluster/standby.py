"""A process of a node that has imported what ranks import, and forks them when they start again.

It runs `python -m longtake train ...`, as they do, up to the first line of `main`: its forks have
the stack, the command line and the `__main__` of ranks that are started by exec.
"""

import ctypes
import gc
import importlib
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, connection, reduction
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from rich.console import Console

from longtake import process

STANDBY_NAME: Final = "standby"
"""What `ps -o comm` shows once it can be forked."""

_IMPORTED: Final = ("longtake.training.train", "torch._dynamo")
_READ_LATER: Final = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TORCH_NCCL_ASYNC_ERROR_HANDLING|LONGTAKE_\w+"
)
"""Environment variables that a rank reads after its imports; all others have to be the same."""
_UNBUFFERED: Final = {"PYTHONUNBUFFERED": "1"}  # as for ranks
_READY = "ready"
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.002
_GO = b"!"
_TERMINAL = 3  # the descriptor's number in a forked rank
_DEVICES = ("/dev/nvidia", "/dev/kfd")  # open once CUDA or ROCm has begun: no fork can use it then
_SET_SUBREAPER = 36  # from linux/prctl.h
_DONTNEED = 4  # from bits/mman-linux.h


# --- In the launcher --------------------------------------------------------------------------


class StandbyError(Exception):
    """No rank was forked; the message says why."""


class ForkedRank:
    """A child of this process that another one has started, as a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal; raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(_POLL_SECONDS)
        return code


class Standby:
    """A launcher's standby process, which ends with the launcher however that ends.

    Args:
        arguments: of `longtake`, such as `train recipe.toml`.
        console: for the reason why ranks are started without it.
    """

    def __init__(self, arguments: Sequence[str], console: Console) -> None:
        self._command = process.program("longtake", *arguments)
        self._console = console
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: connection.Connection | None = None
        self._is_ready = False

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it, in milliseconds; its imports take seconds."""
        self._pipe, theirs = Pipe()
        changes = {process.STANDBY_VARIABLE: str(os.getpid()), **_UNBUFFERED}
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **changes},
                start_new_session=True,
            )

    def fork(
        self, environment: Mapping[str, str], log: IO[Any], terminal: int
    ) -> ForkedRank | None:
        """Fork a rank that writes stdout and stderr to `log`; None: start it without the standby.

        The rank also has the descriptor `terminal`, under the number in its environment.
        That is so while it still imports, and once it cannot stand for a new process any more.
        """
        if self._pipe is None:
            return None
        try:
            if not self._is_ready:
                if not self._pipe.poll():
                    return None
                self._is_ready = self._answer(_READY) == _READY
            with _adopts_orphans():
                return self._fork(self._pipe, environment, [0, log.fileno(), terminal])
        except (StandbyError, OSError) as error:
            self._console.print(f"The standby process is not used: {error}.", markup=False)
            self.close()
        return None

    def close(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
        self._process, self._pipe, self._is_ready = None, None, False

    def _fork(
        self, pipe: connection.Connection, environment: Mapping[str, str], files: Sequence[int]
    ) -> ForkedRank:
        allowed, allow = os.pipe()
        try:
            pipe.send({**environment, process.TERMINAL_VARIABLE: str(_TERMINAL)})
            for each in (*files, allowed):
                reduction.send_handle(pipe, each, None)
            pid = int(self._answer("[0-9]+"))
            until = time.monotonic() + _ANSWER_SECONDS
            while not _is_child(pid):
                if time.monotonic() > until:
                    raise StandbyError(f"its process {pid} has not become one of the launcher")
                time.sleep(_POLL_SECONDS)
            os.write(allow, _GO)  # without it, it ends
            return ForkedRank(pid)
        finally:
            os.close(allowed)
            os.close(allow)

    def _answer(self, expected: str) -> str:
        assert self._pipe is not None
        if not self._pipe.poll(_ANSWER_SECONDS):
            raise StandbyError(f"it did not answer in {_ANSWER_SECONDS:g} s")
        try:
            answer = str(self._pipe.recv())
        except EOFError:
            raise StandbyError("it has ended") from None
        if not re.fullmatch(expected, answer):
            raise StandbyError(answer)
        return answer


@contextmanager
def _adopts_orphans() -> Iterator[None]:
    """Within the block, processes whose parent ends below this one become its children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


# --- In the standby process -------------------------------------------------------------------


def serve() -> None:
    """Import what ranks import, and fork them; returns in each rank, and never in the standby."""
    started = dict(os.environ)
    process.end_with(int(os.environ.pop(process.STANDBY_VARIABLE)))
    pipe = connection.Connection(os.dup(0))
    try:
        for name in _IMPORTED:
            importlib.import_module(name)
        _refuse_devices()
        stamps = _file_stamps()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all that was imported
    _release_memory()
    _set_name(STANDBY_NAME)  # the command line is that of a rank
    pipe.send(_READY)
    while True:
        try:
            environment = pipe.recv()
            files = [reduction.recv_handle(pipe) for _ in range(4)]
        except (EOFError, OSError):
            os._exit(0)  # the launcher has closed it
        changed = changed_variables(started, environment) or _changed_files(stamps)
        if changed:
            pipe.send(f"{changed[0]} has changed")
        elif _fork_orphan(pipe):
            pipe.close()
            _become_rank(environment, *files)
            return
        for each in files:
            os.close(each)


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Variables of the environment that differ, but those that a rank reads after its imports."""
    names = sorted(before.keys() | after.keys())
    found = (each for each in names if before.get(each) != after.get(each))
    return [each for each in found if not _READ_LATER.fullmatch(each)]


def _file_stamps() -> dict[str, tuple[int, ...] | None]:
    """Identity, time and size of each file that was imported, and of the interpreter."""
    files = {getattr(each, "__file__", None) for each in list(sys.modules.values())}
    paths = {sys.executable, *(each for each in files if isinstance(each, str))}
    return {path: _stamp(path) for path in paths}


def _changed_files(stamps: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    return [path for path, stamp in stamps.items() if _stamp(path) != stamp]


def _stamp(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands of files
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _set_name(name: str) -> None:
    Path("/proc/self/comm").write_text(name, encoding="ascii")


def _refuse_devices() -> None:
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(target := each.readlink()).startswith(_DEVICES):
                raise StandbyError(f"an import has opened {target}")


def _release_memory() -> None:
    """Give back what imports have freed, and pages of files, which forks read again anyway."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    mappings = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) r-.p \S+ \S+ [1-9]\d* (?:.*\n)(?:\w+:.*\n)*?Anonymous: +0 kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    for first, end in ((int(each[0], 16), int(each[1], 16)) for each in mappings):
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)


def _fork_orphan(pipe: connection.Connection) -> bool:
    """Fork a process whose parent has ended; whether this is it."""
    with warnings.catch_warnings():  # of libraries' threads, which Python has not started
        warnings.simplefilter("ignore", DeprecationWarning)
        if between := os.fork():
            os.waitpid(between, 0)
            return False
        if own := os.fork():
            pipe.send(str(own))
            os._exit(0)
    return True


def _become_rank(
    environment: Mapping[str, str], stdin: int, log: int, terminal: int, allowed: int
) -> None:
    """Be as after exec, as soon as the launcher has found this process among its children."""
    os.setsid()
    if os.read(allowed, len(_GO)) != _GO:
        os._exit(1)
    for number, each in enumerate((stdin, log, log, terminal)):
        os.dup2(each, number)
    os.closerange(_TERMINAL + 1, os.sysconf("SC_OPEN_MAX"))
    _set_name(Path(sys.executable).name)
    os.environ.clear()
    os.environ.update(environment)
    importlib.invalidate_caches()
    np.random.seed()  # as Python's own generator after each fork
