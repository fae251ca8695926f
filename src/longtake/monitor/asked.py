"""Stack dumps that a person requests: of all nodes of a run, or of one process and its children."""

import os
import pwd
import re
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longtake import node_dir, process
from longtake.errors import RunError
from longtake.fsio import file_time, now, write_once
from longtake.heartbeat import heartbeat_dir, read_heartbeats
from longtake.monitor import dumps, reporting
from longtake.monitor.coordinator import nodes_with_dump, wait_for_dumps
from longtake.run_dir import RunDirectory

_ASKED_ROUNDS, _ASKED_ROUND_SECONDS = 2, 1.0
_ASKED_SECONDS = 10.0  # limit of the wait for dumps of other nodes


@dataclass(frozen=True)
class RunDumps:
    """Stack dumps of a run or of a process, for the command `longtake stacks`."""

    files: tuple[Path, ...] = ()  # dumps written by watchers
    own: node_dir.NodeDump | None = None  # this node's dump, if no watcher has made one
    silent: tuple[str, ...] = ()  # nodes whose watcher lives but gave no dump in time

    def dumps(self) -> Iterator[node_dir.NodeDump]:
        yield from (found for path in self.files if (found := node_dir.read_dump(path)))
        if self.own is not None:
            yield self.own


def dump_run(run: RunDirectory, *, native: bool) -> RunDumps:
    """Dump the stacks of all processes of a run by its nodes' watchers; this node needs none.

    Raises:
        RunError: the folder is not a run directory, or no process of the run is alive.
    """
    if not run.exists():
        raise RunError(
            f"{run.path} is not a run directory: it has no recipe.toml. "
            "Name a run directory, or a process with --pid."
        )
    here, folder = node_dir.this_node(run).host, heartbeat_dir(run.path)
    request = _ask(here, native=native)
    token = request["token"]
    silent: list[str] = []
    with suppress(OSError):  # the disk is full or another user's; this node can be dumped anyway
        before, since = node_dir.node_heartbeats(run), time.monotonic()
        write_once(node_dir.request_path(run, token), request)
        disk = reporting.RunDirThread(node_dir.this_node(run))
        missing = wait_for_dumps(disk, token, before, since, _ASKED_SECONDS)
        disk.close(0.0)
        silent = [host for host, is_alive in missing.items() if is_alive]
    nodes, own = nodes_with_dump(run, token), None
    is_here = any(each.is_alive for each in read_heartbeats(folder))
    # Without a watcher (watch.enabled = false) nobody else dumps this node.
    if is_here and here not in (node.host for node in nodes):
        own = dumps.dump_node(folder, here, request, _ASKED_ROUND_SECONDS)
        silent = [host for host in silent if host != here]
    if not (nodes or own or silent):
        raise RunError(
            f"No process of {run.path} runs: this node ({here}) has no such process, and no "
            "watcher of another node answers. "
            f"To see how it ended: {process.command()} show {shlex.quote(str(run.path))}"
        )
    return RunDumps(tuple(node.dump_path(token) for node in nodes), own, tuple(silent))


def dump_process_tree(pid: int, *, native: bool) -> RunDumps:
    """Dump the stacks of a process on this node and of all its descendants.

    Raises:
        RunError: there is no such process, or it belongs to another user.
    """
    found, here = process.read_stat(pid), socket.gethostname()
    if found is None:
        raise RunError(f"There is no process {pid} on this node ({here}).")
    if found.state == "Z":
        raise RunError(f"Process {pid} has ended; its parent, {found.parent}, has not reaped it.")
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError as error:
        raise RunError(f"Process {pid} has just ended.") from error
    if os.geteuid() not in (0, owner):
        raise RunError(
            f"Process {pid} belongs to {_user(owner)}, and this is {_user(os.geteuid())}: its "
            f"stacks can be read by its user or by root (sudo longtake stacks --pid {pid})."
        )
    find, request = partial(dumps.process_tree, pid), _ask(here, native=native)
    return RunDumps(own=dumps.dump_processes(find, here, request, _ASKED_ROUND_SECONDS))


def _ask(host: str, *, native: bool) -> node_dir.DumpRequest:
    return {
        "token": f"asked_{file_time()}_{re.sub('[^0-9A-Za-z-]', '-', host)}",
        "time": now(),
        "by": host,
        "reason": "asked",
        "rounds": _ASKED_ROUNDS,
        "native": native,
    }


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
