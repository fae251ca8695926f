"""Where a watcher stands, what it goes by, and that it is the only one there."""

import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from longtake.config import WatchSection
from longtake.errors import LongtakeError
from longtake.fsio import no_follow
from longtake.heartbeat import folder_of, make_private
from longtake.node_dir import NodeDirectory
from longtake.run_dir import RunDirectory
from longtake.trust import is_own
from longtake.watch import flight_files


@dataclass(frozen=True)
class Post:
    """One node of a run, as its watcher knows it.

    Attributes:
        run: the run directory.
        section: the recipe's, as the launch was told.
        host: the node's name.
        folder: where the hearts of the run's processes on this node are.
        data: folders whose disks are watched.
        by_hand: a person has started it, and reads what it prints.
    """

    run: RunDirectory
    section: WatchSection
    host: str
    folder: Path
    data: Sequence[Path] = ()
    by_hand: bool = False

    @property
    def node(self) -> NodeDirectory:
        """The node's folder in the run directory."""
        return NodeDirectory(self.run, self.host)


def post_at(
    run: Path,
    section: WatchSection | None = None,
    data: Sequence[Path] = (),
    *,
    host: str | None = None,
    folder: Path | None = None,
    by_hand: bool = False,
    trust: bool = False,
) -> Post:
    """A watcher's post on this node, or on one that is played (`host` and `folder`).

    Args:
        run: the run directory.
        section: the launch's; by default that of the recipe in the run directory, or where that
            cannot be read, the defaults.
        data: folders whose disks are watched.
        host: this node's name by default.
        folder: where the hearts are; that of the run by default.
        by_hand: whether a person has started it.
        trust: whether the hook of the recipe in the run directory may be run, whoever began it.
    """
    directory = RunDirectory(run)
    found = section or _section_of(directory, trust=trust)
    host, folder = host or socket.gethostname(), folder or folder_of(run)
    return Post(directory, found, host, folder, data, by_hand)


class Lock:
    """Held by the one who watches a run on a node.

    Args:
        folder: where the hearts are; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "watcher.lock"
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Take it if nobody holds it; whether this process holds it now.

        Raises:
            OSError: its folder cannot be made.
            RunError: its folder is another user's.
        """
        make_private(self._path.parent)
        file = open(self._path, "a+", opener=no_follow)  # noqa: SIM115 - kept open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it last may have taken the file away in the meantime.
            is_there = os.fstat(file.fileno()).st_ino == self._path.stat().st_ino
        except OSError:
            is_there = False
        if not is_there:
            file.close()
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return True

    def holder(self) -> str:
        """The process that holds it, as it has said itself; or nothing."""
        with suppress(OSError):
            return self._path.read_text()
        return ""

    def give_back(self) -> None:
        """Take the file away, and the folder if it is empty, and let the next one have it."""
        if self._file is not None:
            if not any(self._path.parent.glob("rank_*")):
                flight_files.tidy_all(self._path.parent)
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._path.parent.rmdir()


def _section_of(run: RunDirectory, *, trust: bool) -> WatchSection:
    """Without the hook of a run that somebody else began."""
    try:
        section = run.recipe().watch
    except LongtakeError:
        return WatchSection()
    is_safe = trust or section.hook is None or is_own(run)
    return section if is_safe else section.model_copy(update={"hook": None})
