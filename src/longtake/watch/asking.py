"""Asks all nodes of a run where their processes are, and waits for those that will answer."""

import os
import pwd
import re
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.errors import RunError
from longtake.fsio import file_time, now, write_once
from longtake.heartbeat import folder_of, read_all
from longtake.node_dir import (
    NodeDump,
    Request,
    all_nodes,
    has_beaten,
    read_dump,
    read_heartbeats,
    request_path,
    this_node,
)
from longtake.process import command
from longtake.run_dir import RunDirectory
from longtake.stacks.processes import facts
from longtake.watch.dumps import dump_family, dump_node

_ROUNDS, _ROUND_SECONDS = 2, 1.0
_WAIT_SECONDS = 10.0
_SIGN_OF_LIFE_SECONDS = 3.0  # a watcher writes its heartbeat about once a second
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Answers:
    """What the nodes answered.

    Attributes:
        files: where the answers of nodes with a watcher lie.
        own: of this node, where no watcher answered for it.
        silent: nodes whose watcher lives, but did not answer in time.
    """

    files: tuple[Path, ...] = ()
    own: NodeDump | None = None
    silent: tuple[str, ...] = ()

    def dumps(self) -> Iterator[NodeDump]:
        """One by one: those of a thousand nodes would fill the memory."""
        for path in self.files:
            if found := read_dump(path):
                yield found
        if self.own is not None:
            yield self.own


def ask_nodes(run: RunDirectory, *, native: bool) -> Answers:
    """Where all processes of a run are; without a watcher here, those of this node are read anyway.

    Raises:
        RunError: it is no run directory, or nobody is running there.
    """
    if not run.exists():
        raise RunError(
            f"{run.path} is not a run directory: it has no recipe.toml. "
            "Name a run directory, or a process with --pid."
        )
    token = f"asked_{file_time()}_{re.sub('[^0-9A-Za-z-]', '-', socket.gethostname())}"
    silent = _wait_for_answers(run, token, native=native)
    answered = [node for node in all_nodes(run) if node.dump_path(token).exists()]
    own, here, folder = None, this_node(run).host, folder_of(run.path)
    is_here = any(pulse.is_alive for pulse in read_all(folder))
    if is_here and here not in (node.host for node in answered):
        own = dump_node(
            folder,
            here,
            token,
            "asked",
            rounds=_ROUNDS,
            round_seconds=_ROUND_SECONDS,
            native=native,
        )
        silent = [host for host in silent if host != here]
    if not (answered or own or silent):
        raise RunError(
            f"Nobody is running {run.path}: there is no process of it on this node ({here}), and "
            "no watcher of another one answers. "
            f"What became of it: {command()} show {shlex.quote(str(run.path))}"
        )
    return Answers(tuple(node.dump_path(token) for node in answered), own, tuple(silent))


def ask_process(pid: int, *, native: bool) -> Answers:
    """Where a process of this node, and all that it has started, are.

    Raises:
        RunError: there is no such process, or it is another user's.
    """
    found, here = facts(pid), socket.gethostname()
    if found is None:
        raise RunError(f"There is no process {pid} on this node ({here}).")
    if found.state == "Z":
        raise RunError(
            f"Process {pid} has ended, and only waits for its parent, {found.ppid}, to notice."
        )
    owner = _owner_of(pid)
    if os.geteuid() not in (0, owner):
        raise RunError(
            f"Process {pid} belongs to {_user(owner)}, and this is {_user(os.geteuid())}: its "
            f"stacks can be read by its user or by root (sudo longtake stacks --pid {pid})."
        )
    dump = dump_family(pid, here, rounds=_ROUNDS, round_seconds=_ROUND_SECONDS, native=native)
    return Answers(own=dump)


def _wait_for_answers(run: RunDirectory, token: str, *, native: bool) -> list[str]:
    """Wait for every node whose watcher lives; gives those that did not answer in time."""
    before = _at_work(run)
    with suppress(OSError):  # the disk is full or not ours, and this node can be read nevertheless
        _write_request(run, token, native=native)
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < _WAIT_SECONDS:
            awaited = [node for node in all_nodes(run) if not node.dump_path(token).exists()]
            awaited = [node for node in awaited if node.host in before]
            if waited > _SIGN_OF_LIFE_SECONDS:
                after = _at_work(run)
                awaited = [
                    node
                    for node in awaited
                    if has_beaten(before.get(node.host), after.get(node.host))
                ]
            if not awaited:
                return []
            time.sleep(_LOOK_SECONDS)
        return [node.host for node in awaited]
    return []


def _write_request(run: RunDirectory, token: str, *, native: bool) -> None:
    request: Request = {
        "token": token,
        "time": now(),
        "by": socket.gethostname(),
        "reason": "asked",
        "rounds": _ROUNDS,
        "native": native,
    }
    write_once(request_path(run, token), request)


def _at_work(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The heartbeats of nodes that have not ended as they should, by host."""
    return {host: each for host, each in read_heartbeats(run).items() if not each.get("ended")}


def _owner_of(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError as error:
        raise RunError(f"Process {pid} has just ended.") from error


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
