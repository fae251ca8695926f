"""Writes a server's heartbeat.json in each run that it serves; torch-free."""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

from longtake.evaluation.server.mishaps import Mishaps
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.task import Task
from longtake.evaluation.server.view import View
from longtake.evaluation_dir import ServerDirectory
from longtake.fsio import now
from longtake.run_dir import RunDirectory
from longtake.trust import is_mirror

_BEAT_SECONDS = 1.0
_PAUSE_PER_LOOK = 10.0
"""Pauses are so many times as long as looks, which take long where there are many checkpoints."""


class Keeper:
    """Writes about once a second, in a thread, what the server does and which checkpoints it needs.

    It needs the checkpoint that it samples and the oldest that wait. All servers promise to keep
    the same ones, so that more servers keep no more on disk. Where only the newest checkpoint is
    wanted, none is promised; nor is one of a mirror, which deletes nothing that waits.

    The views belong to the server's loop, and to this thread while the loop samples: the training
    saves and deletes meanwhile.

    Args:
        server: its name.
        options: of the server.
        mishaps: reports errors.

    Attributes:
        server: its name.
    """

    def __init__(self, server: str, options: Options, mishaps: Mishaps) -> None:
        self.server, self._options, self._mishaps = server, options, mishaps
        self._views: list[View] = []
        self._promised: dict[RunDirectory, set[int]] = {}
        self._task: Task | None = None
        self._doing: dict[str, Any] | None = None
        self._ended: str | None = None
        self._num_beats, self._written_at = 0, float("-inf")
        self._written: dict[RunDirectory, list[int]] = {}
        self._has_views = threading.Lock()
        self._writing = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def __enter__(self) -> Self:
        self._has_views.acquire()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._ended, self._task = now(), None
        self._promised.clear()
        self._beat()

    def serve(self, views: Sequence[View]) -> None:
        """Write heartbeats in these runs."""
        self._views = list(views)
        runs = {view.run for view in views}
        self._promised = {run: each for run, each in self._promised.items() if run in runs}

    def promise(self, view: View, pending: Sequence[Task]) -> None:
        """Need the oldest checkpoints of a run that wait, as many as the recipe says.

        Args:
            view: of the run.
            pending: its tasks, the oldest first.
        """
        if self._options.backlog.takes_all and not is_mirror(view.run.path):
            before = set(self._needs(view.run))
            self._promised[view.run] = waiting_steps(view, pending, before)

    @contextmanager
    def working_on(self, task: Task) -> Iterator[None]:
        """Say that this is being done, and look for new checkpoints, until the block ends."""
        self._doing = {**task.facts, "run": str(task.run.path), "what": "claim", "since": now()}
        self._has_views.release()
        try:
            yield
        finally:
            self._has_views.acquire()
            self._doing = None

    @contextmanager
    def needing(self, task: Task) -> Iterator[None]:
        """Need the task's checkpoint until the block ends; the heartbeat is written before that.

        The checkpoint may have been deleted before: look after.

        Raises:
            OSError: the heartbeat cannot be written.
        """
        self._task = task
        try:
            self._write(ServerDirectory(task.run, self.server))
            yield
        finally:
            self._task = None

    def progress(self, what: str, done: int, of: int) -> None:
        """Say how much of the task is done; see `Tick`."""
        if self._doing is not None:
            self._doing = {**self._doing, "what": what, "done": done, "of": of}

    def _run(self) -> None:
        look_at = 0.0
        while not self._is_over.wait(min(_BEAT_SECONDS, self._options.look_seconds)):
            begun = time.monotonic()
            if begun >= look_at and self._has_views.acquire(blocking=False):
                try:
                    self._look()
                finally:
                    self._has_views.release()
                look_at = time.monotonic() + _PAUSE_PER_LOOK * (time.monotonic() - begun)
            needs = {view.run: self._needs(view.run) for view in self._views}
            if needs != self._written or begun - self._written_at >= _BEAT_SECONDS:
                self._written, self._written_at = needs, begun
                self._beat()

    def _look(self) -> None:
        for view in self._views:
            with self._mishaps.kept_to(view.run.path):
                self.promise(view, view.due())

    def _beat(self) -> None:
        self._num_beats += 1
        for view in self._views:
            with self._mishaps.kept_to(view.run.path), suppress(OSError):  # a full disk
                self._write(view.directory)

    def _write(self, directory: ServerDirectory) -> None:
        with self._writing:
            record = {
                "server": self.server,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": now(),
                "beat": self._num_beats,
                "doing": self._doing,
                "needs": self._needs(directory.run),
                "ended": self._ended,
            }
            if directory.run.exists():
                directory.write_heartbeat(record)

    def _needs(self, run: RunDirectory) -> list[int]:
        task, steps = self._task, self._promised.get(run, set())
        return sorted(steps | {task.step} if task is not None and task.run == run else steps)


def waiting_steps(view: View, pending: Sequence[Task], promised: set[int]) -> set[int]:
    """The oldest steps of a run that wait to be sampled, as many as its recipe says.

    And those that are being sampled: by this server, so that after a failure it still needs what is
    tried again; and by another one, if they were promised before, because a server that has just
    claimed a checkpoint may not need it yet.

    Args:
        view: of the run.
        pending: its tasks, the oldest first.
        promised: what was needed before.
    """
    limit = view.section.hold_waiting
    waiting: set[int] = set()
    sampled: set[int] = set()
    for task in pending:
        is_full = len(waiting) >= limit and task.step not in waiting
        if (is_full and task.step not in promised) or view.is_damaged(task):
            continue
        how, server = view.claims.ending(task)
        if server is not None and how is None:
            is_own = server == view.directory.name
            sampled |= {task.step} if is_own or task.step in promised else set()
        elif not is_full:
            waiting.add(task.step)
    return waiting | sampled
