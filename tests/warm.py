"""Starts processes that need not import torch again: most of what a small launch costs.

    python warm.py serve SOCKET                  imports once, and forks for whoever asks
    python warm.py run SOCKET 2 FILE ...         two ranks of a file, as `torchrun FILE ...`
    python warm.py run SOCKET 1 -m MODULE ...    one process of a module, as `python -m MODULE ...`
    python warm.py run SOCKET 1 -c CODE ...      or of code

The ranks are real processes with the environment, the folder and the output of the one who asked,
and meet in a store as under torchrun. They end as there: when one fails the other is told to, and
signals reach both. They do not have a seed of hashes, an import, and a first step traced of their
own: tests in which torchrun itself matters start it.

A test that looks at processes from outside has them as `Forked`, which is like subprocess.Popen.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
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
"""Names that these packages import when they are first used."""
_SECONDS_TO_END = 60
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_DROP_CAPABILITY = 24  # PR_CAPBSET_DROP
_CAPABILITIES_VERSION = 0x20080522
_TORCHRUN = "torch.distributed.run"
_Job = dict[str, Any]


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that tests need.

    Several ranks under torchrun are forked without it; `pid` is that of their parent.

    Args:
        socket_path: address of the server.
        command: Python, its options, -m, a module and its arguments; also torchrun's.
        folder: working directory.
        environment: all environment variables.
        output: descriptor of the file for stdout.
        errors: descriptor of the file for stderr; None: `output`.
        limits: of the process, see `_limit`. With any, all that it leaves behind is killed.
    """

    def __init__(
        self,
        socket_path: str,
        command: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        output: int,
        errors: int | None = None,
        limits: Mapping[str, int | None] | None = None,
    ) -> None:
        count, program = _ranks_and_program(list(command[1:]))
        job = _Job(count=count, program=program, cwd=folder, env=dict(environment), limits=limits)
        with Path(os.devnull).open() as nothing:
            files = [nothing.fileno(), output, output if errors is None else errors]
            self._asked = _send(socket_path, job, files)
        self._answers = self._asked.makefile("rb")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        with suppress(TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code at the end; raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._asked], [], [], timeout)[0]:
                raise TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._asked.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _ranks_and_program(command: list[str]) -> tuple[int, list[str]]:
    """Return the number of ranks that a command would start, and the program of each."""
    if _TORCHRUN not in command:
        return 1, command
    torchrun, program = command[: (at := command.index("-m", 3))], command[at:]
    return int(torchrun[torchrun.index("--nproc-per-node") + 1]), program


def main() -> None:
    """Serve, or ask the server."""
    verb, path, *rest = sys.argv[1:]
    if verb == "run":
        _ask(path, int(rest[0]), rest[1:])
    job = _serve(path)
    try:
        _run(job)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            sys.stderr.write(f"{ending.code}\n")
        _end(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
    except Exception:
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


def _ask(path: str, count: int, program: list[str]) -> NoReturn:
    where = str(Path.cwd())
    job = _Job(count=count, program=program, cwd=where, env=dict(os.environ), limits=None)
    with _send(path, job, [0, 1, 2]) as asked, asked.makefile("rb") as answers:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: asked.sendall(bytes([number])))
        answers.readline()
        ended = int(answers.readline() or 1)
    sys.exit(max(1, ended) if ended else 0)


def _send(path: str, job: _Job, files: list[int]) -> socket.socket:
    """Request a job, which ends with the connection; it answers with a pid and an exit code."""
    asked = socket.socket(socket.AF_UNIX)
    asked.connect(path)
    text = json.dumps(job).encode()
    socket.send_fds(asked, [len(text).to_bytes(8, "big")], files)
    asked.sendall(text)
    return asked


def _serve(path: str) -> _Job:
    """Return each job in the processes that are to do it; never in the server."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen()  # whoever asks before all is imported waits
    Path(f"{path}.new").rename(path)
    for name in _IMPORTED:
        importlib.import_module(name)
    for package, names in _NAMED.items():
        for name in names:
            getattr(importlib.import_module(package), name)
    _trace_a_step()
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


def _trace_a_step() -> None:
    """Plan a small training, which fills torch's caches: half a second less in each launch."""
    import torch

    from longtake import config
    from longtake.parallel.mesh import World
    from longtake.planner.plan import make_plan

    values = {
        "out": "run",
        "data": {"catalog": "none", "buckets": [{"num_frames": 8, "height": 32, "width": 32}]},
        "model": {"family": "tubelet", "config": {"hidden_size": 48, "num_blocks": 2}},
        "training": {"steps": 1, "global_batch_size": 1, "device": "cpu"},
    }
    state = torch.get_rng_state()  # a fresh process has the same
    make_plan(config.parse(values, "warm.py"), "fp32", World(0, 0, 1, torch.device("cpu"), None))
    torch.set_rng_state(state)


def _as_agent(asked: socket.socket, files: list[int], job: _Job) -> _Job:
    """Fork the ranks, in which this returns, and stay until all have ended."""
    os.setsid()
    if job["limits"] is not None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
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
    if len(ranks) > 1:
        from torch import distributed

        _kept = distributed.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=store.detach(),
        )
    with suppress(OSError):  # the client was killed
        asked.sendall(b"%d\n" % (ranks[0] if len(ranks) == 1 else os.getpid()))
    ended = _wait(ranks, asked)
    if job["limits"] is not None:
        _kill_children()
    with suppress(OSError):
        asked.sendall(b"%d\n" % ended)
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
    """Pass signals on; end the others when one fails, and all when the client has gone."""
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


def _kill_children() -> None:
    """Kill what the ranks have left behind: decode workers, a watcher, a tracker's follower."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _limit(
    memory_bytes: int, file_bytes: int | None = None, unprivileged: int | None = None
) -> None:
    """Limit this process.

    Args:
        memory_bytes: address space beyond what the imported modules take.
        file_bytes: length of any file, as on a full disk.
        unprivileged: without root's right to pass over permissions.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if unprivileged and os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for number in range(41):
            libc.prctl(_DROP_CAPABILITY, number, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
        assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0, os.strerror(ctypes.get_errno())


def _run(job: _Job) -> None:
    """Run the job's program as `python -u` would."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(n, "w"), write_through=True) for n in (1, 2))
    if job["limits"] is not None:
        _limit(**job["limits"])
    program = job["program"]
    if is_safe := program[0] == "-P":
        program = program[1:]
    kind = program[0] if program[0] in ("-m", "-c") else ""
    name, *arguments = program[bool(kind) :]
    sys.argv = ["-c" if kind == "-c" else name, *arguments]
    if not is_safe:
        sys.path.insert(0, str(Path.cwd()) if kind else str(Path(name).resolve().parent))
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's
    else:
        sys.path.append(str(Path(__file__).parents[1]))  # has `tests`
        runpy.run_path(name, run_name="__main__")


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but for taking apart all modules, which a fork need not."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    main()
