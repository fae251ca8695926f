"""Brings results, and the server's heartbeat, back to the source."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longtake.errors import RunError
from longtake.evaluation.sync import selection
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.transport import Transport
from longtake.evaluation_dir import EvaluationDirectory, ServerDirectory
from longtake.fsio import now
from longtake.process import periodic
from longtake.run_dir import RunDirectory

_HEARTBEAT = "heartbeat.json"
_HEARTBEAT_SECONDS = 60.0


class Pushed:
    """What was brought back of a run, by this process.

    Args:
        run: at the source.
        server: the name of this server.
    """

    def __init__(self, run: RemoteRun, server: str) -> None:
        self._run, self._server = run, server
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
        if ServerDirectory(self._run.mirror, self._server).heartbeat_path.exists():
            send_heartbeat(transport, self._run, self._server, ())
        self._seen = found


@contextmanager
def needed(
    transport: Transport,
    run: RemoteRun,
    steps: Collection[int],
    server: str,
    seconds: float = _HEARTBEAT_SECONDS,
) -> Iterator[None]:
    """Need checkpoints at the source until the block ends: the training does not delete them.

    Args:
        transport: to the source.
        run: theirs.
        steps: of the checkpoints.
        server: the name of this server.
        seconds: between two heartbeats.

    Raises:
        RunError: the heartbeat cannot be written there.
    """

    def renew() -> None:
        with suppress(RunError, OSError):  # the pull reports what is wrong
            send_heartbeat(transport, run, server, steps)

    send_heartbeat(transport, run, server, steps)
    try:
        with periodic("heartbeat at the source", renew, seconds):
            yield
    finally:
        with suppress(RunError, OSError):  # the heartbeat becomes stale
            send_heartbeat(transport, run, server, ())


def send_heartbeat(
    transport: Transport, run: RemoteRun, server: str, needs: Collection[int]
) -> None:
    """Send this server's heartbeat, with the steps that it needs at the source.

    The file gets its time from the source's clock: its age tells the training whether it counts.

    Raises:
        RunError: it could not be sent.
    """
    here = ServerDirectory(run.mirror, server).read_heartbeat()
    record: dict[str, Any] = {"server": server, "time": now(), **(dict(here) if here else {})}
    sent = RunDirectory(run.index.path / ".sent")
    try:
        ServerDirectory(sent, server).write_heartbeat({**record, "needs": sorted(needs)})
        folder, rules = EvaluationDirectory(sent).path, selection.heartbeat(server)
        transport.send(folder, run.below("evaluations"), rules, exactly=True)
    finally:
        shutil.rmtree(sent.path, ignore_errors=True)


def _files(top: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of each file that is worth a push."""
    found = {}
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name != "claims" and name[0] != "."]
        for path in (Path(folder) / name for name in names if name != _HEARTBEAT):
            with suppress(FileNotFoundError):  # superseded, or written aside, just now
                found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found
