"""Reads all nodes' answers to a request, so that a thousand of them fit in time and memory."""

import time
from pathlib import Path
from typing import Any

from longtake.node_dir import NodeDirectory, NodeDump, all_nodes, read_dump
from longtake.run_dir import RunDirectory
from longtake.watch.disk import Disk, DiskSilentError

_SECONDS, _SECONDS_OF_A_NODE = 3.0, 0.05
Frames = tuple[tuple[Any, ...], ...]


class Shelf:
    """Keeps identical stacks once: most processes of a large run are at the same places."""

    def __init__(self) -> None:
        self._known: dict[Frames, list[dict[str, Any]]] = {}

    def put(self, dump: NodeDump) -> NodeDump:
        """Let a dump share its stacks with those before it; returns it."""
        for each in dump["rounds"]:
            for process in each["processes"]:
                for thread in process["threads"]:
                    frames = thread["frames"]
                    key = tuple([tuple(frame.values()) for frame in frames])
                    thread["frames"] = self._known.setdefault(key, frames)
        return dump


def read_answers(
    disk: Disk, run: RunDirectory, token: str, seconds: float | None = None
) -> tuple[list[NodeDump], list[str]]:
    """Read one node's answer after the other, until time is up.

    Args:
        disk: reads them.
        run: the run directory.
        token: of the request.
        seconds: for all; by default 3, and 0.05 for each node.

    Returns:
        The answers that could be read in time, and the nodes whose answers could not.
    """
    found: list[NodeDump] = []
    shelf, begun = Shelf(), time.monotonic()
    try:
        nodes = disk.ask(lambda: _answered(run, token), seconds or _SECONDS)
    except OSError:
        return [], []
    limit = _SECONDS + _SECONDS_OF_A_NODE * len(nodes) if seconds is None else seconds
    for number, node in enumerate(nodes):
        try:
            dump = _read_before(begun + limit, disk, node.dump_path(token))
        except OSError:
            return found, [each.host for each in nodes[number:]]
        if dump:
            found.append(shelf.put(dump))
    return found, []


def _read_before(end: float, disk: Disk, path: Path) -> NodeDump | None:
    left = end - time.monotonic()
    if left <= 0:
        raise DiskSilentError(f"{path} was not read: time is up")
    return disk.ask(lambda: read_dump(path), left)


def _answered(run: RunDirectory, token: str) -> list[NodeDirectory]:
    return [node for node in all_nodes(run) if node.dump_path(token).exists()]
