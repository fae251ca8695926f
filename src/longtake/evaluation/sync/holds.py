"""The trainer keeps a checkpoint as long as it is pulled.

holds/step_00001000/<owner> is made at the source before, touched each minute, and taken away
after. It is written by the source's own clock: its age tells the trainer whether the owner lives.
"""

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.errors import RunError
from longtake.evaluation.sync import selection
from longtake.evaluation.sync.remote import RemoteRun
from longtake.evaluation.sync.transport import Transport
from longtake.fsio import now, write_json
from longtake.process import periodic
from longtake.run_dir import RunDirectory

_SECONDS = 60.0


@contextmanager
def held(
    transport: Transport,
    run: RemoteRun,
    steps: Collection[int],
    owner: str,
    seconds: float = _SECONDS,
) -> Iterator[None]:
    """Hold checkpoints at the source until the block ends.

    What an owner of this name has left there is taken away.

    Args:
        transport: to the source.
        run: theirs.
        steps: of the checkpoints.
        owner: the name of the file.
        seconds: after which it is touched again.

    Raises:
        RunError: it cannot be written there.
    """
    ours = RunDirectory(run.index.path / ".holds")
    shutil.rmtree(ours.holds_path, ignore_errors=True)
    for step in steps:
        _write(ours.holds_path / ours.checkpoint_path(step).name / owner)
    arguments = (transport, run, ours, owner)

    def renew() -> None:
        with suppress(RunError):  # the pull will say what is wrong
            _tell(*arguments)

    _tell(*arguments)
    try:
        with periodic("hold at the source", renew, seconds):
            yield
    finally:
        shutil.rmtree(ours.holds_path, ignore_errors=True)
        with suppress(RunError):  # it is of no effect when it is old, and is taken away next time
            _tell(*arguments)


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"owner": path.name, "time": now(), "why": "it is pulled"})


def _tell(transport: Transport, run: RemoteRun, ours: RunDirectory, owner: str) -> None:
    ours.holds_path.mkdir(parents=True, exist_ok=True)
    transport.send(ours.holds_path, run.below("holds"), selection.hold(owner), exactly=True)
