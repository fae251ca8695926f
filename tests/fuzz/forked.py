"""A forked command line: torch is imported once, and each command runs in a fork of that process.

    python forked.py FD        serves requests that come over a socket

A command has a time limit, a limit of memory, and a process group of its own, which is killed when
it ends. Whatever it leaves behind becomes a child of the server and is killed too.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

_IMPORTED = (
    "longtake.cli.app",
    "longtake.training.train",
    "longtake.evaluation.evaluator",
    "longtake.evaluation.server",
    "longtake.evaluation.export",
    "longtake.sampling.sampler",
    "longtake.data.index",
    "longtake.data.audit",
    "torch._dynamo",  # by the first step of an optimizer
    "scipy.optimize",
)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_DROP_CAPABILITY = 24  # PR_CAPBSET_DROP
_CAPABILITIES_VERSION = 0x20080522
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Ended:
    """What became of a command: `code` is negative for a signal, None after the time limit."""

    command: list[str]
    code: int | None
    stdout: str
    stderr: str
    seconds: float


class CommandLine:
    """`longtake` in forks of one process; `call` runs one command at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        env = {**os.environ, **_ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=folder, env=env)
        theirs.close()
        self._answers = self._socket.makefile("rb")

    def call(
        self,
        arguments: Sequence[str | bytes],
        cwd: Path,
        *,
        seconds: float = 60.0,
        memory_bytes: int = 8 * 2**30,
        file_bytes: int | None = None,
        unprivileged: bool = False,
        **environment: str,
    ) -> Ended:
        """Run one command.

        Args:
            arguments: those after `longtake`; bytes need not be UTF-8.
            cwd: its working directory.
            seconds: its time limit.
            memory_bytes: address space beyond what the imported modules take.
            file_bytes: no file becomes longer, as on a full disk.
            unprivileged: without root's right to pass over permissions.
            environment: changes of it.
        """
        texts = [os.fsdecode(each) for each in arguments]
        request = {
            "arguments": texts,
            "cwd": str(cwd),
            "seconds": seconds,
            "memory_bytes": memory_bytes,
            "file_bytes": file_bytes,
            "unprivileged": unprivileged,
            "environment": environment,
        }
        outputs = [self._folder / name for name in ("stdout", "stderr")]
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        assert line, "the server of the forked command line has died"
        answer = json.loads(line)
        stdout, stderr = (path.read_text(errors="surrogateescape") for path in outputs)
        return Ended(texts, answer["code"], stdout, stderr, answer["seconds"])

    def close(self) -> None:
        """End the server."""
        self._answers.close()
        self._socket.close()
        self._process.wait(60)


def main() -> None:
    """Serve; returns in the forks only."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # so that a fork does not copy what it imported in order to look at it
    for line in asked.makefile("rb"):
        request = json.loads(line)
        files = [
            os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")
        ]
        begun = time.monotonic()
        if (pid := os.fork()) == 0:
            asked.close()
            _become(request, files)
            return
        for each in files:
            os.close(each)
        code = _wait(pid, request["seconds"])
        answer = {"code": code, "seconds": round(time.monotonic() - begun, 3)}
        asked.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the command: its group, its output, its limits."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, each in enumerate((nothing, *files)):
        os.dup2(each, number)
        os.close(each)
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(n, "w"), write_through=True) for n in (1, 2))
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["file_bytes"] is not None:
        most = request["file_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    if request["unprivileged"] and os.geteuid() == 0:
        _drop_capabilities()
    sys.argv = ["longtake", *request["arguments"]]


def _drop_capabilities() -> None:
    """Let permissions of files mean to root what they mean to others."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(41):
        libc.prctl(_DROP_CAPABILITY, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0, os.strerror(ctypes.get_errno())


def _wait(pid: int, seconds: float) -> int | None:
    handle = os.pidfd_open(pid)
    is_done = bool(select.select([handle], [], [], seconds)[0])
    os.close(handle)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _end_orphans()
    return os.waitstatus_to_exitcode(status) if is_done else None


def _end_orphans() -> None:
    """Kill what the command has left behind: decode workers, a watcher, a tracker's follower."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _end(code: int) -> None:
    """End as the interpreter does, but for taking apart all modules, which a fork need not."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run() -> int:
    from longtake.cli import main as longtake

    try:
        longtake()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main()
    _end(_run())
