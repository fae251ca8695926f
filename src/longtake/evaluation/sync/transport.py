"""What carries files between a source and here."""

from pathlib import Path
from typing import Protocol

from longtake.errors import RunError
from longtake.evaluation.sync.rules import Rules


class GoneError(RunError):
    """What was to be carried is not there, or was deleted meanwhile."""


class Transport(Protocol):
    """Carries trees of files; a file at its final name is always whole, or a beginning of it.

    Folders at the source are named below the address, "" for the address itself. What is there
    already, with the same size and time, is not carried again; what was carried in part goes on.
    All raise `GoneError` where there is nothing to carry, and `RunError`, one sentence, for
    whatever else went wrong; both may be tried again.
    """

    def fetch(self, folder: str, into: Path, rules: Rules, *, exactly: bool = False) -> None:
        """Bring what the rules mean here.

        Args:
            folder: at the source.
            into: here; it is made.
            rules: which of its files.
            exactly: delete what the rules mean and the source does not have.
                Else what is newer here stays.
        """
        ...

    def send(self, folder: Path, to: str, rules: Rules, *, exactly: bool = False) -> None:
        """Bring what the rules mean there.

        Args:
            folder: here.
            to: the folder at the source.
            rules: which of its files.
            exactly: write all of them anew, with the time of writing, and delete what the rules
                mean and is not here. Else what is newer there stays.
        """
        ...

    def interrupt(self) -> None:
        """End what is under way, in whichever thread; nothing is fetched any more."""
        ...

    def close(self) -> None:
        """Give up connections."""
        ...
