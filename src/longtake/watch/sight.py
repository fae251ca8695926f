"""What a watcher sees when it looks: the hearts of its node, and whose processes are gone."""

import os
import select
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longtake.heartbeat import Pulse, read, read_all
from longtake.stacks import signal_path
from longtake.watch import flight_files

_SECONDS_OF_MEMORY = 60.0


@dataclass(frozen=True)
class Sight:
    """The hearts of a node, at one moment.

    Attributes:
        now: that of `time.monotonic()`.
        living: of processes that exist and have not said that they end.
        dead: the others.
    """

    now: float
    living: list[Pulse]
    dead: list[Pulse]

    @property
    def ranks(self) -> list[Pulse]:
        """The ranks that live."""
        return [pulse for pulse in self.living if pulse.role == "rank"]

    @property
    def launch(self) -> str:
        """That of the youngest rank; empty: it has not told yet."""
        ranks = self.ranks
        return max(ranks, key=lambda each: each.started).launch if ranks else ""


class Eyes:
    """Look at the hearts in a folder, time and again.

    Whether a process lives is asked of the kernel's handles of all processes at once, which costs
    next to nothing, once it has been asked of each by itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[tuple[int, int], int] = {}

    def look(self) -> Sight:
        """Read the hearts, and see who lives."""
        pulses = read_all(self._folder)
        self._let_go_of(set(self._handles) - {_who(pulse) for pulse in pulses})
        gone = self._gone()
        living: list[Pulse] = []
        dead: list[Pulse] = []
        for pulse in pulses:
            is_at_work = pulse.phase != "ended" and self._lives(pulse, gone)
            (living if is_at_work else dead).append(pulse)
        return Sight(time.monotonic(), living, dead)

    def close(self) -> None:
        """Give the handles back."""
        self._let_go_of(set(self._handles))

    def _lives(self, pulse: Pulse, gone: set[int]) -> bool:
        handle = self._handles.get(_who(pulse))
        if handle is not None:
            return handle not in gone
        with suppress(OSError):
            handle = os.pidfd_open(pulse.pid)
            self._handles[_who(pulse)] = handle
        # Asked after the handle is taken: it is not another's that has got the same number since.
        if pulse.is_alive:
            return True
        self._let_go_of({_who(pulse)} & set(self._handles))
        return False

    def _gone(self) -> set[int]:
        poll = select.poll()
        for handle in self._handles.values():
            poll.register(handle, select.POLLIN)
        return {handle for handle, _ in poll.poll(0)}

    def _let_go_of(self, whom: set[tuple[int, int]]) -> None:
        for who in whom:
            os.close(self._handles.pop(who))


def look(folder: Path) -> Sight:
    """Look once."""
    eyes = Eyes(folder)
    try:
        return eyes.look()
    finally:
        eyes.close()


def _who(pulse: Pulse) -> tuple[int, int]:
    return pulse.pid, pulse.started


class Graves:
    """Takes away the records of the dead: those that nobody will ask about any more."""

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}

    def tidy(self, sight: Sight) -> None:
        """Take away what is left of former launches and of decoding processes long gone.

        Ranks of this launch stay, for those who dump its processes to miss them.
        """
        since = {pulse.path: self._since.get(pulse.path, sight.now) for pulse in sight.dead}
        self._since = since
        for pulse in sight.dead:
            is_former = bool(sight.launch) and pulse.launch not in ("", sight.launch)
            is_old = sight.now - since[pulse.path] > _SECONDS_OF_MEMORY
            if is_former or (is_old and (pulse.role == "decode" or pulse.phase == "ended")):
                remove([pulse])


def remove(pulses: Iterable[Pulse]) -> None:
    """Take away the records of the dead, but for one in whose place another has begun."""
    for pulse in pulses:
        again = read(pulse.path)
        if again is not None and (again.phase == "ended" or not again.is_alive):
            folder = pulse.path.parent
            pulse.path.unlink(missing_ok=True)
            signal_path(folder, pulse.pid).unlink(missing_ok=True)
            if pulse.role == "rank" and not any(folder.glob(f"rank_{pulse.rank}_*")):
                flight_files.tidy(folder, [pulse.rank])
