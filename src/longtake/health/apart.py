"""A check in a thread of its own, for what may hang: a disk, a driver, another program."""

import threading
import time
from collections.abc import Mapping

from longtake.health.check import Check, Numbers

HANGS = "check_hangs_seconds"
NUMBERS = {HANGS: "For how long a look at this side of the node has been hanging"}
HANGING_SECONDS = 5.0
"""After that, what was measured before is no longer told."""


class Apart:
    """Runs a check elsewhere, and tells what it last found.

    Args:
        check: whatever it does, the caller does not wait for it longer than it wants to.
        patience_seconds: how long that is.
    """

    def __init__(self, check: Check, patience_seconds: float = 0.2) -> None:
        self.name = check.name
        self.numbers: Mapping[str, str] = {**check.numbers, **NUMBERS}
        self._check = check
        self._patience_seconds = patience_seconds
        self._found: Numbers = {}
        self._asked, self._answered = threading.Event(), threading.Event()
        self._is_closing = False
        self._since: float | None = None
        self._thread = threading.Thread(target=self._serve, name=f"check {self.name}", daemon=True)
        self._thread.start()

    def sample(self) -> Numbers:
        """The newest numbers, and for how long the check has been hanging."""
        if self._since is None:
            self._answered.clear()
            self._since = time.monotonic()
            self._asked.set()
        self._answered.wait(self._patience_seconds)
        seconds = self._seconds()
        found = self._found if seconds < HANGING_SECONDS else {}
        return {**found, f"{HANGS}:{self.name}": round(seconds, 3)}

    def close(self) -> None:
        """Let the check go; one that hangs is left to hang."""
        self._is_closing = True
        self._asked.set()
        self._thread.join(self._patience_seconds)

    def _seconds(self) -> float:
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_closing:
                self._check.close()
                return
            try:
                self._found = self._check.sample()
            except Exception:  # no fault of a check's may end it for good
                self._found = {}
            self._since = None
            self._answered.set()
