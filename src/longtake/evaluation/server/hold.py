"""Holds checkpoints that are sampled, or wait for it, so that the training does not delete them."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longtake.checkpoint.holds import hold_path
from longtake.fsio import is_file_name, is_linked, now, partial_path, write_json
from longtake.process import periodic
from longtake.run_dir import RunDirectory

RENEWED_SECONDS = 60.0


class Holds:
    """The holds of one owner: a file for each checkpoint, as long as anything of it needs that.

    The checkpoint may be gone already when it is held, or be taken away this moment: look after.

    Args:
        owner: the name of the server.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._users: Counter[tuple[RunDirectory, int]] = Counter()
        self._lock = threading.Lock()
        self._beat = 0

    def take(self, run: RunDirectory, step: int) -> None:
        """Hold a checkpoint once more.

        Raises:
            OSError: it cannot be written; it is not held by this call then.
        """
        with self._lock:
            self._write(run, step)
            self._users[run, step] += 1

    def give_back(self, run: RunDirectory, step: int) -> None:
        """Take back one `take`; the last one takes the file away."""
        with self._lock:
            self._users[run, step] -= 1
            if not self._users[run, step]:
                del self._users[run, step]
                release(run, step, self.owner)

    @contextmanager
    def held(self, run: RunDirectory, step: int) -> Iterator[None]:
        """Hold a checkpoint until the block ends.

        Raises:
            OSError: it cannot be written.
        """
        self.take(run, step)
        try:
            yield
        finally:
            self.give_back(run, step)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Write all of them again every minute, until the block ends."""
        with periodic("holds", self._renew, RENEWED_SECONDS):
            yield

    def _renew(self) -> None:
        with self._lock:
            self._beat += 1
            for run, step in self._users:
                with suppress(OSError):  # a full disk: tried again in a minute
                    self._write(run, step)

    def _write(self, run: RunDirectory, step: int) -> None:
        """Another server that gives its own hold back may remove the folder in between."""
        path = hold_path(run, step, self.owner)
        record = {"host": socket.gethostname(), "pid": os.getpid(), "time": now()}
        for _ in range(9):
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                write_json(path, {**record, "beat": self._beat})
                return
        write_json(path, {**record, "beat": self._beat})


@contextmanager
def held(run: RunDirectory, step: int, owner: str) -> Iterator[None]:
    """Keep a hold on one checkpoint until the block ends, and write it again every minute.

    Args:
        run: the run directory.
        step: of the checkpoint.
        owner: the name of the server.

    Raises:
        OSError: it cannot be written.
    """
    holds = Holds(owner)
    with holds.kept(), holds.held(run, step):
        yield


def release(run: RunDirectory, step: int, owner: str) -> None:
    """Take a hold of this server away."""
    _remove(hold_path(run, step, owner))


def release_all(run: RunDirectory, owner: str) -> None:
    """Take all holds of a server away that is dead.

    Its name is what a lease says: one that is no file's name has no holds, and links to other
    folders are not followed, so that no file of anybody else is deleted.
    """
    for folder in run.holds_path.glob("step_*") if is_file_name(owner) else ():
        if not is_linked(folder, run.path):
            _remove(folder / owner)


def _remove(path: Path) -> None:
    for each in (path, partial_path(path)):  # whoever is killed may leave half of it
        with suppress(OSError):
            each.unlink()
    with suppress(OSError):  # others hold it too
        path.parent.rmdir()
