"""Starts processes that need not import torch again: most of what a small launch costs.

    python warm.py serve SOCKET                  imports once, and forks for whoever asks
    python warm.py run SOCKET 2 FILE ...         two ranks of a file, as `torchrun FILE ...`
    python warm.py run SOCKET 2 -m MODULE ...    or of a module

The ranks are real processes with the environment, the folder and the output of the one who asked,
and meet in a store as under torchrun. They end as there: when one fails the other is told to, and
signals reach both. What they do not have is a seed of hashes, and an import, of their own: tests
in which torchrun itself matters start it.
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
from contextlib import suppress
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = ("pytest", "longtake.cli.app", "longtake.training.run", "longtake.drill.sabotage")
_SECONDS_TO_END = 20
_Job = dict[str, Any]


def main() -> None:
    """Serve, or ask the one who serves."""
    verb, path, *rest = sys.argv[1:]
    if verb == "run":
        _ask(path, int(rest[0]), rest[1:])
    _run(_serve(path))


def _ask(path: str, count: int, program: list[str]) -> NoReturn:
    job = {"count": count, "program": program, "cwd": str(Path.cwd()), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(path)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: asked.sendall(bytes([number])))
        text = json.dumps(job).encode()
        socket.send_fds(asked, [len(text).to_bytes(8, "big")], [0, 1, 2])
        asked.sendall(text)
        ended = asked.recv(1)
    sys.exit(ended[0] if ended else 1)


def _serve(path: str) -> _Job:
    """Return what is to be done, in each process that is to do it; never here."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()  # whoever asks before all is imported waits
    for name in _IMPORTED:
        importlib.import_module(name)
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
            place = _place(rank, job["count"], port) if job["count"] > 1 else {}
            return {**job, "env": job["env"] | place}
        ranks.append(pid)
    from torch import distributed

    kept = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=store.detach()
    )
    ended = _wait(ranks, asked)
    with suppress(OSError):  # who asked was killed
        asked.send(bytes([ended]))
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
                failed = max(1, os.waitstatus_to_exitcode(status))
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
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(n, "w"), write_through=True) for n in (1, 2))
    is_module = job["program"][0] == "-m"
    name, *arguments = job["program"][is_module:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, str(Path.cwd()) if is_module else str(Path(name).resolve().parent))
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
