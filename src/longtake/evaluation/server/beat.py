"""A server's heartbeat.json, about once a second, in each run that it serves; torch-free."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from longtake.evaluation.server.mishaps import Mishaps
from longtake.evaluation.server.task import Task
from longtake.evaluation_dir import ServerDirectory
from longtake.fsio import now
from longtake.process import periodic

_SECONDS = 1.0


class Beat:
    """Says what a server does, from a thread of its own.

    Args:
        server: its name.
        mishaps: who is told what nobody has foreseen.
    """

    def __init__(self, server: str, mishaps: Mishaps) -> None:
        self._server, self._mishaps, self._beat = server, mishaps, 0
        self._directories: list[ServerDirectory] = []
        self._doing: dict[str, Any] | None = None
        self._ended: str | None = None

    def serve(self, directories: Sequence[ServerDirectory]) -> None:
        """Say it in these runs."""
        self._directories = list(directories)

    @contextmanager
    def working_on(self, task: Task) -> Iterator[None]:
        """Say that this is being done, until the block ends."""
        self._doing = {**task.facts, "run": str(task.run.path), "what": "claim", "since": now()}
        try:
            yield
        finally:
            self._doing = None

    def progress(self, what: str, done: int, of: int) -> None:
        """Say how much of it is done; see `Tick`."""
        if self._doing is not None:
            self._doing = {**self._doing, "what": what, "done": done, "of": of}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Beat until the block ends, and say that it did."""
        try:
            with periodic("beat", self._write, _SECONDS):
                yield
        finally:
            self._ended = now()
            self._write()

    def _write(self) -> None:
        self._beat += 1
        record = {
            "server": self._server,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": now(),
            "beat": self._beat,
            "doing": self._doing,
            "ended": self._ended,
        }
        for directory in self._directories:
            with self._mishaps.kept_to(directory.run.path), suppress(OSError):  # a full disk
                if directory.run.exists():
                    directory.write_heartbeat(record)
