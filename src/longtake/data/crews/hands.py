"""Processes that do an errand, and are watched while they do it.

A decoder may hang in one file or crash on it, and no thread can be stopped from outside. So each
process has one item at a time, and gives a sign whenever there is progress. One that is silent for
too long is killed, one that dies is replaced, and its item is lost with that reason. Processes have
a command line of their own (`longtake.data.crews.hand`), so nothing of the caller's main module
runs in them.
"""

import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from longtake.data.crews.errand import Errand
from longtake.data.crews.hand import SIGN
from longtake.errors import DataError
from longtake.process import environment, program

_START_SECONDS = 300.0  # a cold network file system takes long to import from
_END_SECONDS = 2.0


class Loss(NamedTuple):
    """Why an item's process came to its end."""

    reason: str


class Order(NamedTuple):
    """An errand for processes: whoever watches over them need not know what it is.

    Attributes:
        errand: pickled.
        doing: as the errand says.
        silence_seconds: likewise.
    """

    errand: bytes
    doing: str
    silence_seconds: float

    @classmethod
    def of(cls, errand: Errand[Any, Any]) -> "Order":
        """An order for an errand."""
        return cls(pickle.dumps(errand), errand.doing, errand.silence_seconds)


class Hands:
    """Processes for one errand, which stay for the next items until they are closed.

    Args:
        order: what they do.
        count: how many, at most.
        folder: where they run; None: where this process does.
    """

    def __init__(self, order: Order, count: int, folder: Path | None = None) -> None:
        self._order = order
        self._count = count
        self._folder = folder
        self._idle: list[_Hand] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().end()

    def work(self, items: Iterable[bytes]) -> Generator[tuple[int, bytes | Loss]]:
        """Yield each pickled item's number and what its process said, a pickled `Answer`.

        Raises:
            DataError: no process can be started.
        """
        waiting = enumerate(items)
        busy: dict[_Hand, int] = {}
        try:
            for number, item in islice(waiting, self._count):
                busy[self._give(item)] = number
            while busy:
                for hand, answer in _answers(busy):
                    yield busy[hand], answer
                    del busy[hand]
                    self._put_away(hand)
                    if (following := next(waiting, None)) is not None:
                        number, item = following
                        busy[self._give(item)] = number
        finally:
            for hand in busy:
                hand.end()

    def _give(self, item: bytes) -> "_Hand":
        """Let a process begin with an item: an idle one, or a new one."""
        hand = self._idle.pop() if self._idle else _Hand(self._order, self._folder)
        hand.give(item)
        return hand

    def _put_away(self, hand: "_Hand") -> None:
        if not hand.is_over:
            self._idle.append(hand)


def _answers(busy: Iterable["_Hand"]) -> list[tuple["_Hand", bytes | Loss]]:
    """What processes have to say of their items, within a second."""
    hands = list(busy)
    ready = wait([hand.connection for hand in hands], timeout=1.0)
    heard = [(hand, hand.listen(is_ready=hand.connection in ready)) for hand in hands]
    return [(hand, answer) for hand, answer in heard if answer is not None]


class _Hand:
    """A process as its parent sees it."""

    def __init__(self, order: Order, folder: Path | None) -> None:
        self._order = order
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.connection: Connection[bytes, bytes]
        self.connection, theirs = Pipe()
        arguments = (str(os.getpid()), str(theirs.fileno()))
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            program("longtake.data.crews.hand", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
            env=environment(),
            cwd=folder,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the one who started it
        )
        theirs.close()
        self._has_started = self.is_over = False
        self.give(order.errand)

    def give(self, item: bytes) -> None:
        """Let it begin with an item."""
        self._last_sign = time.monotonic()
        with suppress(ConnectionError):  # it is dead; whoever listens will find out
            self.connection.send_bytes(item)

    def listen(self, *, is_ready: bool) -> bytes | Loss | None:
        """What came of its item, once that is known.

        Args:
            is_ready: whether it has something to say, which may be that it is dead.

        Raises:
            DataError: it could not be started.
        """
        if not is_ready:
            return self._judged()
        try:
            said = self.connection.recv_bytes()
        except (EOFError, OSError):
            return self._died()
        self._has_started, self._last_sign = True, time.monotonic()
        return None if said == SIGN else said

    def _judged(self) -> Loss | None:
        """Kill it if it has been silent for too long."""
        limit = self._order.silence_seconds if self._has_started else _START_SECONDS
        if time.monotonic() - self._last_sign < limit:
            return None
        self.end()
        if not self._has_started:
            raise DataError(f"A process for {self._order.doing} did not start in {limit:g} s.")
        return Loss(f"{self._order.doing} made no progress for {limit:g} s and was stopped")

    def _died(self) -> Loss:
        code = self._process.wait()
        self._words.seek(0)
        last_words = self._words.read().decode(errors="replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        what = ": ".join((how, *last_words))
        self.end()
        if not self._has_started:
            raise DataError(f"A process for {self._order.doing} could not be started ({what}).")
        return Loss(f"{self._order.doing} it ended the process ({what})")

    def end(self) -> None:
        """End it, whatever it does; one that waits for a device ends when that answers."""
        self.is_over = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.connection.close()
        self._words.close()
