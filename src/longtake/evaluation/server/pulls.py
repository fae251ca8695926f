"""Brings checkpoints from a source, and results back, while others are sampled; torch-free."""

import threading
import time
from types import TracebackType
from typing import Self

from longtake.errors import LongtakeError
from longtake.evaluation.server.mishaps import Mishaps, whence
from longtake.evaluation.server.options import Options
from longtake.evaluation.server.report import Report
from longtake.evaluation.server.runs import is_over
from longtake.evaluation.server.view import View
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.source import Source, open_source
from longtake.evaluation_dir import ServerEventKind
from longtake.run_dir import RunDirectory


class Pulls:
    """Goes between a source and its mirror, in a thread of its own; nothing where there is none.

    Args:
        options: of the server.
        server: its name.
        report: who is told.

    Raises:
        RunError: what is given is no source.
    """

    def __init__(self, options: Options, server: str, report: Report) -> None:
        self._options, self._server, self._report = options, server, report
        self._source: Source | None = None
        if options.source is not None:
            self._source = open_source(options.source, options.places[0], server)
        self._mishaps = Mishaps(report)
        self._views: dict[RunDirectory, View] = {}
        self._remote: list[RemoteRun] = []
        self._is_settled = self._source is None
        self._is_over, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pull", daemon=True)

    @property
    def is_mirroring(self) -> bool:
        """Whether the runs are trained elsewhere."""
        return self._source is not None

    @property
    def are_settled(self) -> bool:
        """Whether all that is wanted is here; while runs are followed: since they have ended."""
        return self._is_settled

    def push_soon(self) -> None:
        """There is a new result."""
        self._wake.set()

    def __enter__(self) -> Self:
        if self._source is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._source is None:
            return
        self._is_over.set()
        self._wake.set()
        if not self._is_settled:  # asked to end: it does not wait for an hour's pull
            self._source.interrupt()
        self._thread.join()
        self._push(self._source)
        with self._mishaps.kept_to("leaving the mirror"):
            self._source.close()

    def _run(self) -> None:
        assert self._source is not None
        due = 0.0
        while not self._is_over.is_set():
            if time.monotonic() >= due:
                self._round(self._source)
                due = time.monotonic() + self._options.every_seconds
            else:
                self._push(self._source)
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()

    def _round(self, source: Source) -> None:
        """Look, and pull what is wanted; one failure ends a round, not the server."""
        try:
            were_over = bool(self._remote) and all(is_over(each.mirror) for each in self._remote)
            self._remote = source.look()
            for remote in self._remote:
                self._pull(source, remote)
            self._is_settled = were_over or not self._options.follows
        except Exception as error:  # what nobody has foreseen must not end this thread
            self._failed(error)
        self._push(source)

    def _pull(self, source: Source, remote: RemoteRun) -> None:
        view = self._view(remote.mirror)
        steps = list(dict.fromkeys(task.step for task in view.due(remote.index)))
        for step in steps:
            if self._is_over.is_set():
                return
            for pulled in source.pull(remote, [step]):
                facts = {"step": pulled.step, "bytes": pulled.bytes}
                seconds = round(pulled.seconds, 3)
                self._note(remote.mirror, "pulled", **facts, seconds=seconds)
        # What is here already waits for its turn, even if it is no longer there.
        source.prune(remote.mirror, {*steps, *(task.step for task in view.due())})
        view.tell_missed(source=str(self._options.source))

    def _push(self, source: Source) -> None:
        for remote in self._remote:
            with self._mishaps.kept_to(remote.mirror.path):
                try:
                    source.push(remote)
                except LongtakeError as error:
                    self._report.remark(f"{error}")

    def _failed(self, error: Exception) -> None:
        if self._is_over.is_set():  # it was interrupted
            return
        reason = str(error) if isinstance(error, LongtakeError) else f"{whence(error)}: {error}"
        for remote in self._remote:
            self._note(remote.mirror, "pull_failed", reason=reason)
        if self._options.follows:
            self._report.remark(f"{reason} It is tried again.")
        else:
            self._report.wrong(reason)
            self._is_settled = True

    def _note(self, run: RunDirectory, kind: ServerEventKind, **facts: str | float) -> None:
        self._view(run).note(kind, source=str(self._options.source), **facts)

    def _view(self, run: RunDirectory) -> View:
        """This thread's own: a view belongs to one."""
        if run not in self._views:
            self._views[run] = View(run, self._server, self._options, self._report)
        return self._views[run]
