"""Whose turn it is to write to the trackers: a lease, and who has precedence.

The trainer's follower waits for no evaluator's: while it wants the lease it says so in a file,
again and again, and an evaluator's gives it back when done with what it has begun. So does that of
a trainer whose launch is over.
"""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from longtake.evaluation_dir import writer_path
from longtake.fsio import atomic_write, read_json
from longtake.lease import Lease, Leases
from longtake.run_dir import RunDirectory
from longtake.tracking.log import say

Role = Literal["trainer", "evaluator"]

_LEASE_SECONDS = 20.0
_WISH_SECONDS = 5.0


class Turn:
    """Takes the lease for one follower.

    Args:
        run: the run.
        role: whose follower it is.
    """

    def __init__(self, run: RunDirectory, role: Role) -> None:
        self._folder = writer_path(run)
        self._role = role
        self._leases = Leases(_LEASE_SECONDS, {"role": role, "caught_up": False})
        self._trouble = ""
        self._wish = _Wish(run.path / "tracking" / "wanted")

    def take(self) -> Lease | None:
        """The lease, if this follower may write now; else None, and it says that it wants to."""
        try:
            return self._take()
        except OSError as error:  # a full disk, for as long as it lasts
            if str(error) != self._trouble:
                self._trouble = str(error)
                say(f"{self._folder} cannot be written: {error}")
            return None

    def _take(self) -> Lease | None:
        if self._role == "evaluator" and self._wish.is_others():
            return None
        self._folder.parent.mkdir(exist_ok=True)  # not that of the run, which may be deleted now
        lease = self._leases.take(self._folder)
        if self._role == "trainer":
            if lease is None:
                self._wish.utter()
            else:
                self._wish.withdraw()
        return lease

    def must_give_way(self, *, is_ending: bool) -> bool:
        """Whether another follower, which has precedence, wants the lease that this one has.

        Args:
            is_ending: this one's launch is over.
        """
        return (self._role == "evaluator" or is_ending) and self._wish.is_others()

    def leave(self) -> None:
        """Want it no more."""
        self._wish.withdraw()


class _Wish:
    """The file in which a follower says that it wants the lease, and that it lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._beat = 0
        self._seen: tuple[object, object] | None = None
        self._seen_at = 0.0

    def utter(self) -> None:
        self._beat += 1
        with atomic_write(self._path) as aside, aside.open("x", encoding="utf-8") as file:
            file.write(f'{{"owner": "{self._owner}", "beat": {self._beat}}}\n')

    def withdraw(self) -> None:
        if self._beat:
            self._beat = 0
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def is_others(self) -> bool:
        """By this process's own clock: somebody else's, and it has changed within 5 s."""
        found = read_json(self._path)
        word = found.get("owner"), found.get("beat")
        if not found or word[0] == self._owner:
            return False
        if word != self._seen:
            self._seen, self._seen_at = word, time.monotonic()
        return time.monotonic() - self._seen_at < _WISH_SECONDS
