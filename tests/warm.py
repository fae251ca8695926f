"""Starts processes that need not import torch again: most of what a small launch costs.

    python warm.py serve SOCKET                  imports once, and forks for whoever asks
    python warm.py run SOCKET 2 FILE ...         two ranks of a file, as `torchrun FILE ...`
    python warm.py run SOCKET 2 -m MODULE ...    or of a module

The ranks are real processes with the environment, the folder and the output of the one who asked,
and meet in a store as under torchrun. They end as there: when one fails the other is told to, and
signals reach both. What they do not have is a seed of hashes, and an import, of their own: tests
in which torchrun itself matters start it.

A test that looks at processes from outside has them as `Forked`, which is like subprocess.Popen.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

_IMPORTED = (
    "pytest",
    "longtake.cli.app",
    "longtake.training.train",
    "longtake.faults.inject",
    "longtake.evaluation.evaluator",
    "longtake.evaluation.server",
    "torch._dynamo",  # by the first step of an optimizer
    "scipy.optimize",
    "peft",
)
_NAMED = {
    "diffusers": (
        "AutoencoderKL",
        "AutoencoderKLWan",
        "FluxTransformer2DModel",
        "WanTransformer3DModel",
    ),
    "transformers": (
        "CLIPTextModel",
        "PreTrainedTokenizerFast",
        "T5EncoderModel",
        "UMT5EncoderModel",
    ),
}
"""What these packages import when it is asked for."""
_SECONDS_TO_END = 60
_TORCHRUN = "torch.distributed.run"
_Job = dict[str, Any]


class Forked:
    """What of a `subprocess.Popen` is asked for, of a process that is forked.

    Several ranks under torchrun are forked without it; `pid` is that of who waits for them.

    Args:
        socket_path: of who serves.
        command: Python, its options, -m, a module and its arguments; also torchrun's.
        folder: where it works.
        environment: all of it.
        output: a file that is open, for what it says.
    """

    def __init__(
        self,
        socket_path: str,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        output: int,
    ) -> None:
        count, program = _ranks_and_program(list(command[1:]))
        job = {"count": count, "program": program, "cwd": folder, "env": dict(environment)}
        with Path(os.devnull).open() as nothing:
            files = [nothing.fileno(), output, output]
            self._asked = _send(socket_path, job, files)
        self._answers = self._asked.makefile("rb")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with suppress(TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended; raises TimeoutExpired if it does not in time."""
        if self.returncode is None:
            if not select.select([self._asked], [], [], timeout)[0]:
                raise TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._asked.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _ranks_and_program(command: list[str]) -> tuple[int, list[str]]:
    """How many ranks a command would start, and what each runs."""
    if _TORCHRUN not in command:
        return 1, command
    torchrun, program = command[: (at := command.index("-m", 3))], command[at:]
    return int(torchrun[torchrun.index("--nproc-per-node") + 1]), program


def main() -> None:
    """Serve, or ask the one who serves."""
    verb, path, *rest = sys.argv[1:]
    if verb == "run":
        _ask(path, int(rest[0]), rest[1:])
    _run(_serve(path))


def _ask(path: str, count: int, program: list[str]) -> NoReturn:
    job = {"count": count, "program": program, "cwd": str(Path.cwd()), "env": dict(os.environ)}
    with _send(path, job, [0, 1, 2]) as asked, asked.makefile("rb") as answers:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: asked.sendall(bytes([number])))
        answers.readline()
        ended = int(answers.readline() or 1)
    sys.exit(max(1, ended) if ended else 0)


def _send(path: str, job: _Job, files: list[int]) -> socket.socket:
    """Ask for something; whoever hangs up ends it. Answered are two lines: a pid, an exit code."""
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(path)
    text = json.dumps(job).encode()
    socket.send_fds(asked, [len(text).to_bytes(8, "big")], files)
    asked.sendall(text)
    return asked


def _serve(path: str) -> _Job:
    """Return what is to be done, in each process that is to do it; never here."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen()  # whoever asks before all is imported waits
    Path(f"{path}.new").rename(path)
    for name in _IMPORTED:
        importlib.import_module(name)
    for package, names in _NAMED.items():
        for name in names:
            getattr(importlib.import_module(package), name)
    gc.freeze()  # so that a fork does not copy what it imported in order to look at it
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if server not in ready:
            os._exit(0)  # whoever started this has ended
        asked, _ = server.accept()
        size, files, _, _ = socket.recv_fds(asked, 8, 3)
        job = json.loads(asked.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        if os.fork() == 0:
            server.close()
            return _as_agent(asked, files, job)
        asked.close()
        for each in files:
            os.close(each)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


def _as_agent(asked: socket.socket, files: list[int], job: _Job) -> _Job:
    """Fork the ranks, in which this returns, and stay until all have ended."""
    os.setsid()
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    ranks = []
    for rank in range(job["count"]):
        if (pid := os.fork()) == 0:
            for number, each in enumerate(files):
                os.dup2(each, number)
                os.close(each)
            asked.close()
            store.close()
            os.setsid()
            place = _place(rank, job["count"], port) if job["count"] > 1 else {}
            return {**job, "env": job["env"] | place}
        ranks.append(pid)
    from torch import distributed

    kept = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=store.detach()
    )
    with suppress(OSError):  # who asked was killed
        asked.sendall(b"%d\n" % (ranks[0] if len(ranks) == 1 else os.getpid()))
    ended = _wait(ranks, asked)
    with suppress(OSError):
        asked.sendall(b"%d\n" % ended)
    del kept
    os._exit(0)


def _place(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _wait(pids: list[int], asked: socket.socket) -> int:
    """Pass signals on; end the others when one fails, and all when nobody asks any more."""
    handles, failed, until = {os.pidfd_open(pid): pid for pid in pids}, 0, float("inf")
    while handles:
        ready, _, _ = select.select([*handles, asked.fileno()], [], [], 1.0)
        if asked.fileno() in ready:
            told = asked.recv(1)
            _signal(handles, told[0] if told else signal.SIGKILL)
        for handle in handles.keys() & set(ready):
            _, status = os.waitpid(handles.pop(handle), 0)
            if status and not failed:
                failed = os.waitstatus_to_exitcode(status)
                until = time.monotonic() + _SECONDS_TO_END
                _signal(handles, signal.SIGTERM)
        if time.monotonic() > until:
            _signal(handles, signal.SIGKILL)
    return failed


def _signal(handles: dict[int, int], number: int) -> None:
    for pid in handles.values():
        os.kill(pid, number)


def _run(job: _Job) -> None:
    """Do it, as `python -u` would: whatever it raises ends this process as any other."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(n, "w"), write_through=True) for n in (1, 2))
    program = job["program"]
    if is_safe := program[0] == "-P":
        program = program[1:]
    is_module = program[0] == "-m"
    name, *arguments = program[is_module:]
    sys.argv = [name, *arguments]
    if not is_safe:
        sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(name).resolve().parent))
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.append(str(Path(__file__).parents[1]))  # has `tests`
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
