"""Brings results back to the source."""

import os
from contextlib import suppress
from pathlib import Path

from longtake.evaluation.sync import selection
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.transport import Transport
from longtake.evaluation_dir import EvaluationDirectory

_OFTEN_WRITTEN = "heartbeat.json"  # it goes along with other news


class Pushed:
    """What was brought back of a run, by this process.

    Args:
        run: at the source.
    """

    def __init__(self, run: RemoteRun) -> None:
        self._folder = EvaluationDirectory(run.mirror).path
        self._there = run.below("evaluations")
        self._seen: dict[Path, tuple[int, int]] = {}

    def bring(self, transport: Transport) -> None:
        """Send what is new since the last time, with scores.json of each result after the rest.

        Raises:
            RunError: it could not be sent.
        """
        found = _files(self._folder)
        if found == self._seen:
            return
        transport.send(self._folder, self._there, selection.results(self._folder))
        transport.send(self._folder, self._there, selection.scores())
        self._seen = found


def _files(top: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of each file that is worth a push."""
    found = {}
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name != "claims" and name[0] != "."]
        for path in (Path(folder) / name for name in names if name != _OFTEN_WRITTEN):
            with suppress(FileNotFoundError):  # superseded, or written aside, just now
                found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found
